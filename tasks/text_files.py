"""Tasks of a user's own text files, declared when a gin file asks for their name: `@text_files.pretraining()`.

Modules that import seqio and TensorFlow are imported when a task is first needed, so that gin files stay fast. The text
files are looked for when data are read, so a run can be compiled for a machine that does not have them.
"""

from collections.abc import Callable, Sequence

from switch_tf.configs import names
from switch_tf.refusals import Refusal

Files = str | Sequence[str]
_own: set[str] = set()  # names of tasks that were declared here


def pretraining(train_files: Files, validation_files: Files | None = None, text_field: str | int = "text",
                held_out_share: float = 0.05, max_bad_examples: int = 0, name: str = "text_files") -> str:
    """Declares span corruption on text files, with T5's vocabulary; returns its name.

    Args:
        train_files, validation_files, held_out_share, max_bad_examples: See `TextFilesSource`.
        text_field: Key or column of the text; .txt files have no fields.
        name: Name of the task. A task that was declared here before is replaced.

    Raises:
        Refusal: A task of another kind has the name. Other values are checked when the task is first needed.
    """
    def register():
        from switch_tf.tasks import preprocessors, text_source

        source = text_source.TextFilesSource({"text": text_field}, train_files, validation_files, "", held_out_share,
                                             max_bad_examples)
        _register(name, source, preprocessors.pretraining(preprocessors.span_corruption), [])

    return _declare(name, register)


def text_to_text(train_files: Files, validation_files: Files | None = None, input_field: str | int = "inputs",
                 target_field: str | int = "targets", prefix: str = "", metrics: Sequence[str] = (),
                 held_out_share: float = 0.05, max_bad_examples: int = 0, name: str = "text_to_text_files") -> str:
    """Declares a task from one text to another, with T5's vocabulary; returns its name.

    Args:
        train_files, validation_files, prefix, held_out_share, max_bad_examples: See `TextFilesSource`.
        input_field, target_field: Keys or columns of inputs and targets.
        metrics: Names of metrics, see `text_metrics`.
        name: Name of the task. A task that was declared here before is replaced.

    Raises:
        Refusal: A task of another kind has the name. Other values are checked when the task is first needed.
    """
    def register():
        import seqio

        from switch_tf.tasks import sentinels, text_metrics, text_source

        source = text_source.TextFilesSource({"inputs": input_field, "targets": target_field}, train_files,
                                             validation_files, prefix, held_out_share, max_bad_examples)
        steps = [seqio.preprocessors.tokenize, sentinels.spell_out, seqio.CacheDatasetPlaceholder(),
                 seqio.preprocessors.append_eos_after_trim]
        _register(name, source, steps, text_metrics.metric_functions(metrics))

    return _declare(name, register)


def _declare(name: str, register: Callable[[], None]) -> str:
    if name in names.task_names() - _own:
        raise Refusal(f"There is another task of the name {name!r}; give this one another.")
    _own.add(name)
    names.declare_tasks([name], register)
    return name


def _register(name, source, steps, metrics):
    import seqio

    from switch_tf.tasks import preprocessors, vocabularies

    if name in seqio.TaskRegistry.names():  # of another call
        seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add(name, source=source, preprocessors=steps, metric_fns=metrics,
                           output_features=preprocessors.output_features(vocabularies.t5()))
