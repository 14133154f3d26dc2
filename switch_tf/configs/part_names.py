"""Full names of the parts of runs in gin files, which are known without an import."""

_FACTORIES = "switch_tf.configs.factories"
# Place -> other modules by which gin files may name the part.
PLACES = {
    "switch_tf.configs.switch_config.SwitchConfig": ("switch_tf", "switch_tf.config"),
    "switch_tf.configs.run.Run": ("switch_tf.training.run",),
    "switch_tf.configs.run.StepSettings": ("switch_tf.training.run",),
    "switch_tf.partitioning.layout.Layout": ("switch_tf.partitioning",),
    f"{_FACTORIES}.SwitchTransformer": ("switch_tf", "switch_tf.models", "switch_tf.models.switch_transformer"),
    f"{_FACTORIES}.dtype_policy": ("switch_tf.partitioning", "switch_tf.partitioning.dtypes", "switch_tf.ops.dtypes"),
    f"{_FACTORIES}.Adafactor": ("switch_tf.optim", "switch_tf.optim.adafactor"),
    f"{_FACTORIES}.RsqrtDecay": ("switch_tf.optim", "switch_tf.optim.schedules"),
    f"{_FACTORIES}.Cooldown": ("switch_tf.optim", "switch_tf.optim.schedules"),
    f"{_FACTORIES}.Distillation": ("switch_tf.surgery.distillation",),
    f"{_FACTORIES}.create_partitioner": ("switch_tf.partitioning", "switch_tf.partitioning.backends"),
    f"{_FACTORIES}.Trainer": ("switch_tf.training.trainer",),
}
TRAINER = f"{_FACTORIES}.Trainer"
# Full name in a gin file -> place.
PARTS = {f"{module}.{place.rpartition('.')[2]}": place
         for place, modules in PLACES.items() for module in (place.rpartition(".")[0], *modules)}

TASKS = "switch_tf.tasks"
_OPTIMIZERS = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam",
               "RMSprop", "SGD", "ScheduleFreeAdamW")
_SCHEDULES = ("CosineDecay", "CosineDecayRestarts", "ExponentialDecay", "InverseTimeDecay", "PiecewiseConstantDecay",
              "PolynomialDecay")
# Full names that the gin file of a run may bind and refer to.
ALLOWED = {*PARTS, f"{TASKS}.text_files.pretraining", f"{TASKS}.text_files.text_to_text",
            *(f"keras.optimizers.{name}" for name in _OPTIMIZERS),
            *(f"keras.optimizers.schedules.{name}" for name in _SCHEDULES)}
# Modules that it may import, beside those of tasks.
MODULES = {"keras", TASKS, *(name.rpartition(".")[0] for name in ALLOWED)}
# gin also records the parameters of functions that t5 makes configurable. They may be bound, but not referred to.
LIBRARIES = {
    "t5.data.preprocessors": (
        "concatenate_and_split_to_fixed_length", "denoise", "drop_noise_tokens", "drop_nonnoise_tokens",
        "filter_by_string_length", "iid_noise_mask", "noise_span_to_sentinel", "noise_span_to_unique_sentinel",
        "noise_token_to_gathered_token", "noise_token_to_random_token", "noise_token_to_random_token_or_sentinel",
        "noise_token_to_sentinel", "nonnoise_span_to_sentinel", "nonnoise_span_to_unique_sentinel",
        "permute_noise_tokens", "random_prefix_noise_mask", "random_spans_helper", "random_spans_noise_mask",
        "random_spans_targets_length", "random_spans_tokens_length", "record", "reduce_concat_tokens",
        "regular_noise_mask", "select_random_chunk", "sentinel_id", "split_tokens", "split_tokens_to_inputs_length",
        "split_tokens_to_random_length", "split_tokens_to_targets_length", "unsupervised"),
    "t5.data.utils": ("rate_num_examples", "rate_unsupervised"),
}
BOUND = ALLOWED | {f"{module}.{name}" for module, names in LIBRARIES.items() for name in names}
