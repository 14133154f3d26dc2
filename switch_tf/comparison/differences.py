"""Lists the differences between the configurations of two runs, the most important first, without TensorFlow."""

from collections.abc import Iterable

# Entries of `continuation.record`, ordered by how much they can explain of a difference between two losses.
_ORDER = ("SwitchConfig.", "SwitchTransformer.", "INITIAL_CHECKPOINT", "MIXTURE_OR_TASK_NAME", "training data",
          "held-out data", "vocabulary", "TASK_FEATURE_LENGTHS", "Run.pack", "Run.cache_parts", "optimizer",
          "learning rate", "BATCH_SIZE", "TRAIN_STEPS", "StepSettings.", "Run.eval_batches", "Run.", "EVAL_PERIOD")
# Entries without effect on the model and its held-out losses.
_WITHOUT_EFFECT = frozenset((
    "SEED", "LOG_PERIOD", "CHECKPOINT_PERIOD", "Run.keep_checkpoints", "Run.keep_every", "Run.unigram_batches",
    "Run.shown_examples", "Run.best_metric", "Run.eval_each_task", "StepSettings.steps_per_call",
    "SwitchConfig.end_id", "SwitchConfig.num_experts"))  # the table has a column for the last
# Fields of SwitchConfig without effect in a model without experts.
_OF_EXPERTS = frozenset(f"SwitchConfig.{name}" for name in (
    "expert_d_ff", "encoder_sparse_step", "decoder_sparse_step", "encoder_sparse_indices", "decoder_sparse_indices",
    "group_size", "num_groups_multiple", "train_capacity_factor", "eval_capacity_factor", "min_expert_capacity",
    "routing_policy", "decoder_routing_policy", "allow_non_causal_decoder", "num_selected_experts", "exploration",
    "jitter_noise", "second_expert_policy", "second_expert_threshold", "second_place_loss_weight",
    "expert_dropout_rate", "router_dtype", "load_balancing_loss_weight", "router_z_loss_weight", "expert_sublayers",
    "attention_expert_dtype", "expert_capacity", "semantics"))


def by_importance(names: Iterable[str]) -> list[str]:
    """Sorts names of a record: the model's first, periods last."""
    return sorted(names, key=lambda name: next(
        (place for place, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER)))


def sentences(first: str, wanted: dict, name: str, other: dict) -> list[str]:
    """Returns a sentence for each difference that matters between two records, the most important first.

    Args:
        first, name: str. Names of the runs.
        wanted, other: dict. Their records, from `continuation.record`.
    """
    wanted, other = _comparable(wanted), _comparable(other)
    return [_sentence(key, first, wanted[key], name, other[key]) for key in by_importance(wanted)
            if key in other and other[key] != wanted[key]]


def _comparable(record):
    """Removes entries without effect, and gives learning rates of all optimizers the same name."""
    kind = record["optimizer"]
    left_out = _WITHOUT_EFFECT | (frozenset() if record.get("SwitchConfig.num_experts") else _OF_EXPERTS)
    return {name.replace(f"{kind}.learning_rate", "learning rate"): value for name, value in record.items()
            if name not in left_out}


def _sentence(key, first, wanted, name, other):
    if not isinstance(wanted, dict) or key == "TASK_FEATURE_LENGTHS":
        return f"{key} is {wanted} in {first} and {other} in {name}."
    files = [file for file in sorted({*wanted, *other}) if wanted.get(file) != other.get(file)]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{key} differ between {first} and {name}: {files[0]}{more}."
