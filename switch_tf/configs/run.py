"""What a run is besides its model, and whether a model, a batch and a layout go together; none of it needs TensorFlow.

So what a user got wrong is refused before TensorFlow is imported, and anything is built.
"""

import dataclasses

from switch_tf import checks
from switch_tf.configs.choices import TRAINABLE, check_choice
from switch_tf.refusals import Refusal


@dataclasses.dataclass(frozen=True)
class Run:
    """Where a run lives, what it reads, and how often it does what.

    Args:
        model_dir: str, the run folder. The same command on it goes on where it stopped.
        mixture_or_task_name: str, a registered seqio task or mixture.
        task_feature_lengths: dict, "inputs" and "targets" in tokens.
        train_steps: int, where to stop.
        batch_size: int, sequences.
        log_period, eval_period, checkpoint_period: int, in steps; an eval_period of 0 never evaluates.
        eval_batches: int, batches of the validation split at most in each evaluation.
        eval_each_task: bool. Evaluate the loss of each task of a mixture by itself as well, on so many batches each.
        unigram_batches: int. Compare evaluations with the loss of a unigram model counted on so many training batches;
            0 does not.
        pack: bool, several examples in one sequence.
        vocabulary: str or None. In place of the task's own: "t5", "mt5", "bytes", "docs_corpus", or the path of a
            SentencePiece model.
        use_cached_tasks: bool. Read the tokens that `switch-tf cache` made, by their index, instead of the text.
        cache_dir: str or None. Where they are, if not where that command puts them by default.
        cache_parts: int. A training batch from there is made of so many parts. Processes read those that they have rows
            in, so set it to how many processes there are on a pod; another number gives other batches.
        seed: int, of initial weights, order of the data, dropout and jitter.
        initial_checkpoint: str or None. Run folder or checkpoint whose weights a new run starts from.
        restart_changed_data: bool. Where the data are no longer those that the run stopped in, go on from their
            beginning; otherwise such a start is refused (`continuation.py`).
        keep_checkpoints: int, the newest so many are kept,
        keep_every: int, ... and those of each so many steps, for good; 0 for none,
        best_metric: str or None, ... and the best one by what evaluations write under this name, for example
            "eval/glue_mrpc/f1". Whether the lowest or the highest is the best, the metric decides (`directions`).
        patience: int. Stop after this number of evaluations in a row that were no better than the best; 0 never stops.
            A value that is not finite is no better than any, and the count begins with the first finite value.
        shown_examples: int. At the end, print what the model makes of so many held-out examples, at most a batch.
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
    seed: int = 0
    initial_checkpoint: str | None = None
    restart_changed_data: bool = False
    keep_checkpoints: int = 3
    keep_every: int = 0
    best_metric: str | None = None
    patience: int = 0
    shown_examples: int = 0

    def __post_init__(self):
        for name, at_least in (("train_steps", 1), ("batch_size", 1), ("log_period", 1), ("eval_period", 0),
                               ("checkpoint_period", 1), ("eval_batches", 1), ("unigram_batches", 0), ("seed", 0),
                               ("keep_checkpoints", 1), ("cache_parts", 1), ("keep_every", 0), ("patience", 0),
                               ("shown_examples", 0)):
            object.__setattr__(self, name, checks.integer(name.upper(), getattr(self, name), at_least))
        checks.fields(self, ("pack", "restart_changed_data", "eval_each_task"), checks.flag)
        checks.flag("USE_CACHED_TASKS", self.use_cached_tasks)
        for name, check in (("model_dir", checks.local), ("mixture_or_task_name", checks.text),
                            ("task_feature_lengths", checks.lengths)):
            object.__setattr__(self, name, check(name.upper(), getattr(self, name)))
        if self.use_cached_tasks and self.batch_size % self.cache_parts:
            raise Refusal(f"CACHE_PARTS must divide BATCH_SIZE ({self.batch_size}), not {self.cache_parts}.")
        for name, check in (("initial_checkpoint", checks.local), ("vocabulary", checks.text),
                            ("cache_dir", checks.local)):
            checks.optional(name.upper(), getattr(self, name), check)
        if self.best_metric is None:
            if self.patience:
                raise Refusal(f"PATIENCE ({self.patience}) waits for a better BEST_METRIC; set it, for example to "
                              "'eval/<task>/<metric>'.")
            return
        if not checks.text("BEST_METRIC", self.best_metric).startswith("eval/"):
            raise Refusal("BEST_METRIC must be the name of what evaluations write, 'eval/<task>/<metric>', not "
                          f"{self.best_metric!r}.")
        if not self.eval_period:
            raise Refusal("BEST_METRIC is measured by evaluations, and EVAL_PERIOD=0 has none; set it to some "
                          "number of steps.")


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What a training step does besides the model and the optimizer.

    Args:
        z_loss_weight: float. Coefficient of logsumexp(logits)^2 in the cross-entropy.
        label_smoothing: float in [0, 1).
        num_microbatches: int. The batch is processed in so many equal parts, one after the other, with the same
            gradient as in one piece and less memory.
        clip_norm: float or None. Gradients whose global norm exceeds it are scaled down to it.
        steps_per_call: int. Training steps in one call of the compiled function; the host sees their mean metrics.
        use_xla: bool. Compile the step with XLA; on a CPU only the optimizer's update, because TensorFlow's own
            products are faster there.
        trainable: str, which weights are trained: "all", "all_but_experts", "experts", "router" or "decoder".
    """

    z_loss_weight: float = 1e-4
    label_smoothing: float = 0.0
    num_microbatches: int = 1
    clip_norm: float | None = None
    steps_per_call: int = 1
    use_xla: bool = False
    trainable: str = "all"

    def __post_init__(self):
        checks.fields(self, ("num_microbatches", "steps_per_call"), checks.integer, 1)
        checks.fields(self, ("z_loss_weight",), checks.number, "0 or above")
        checks.fields(self, ("label_smoothing",), checks.number, "in [0, 1)")
        checks.fields(self, ("use_xla",), checks.flag)
        check_choice("TRAINABLE", self.trainable, TRAINABLE)
        if self.clip_norm is not None:
            checks.fields(self, ("clip_norm",), checks.number, "above 0")


def check_periods(run: Run, settings: StepSettings) -> None:
    """Raises Refusal unless whatever is done every so many steps falls between two calls of the step's function."""
    for name in ("train_steps", "log_period", "eval_period", "checkpoint_period", "keep_every"):
        if getattr(run, name) % settings.steps_per_call:
            raise Refusal(f"{name.upper()} must be a multiple of steps_per_call ({settings.steps_per_call}), "
                          f"because the host sees nothing in between; it is {getattr(run, name)}.")
