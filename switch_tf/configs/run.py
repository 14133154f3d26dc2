"""Descriptions of a run and its training step, without TensorFlow."""

import dataclasses

from switch_tf import checks
from switch_tf.configs.choices import by_name, check_fields
from switch_tf.refusals import Refusal

# Fields of Run that gin files set by macros.
MACROS = ("model_dir", "mixture_or_task_name", "task_feature_lengths", "train_steps", "batch_size", "log_period",
          "eval_period", "checkpoint_period", "initial_checkpoint", "best_metric", "patience", "vocabulary",
          "use_cached_tasks", "cache_dir", "cache_parts", "seed")
# See `choices.check`. Messages name fields as macros or as "Run.name".
_AS_MACROS = by_name({
    1: "train_steps batch_size log_period checkpoint_period eval_batches keep_checkpoints cache_parts",
    0: "eval_period unigram_batches seed keep_every patience shown_examples profile_steps",
    checks.place: "model_dir initial_checkpoint cache_dir", checks.text: "mixture_or_task_name vocabulary best_metric",
    checks.lengths: "task_feature_lengths", checks.flag: "use_cached_tasks"})
_OF_RUN = by_name({
    ("stop", "continue"): "on_failed_save", ("stop", "save"): "on_sigusr1", "above 0": "max_hours",
    ("all", "matching", "with_optimizer"): "initial_variables", 0: "skip_corrupt_records"})
_OF_STEP = by_name({
    1: "num_microbatches steps_per_call", "0 or above": "z_loss_weight", "in [0, 1)": "label_smoothing",
    "above 0": "clip_norm", checks.flag: "use_xla"})


