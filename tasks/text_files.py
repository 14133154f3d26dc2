"""Tasks of a user's own text files, registered when a gin file asks for their name: `@text_files.pretraining()`.

The files are looked for when data are read, so a run can be compiled for a machine that has them.
"""

from collections.abc import Sequence

import seqio

from switch_tf.refusals import Refusal
from switch_tf.tasks import preprocessors, sentinels, text_metrics, vocabularies
from switch_tf.tasks.text_source import TextFilesSource

Files = str | Sequence[str]


def pretraining(train_files: Files, validation_files: Files | None = None, text_field: str | int = "text",
                held_out_share: float = 0.05, max_bad_examples: int = 0, name: str = "text_files") -> str:
    """Registers span corruption on text files, with T5's vocabulary; returns the name.

    Args:
        train_files, validation_files, held_out_share, max_bad_examples: see `TextFilesSource`.
        text_field: key or column of the text; .txt files have no fields.
        name: str, of the task. One that was registered here before is replaced.

    Raises:
        Refusal: a value that cannot be used.
    """
    source = TextFilesSource({"text": text_field}, train_files, validation_files, "", held_out_share, max_bad_examples)
    return _register(name, source, preprocessors.pretraining(preprocessors.span_corruption), [])


def text_to_text(train_files: Files, validation_files: Files | None = None, input_field: str | int = "inputs",
                 target_field: str | int = "targets", prefix: str = "", metrics: Sequence[str] = (),
                 held_out_share: float = 0.05, max_bad_examples: int = 0, name: str = "text_to_text_files") -> str:
    """Registers a task from one text to another, with T5's vocabulary; returns the name.

    Args:
        train_files, validation_files, prefix, held_out_share, max_bad_examples: see `TextFilesSource`.
        input_field, target_field: keys or columns of inputs and targets.
        metrics: names, see `text_metrics`.
        name: str, of the task. One that was registered here before is replaced.

    Raises:
        Refusal: a value that cannot be used.
    """
    source = TextFilesSource({"inputs": input_field, "targets": target_field}, train_files, validation_files, prefix,
                             held_out_share, max_bad_examples)
    steps = [seqio.preprocessors.tokenize, sentinels.spell_out, seqio.CacheDatasetPlaceholder(),
             seqio.preprocessors.append_eos_after_trim]
    return _register(name, source, steps, text_metrics.metric_functions(metrics))


def _register(name, source, steps, metrics):
    if name in seqio.TaskRegistry.names():
        if not isinstance(seqio.TaskRegistry.get(name).source, TextFilesSource):
            raise Refusal(f"There is another task of the name {name!r}; give this one another.")
        seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add(name, source=source, preprocessors=steps, metric_fns=metrics,
                           output_features=preprocessors.output_features(vocabularies.t5()))
    return name
