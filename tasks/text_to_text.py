"""Common parts of tasks to fine-tune on, text to text on prepared data of TFDS, and their mixtures."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import seqio
import tensorflow as tf

from switch_tf.data import evaluation_sets
from switch_tf.tasks import prepared_tfds, preprocessors, sentinels, vocabularies

TRAIN_VALIDATION_TEST = ("train", "validation", "test")

# For steps that do not branch on a tensor, because AutoGraph would take seconds in every process.
plain = tf.autograph.experimental.do_not_convert


def add_task(
    name: str,
    tfds_name: str,
    steps: Sequence[Callable],
    metric_fns: Sequence[Callable],
    postprocess_fn: Callable | None = None,
    splits: Mapping[str, str] | Iterable[str] = TRAIN_VALIDATION_TEST,
) -> None:
    """Registers a task of text to text, with T5's vocabulary.

    Args:
        name: str. Name of the task.
        tfds_name: str. Name, config and version of the data set, which has to be prepared.
        steps: Preprocessors from the features of the data set to `{"inputs": string, "targets": string}` and the
            entries that `postprocess_fn` needs.
        metric_fns: Functions of (targets, predictions), both results of `postprocess_fn`.
        postprocess_fn: seqio's function of decoded targets and predictions. None leaves them unchanged.
        splits: seqio's split -> split of the data set, or splits with the same name in both.
    """
    seqio.TaskRegistry.add(
        name,
        source=prepared_tfds.PreparedTfdsSource(
            tfds_name, splits if isinstance(splits, Mapping) else {split: split for split in splits}
        ),
        preprocessors=[*steps, *tokens()],
        postprocess_fn=postprocess_fn,
        metric_fns=list(metric_fns),
        output_features=preprocessors.output_features(vocabularies.t5()),
    )


def tokens() -> list[Callable]:
    """Returns the last steps of a task: text to tokens without sentinels, end of sequence."""
    return [
        plain(seqio.preprocessors.tokenize),
        plain(sentinels.spell_out),
        seqio.CacheDatasetPlaceholder(),
        plain(seqio.preprocessors.append_eos_after_trim),
    ]


def add_mixture(
    name: str, sizes: Mapping[str, float | None], limit: float = float("inf"), temperature: float = 1.0
) -> None:
    """Registers a mixture that draws a task of n examples in proportion to min(n, limit) ** (1 / temperature).

    T5 (arXiv 1910.10683, section 3.5.2) calls that examples-proportional mixing at temperature 1, temperature-scaled
    mixing above it, and equal mixing at infinity.

    Args:
        name: str. Name of the mixture.
        sizes: Task -> number of training examples. None counts them in the prepared data, 0 marks a task that is only
            evaluated. The evaluation sets of a task (`evaluation_sets`) share its rate, so that each task has the same
            weight in the held-out loss as in training.
        limit: float. Largest number of examples that counts.
        temperature: float of at least 1.
    """

    def rate(name):
        size = sizes[name]
        if temperature == float("inf"):
            return 1.0
        if size == 0:
            return 1.0  # without a training split it is never drawn, and 0 would leave it out of evaluations
        size = seqio.TaskRegistry.get(name).num_input_examples("train") if size is None else size
        return min(size, limit) ** (1 / temperature)

    def shared_rate(task):
        owner = evaluation_sets.evaluation_owner(task.name)
        if owner == task.name or owner not in sizes:
            return rate(task.name)
        return rate(owner) / sum(evaluation_sets.evaluation_owner(name) == owner != name for name in sizes)

    seqio.MixtureRegistry.add(name, list(sizes), default_rate=shared_rate)