@dataclasses.dataclass(frozen=True)
class Run:
    """Description of a training run, without its model.

    Args:
        model_dir: The run folder. The same command resumes its run.
        mixture_or_task_name: Registered seqio task or mixture.
        task_feature_lengths: Tokens of "inputs" and "targets".
        train_steps: Last step.
        batch_size: Sequences of the whole batch.
        log_period, eval_period, checkpoint_period: Steps between logs, evaluations and checkpoints. An eval_period of 0
            never evaluates.
        eval_batches: Largest number of validation batches.
        eval_each_task: Also evaluate the loss of each task of a mixture, on the same number of batches.
        unigram_batches: Training batches for a unigram model. Its loss is logged at step 0. 0 counts none.
        pack: Several examples in one sequence.
        vocabulary: Replaces the task's own: "t5", "mt5", "bytes", "docs_corpus", or the path of a SentencePiece model.
        use_cached_tasks: Read tokens from `switch-tf cache`.
        cache_dir: None for the default of `switch-tf cache`.
        cache_parts: Parts of a training batch, from text or from a cache. Each process reads only its parts, so use on
            a pod the number of pieces that the layout cuts a batch into. Another number gives other batches.
        skip_corrupt_records: Corrupt cache records to skip, for each task and each of the cache_parts. One more ends
            the run.
        seed: Seed of initial weights, order of the data, dropout and jitter.
        initial_checkpoint: Run folder or checkpoint with the weights of a new run.
        initial_variables: "all" reads every weight, from the same model. "matching" reads weights that both models have
            with the same shape: all but the experts between a dense and a sparse model. "with_optimizer" reads every
            weight, the optimizer's slots and the step, and starts at the beginning of the data.
        restart_changed_data: Restart data that changed since the checkpoint. False refuses to resume then
            (`continuation.py`).
        keep_checkpoints: Recent checkpoints to keep.
        keep_every: Also keep every checkpoint at a multiple of this step. 0 keeps none.
        on_failed_save: "stop" ends a run whose checkpoint cannot be written. "continue" prints the error and trains on,
            except at the end of the run.
        on_sigusr1: "stop" saves and ends the run at SIGUSR1, as at SIGTERM. "save" saves and trains on.
        max_hours: Hours after which the run is saved and ended.
        best_metric: Also keep the checkpoint with the best value of this metric, such as "eval/glue_mrpc/f1". See
            `directions`.
        patience: Evaluations without a better value before stopping, counted from the first finite value. 0 never
            stops.
        shown_examples: Held-out examples to print with predictions at the end, at most a batch.
        profile_steps: Steps to record with the profiler, soon after each start. 0 records none.
    """

    model_dir: str
    mixture_or_task_name: str
    task_feature_lengths: dict
    train_steps: int
    batch_size: int
    log_period: int = 100
    eval_period: int = 1000
    checkpoint_period: int = 1000
    eval_batches: int = 20
    eval_each_task: bool = False
    unigram_batches: int = 0
    pack: bool = False
    vocabulary: str | None = None
    use_cached_tasks: bool = False
    cache_dir: str | None = None
    cache_parts: int = 1
    skip_corrupt_records: int = 0
    seed: int = 0
    initial_checkpoint: str | None = None
    initial_variables: str = "all"
    restart_changed_data: bool = False
    keep_checkpoints: int = 3
    keep_every: int = 0
    on_failed_save: str = "stop"
    on_sigusr1: str = "stop"
    max_hours: float | None = None
    best_metric: str | None = None
    patience: int = 0
    shown_examples: int = 0
    profile_steps: int = 0

    def __post_init__(self):
        check_fields(self, _AS_MACROS, str.upper)
        check_fields(self, by_name({checks.flag: "pack restart_changed_data eval_each_task"}))
        check_fields(self, _OF_RUN, "Run.{}".format)
        if self.batch_size % self.cache_parts:
            raise Refusal(f"CACHE_PARTS must divide BATCH_SIZE ({self.batch_size}), not {self.cache_parts}.")
        if self.skip_corrupt_records and not self.use_cached_tasks:
            raise Refusal(f"Run.skip_corrupt_records ({self.skip_corrupt_records}) leaves out records of a cache, "
                          "which is read by index; set USE_CACHED_TASKS=True, or mend the data.")
        if self.best_metric is None:
            if self.patience:
                raise Refusal(f"PATIENCE ({self.patience}) waits for a better BEST_METRIC; set it, for example to "
                              "'eval/<task>/<metric>'.")
            return
        if not self.best_metric.startswith("eval/"):
            raise Refusal("BEST_METRIC must be the name of what evaluations write, 'eval/<task>/<metric>', not "
                          f"{self.best_metric!r}.")
        if not self.eval_period:
            raise Refusal("BEST_METRIC is measured by evaluations, and EVAL_PERIOD=0 has none; set it to some "
                          "number of steps.")


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Settings of the training step, without the model and the optimizer.

    Args:
        z_loss_weight: Coefficient of logsumexp(logits)^2 in the cross-entropy.
        label_smoothing: In [0, 1).
        num_microbatches: Equal parts of the batch, processed in turn to save memory. The gradient is of the whole
            batch.
        clip_norm: Scales down gradients with a larger global norm.
        steps_per_call: Training steps in one compiled call. The host sees their mean metrics.
        use_xla: Compile the step with XLA. On a CPU only the optimizer's update, because TensorFlow's products are
            faster there.
        trainable: Weights to train: "all", "all_but_experts", "experts", "router" or "decoder".
    """

    z_loss_weight: float = 1e-4
    label_smoothing: float = 0.0
    num_microbatches: int = 1
    clip_norm: float | None = None
    steps_per_call: int = 1
    use_xla: bool = False
    trainable: str = "all"

    def __post_init__(self):
        check_fields(self, _OF_STEP)
        check_fields(self, {"trainable": ("all", "all_but_experts", "experts", "router", "decoder")}, str.upper)


def check_periods(run: Run, settings: StepSettings) -> None:
    """Raises Refusal unless `steps_per_call` divides every period."""
    for name in ("train_steps", "log_period", "eval_period", "checkpoint_period", "keep_every", "profile_steps"):
        if getattr(run, name) % settings.steps_per_call:
            raise Refusal(f"{name.upper()} must be a multiple of steps_per_call ({settings.steps_per_call}), "
                          f"because the host sees nothing in between; it is {getattr(run, name)}.")
