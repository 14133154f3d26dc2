"""What commands that start runs share: weights from elsewhere, and where a configuration is from."""

import contextlib
import datetime
import pathlib
import re
import shlex
import sys
import tempfile

from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.refusals import Refusal

_VOCABULARY = "switch_tf.configs.run.Run.vocabulary"


@contextlib.contextmanager
def converted(run):
    """A checkpoint of the weights that a new run starts from where those are Hugging Face's, while the scope lasts."""
    folder = run.initial_checkpoint
    is_new = not folders.steps(RunFolder.checkpoints_of(run.model_dir))
    if folder is None or not is_new or not run_config.is_hugging_face(folder):
        yield None
        return
    from switch_tf import conversion
    print(f"Reading the weights of {folder} ...", file=sys.stderr)
    # Through a file, because a checkpoint's variables are read into any layout.
    with tempfile.TemporaryDirectory() as temporary:
        conversion.to_switch_tf(conversion.from_hugging_face(folder), pathlib.Path(temporary) / "weights")
        yield pathlib.Path(temporary) / "weights"


def make_trainer(described, initial_weights):
    """The trainer of a run that gin has parsed, with the vocabulary that its weights need.

    Args:
        described: GinRun.
        initial_weights: see `Trainer`.

    Raises:
        ValueError: see `Trainer`.
    """
    import gin

    from switch_tf.training.trainer import Trainer
    vocabulary = _vocabulary(described.run)
    if vocabulary != described.run.vocabulary:
        is_macro = str(_bound(_VOCABULARY)) == "%VOCABULARY"
        gin.bind_parameter("VOCABULARY/gin.macro.value" if is_macro else _VOCABULARY, vocabulary)
    return gin.get_configurable(Trainer)(partitioner=described.partitioner, initial_weights=initial_weights,
                                         activation_dtype=_bound("ACTIVATION_DTYPE/gin.macro.value"))


def check_used(bindings) -> None:
    """Refuses a macro of the command line that no part of the run has read; for when gin has made the trainer.

    Args:
        bindings: list of str, "NAME=VALUE".

    Raises:
        ValueError: names the macro.
    """
    import gin
    read = gin.operative_config_str()
    for name in (binding.partition("=")[0].strip() for binding in bindings):
        if "." not in name and not re.search(rf"^{re.escape(name)} =", read, re.MULTILINE):
            raise Refusal(f"{name} is set, but no part of this run reads it; leave it out, or refer to %{name} in "
                          "a gin file, as in: keras.optimizers.AdamW.learning_rate = %LEARNING_RATE.")


def _bound(name):
    """Returns the value that is bound to a parameter, None if there is none."""
    import gin
    try:
        return gin.query_parameter(name)
    except ValueError:
        return None


def _vocabulary(run):
    """Returns the VOCABULARY of a run: its own choice, else that of the run whose weights it starts from."""
    goes_on = bool(folders.steps(RunFolder.checkpoints_of(run.model_dir)))
    if run.vocabulary is not None:
        if goes_on:
            _check_vocabulary_is_there(run)
        return run.vocabulary
    if run.initial_checkpoint is None:
        return None
    # A resumed run has its own copy. The other run may be gone.
    folder = pathlib.Path(run.model_dir if goes_on else run.initial_checkpoint)
    if (folder / "checkpoint.json").is_file():
        folder = folder.parent.parent
    return _vocabulary_of(folder, run.mixture_or_task_name) if run_config.is_in(folder) else None


def _vocabulary_of(folder, task):
    """The VOCABULARY that gives a task the vocabulary of a run; None where the task has it, or takes no other."""
    from switch_tf.data import providers, stored_vocabularies

    own = providers.text_vocabularies_of(task)
    try:
        stored = {stored_vocabularies.Stored.from_data(one) for one in run_config.read(folder).vocabularies.values()}
        if len(stored) != 1 or not own:
            return None
        (one,) = stored
        if all(stored_vocabularies.name_of(vocabulary) == one.name for vocabulary in own):
            return None  # found by name: reading the task's own may need the network
        choice = stored_vocabularies.choice_of(one, folder)
    except ValueError as error:
        print(f"The vocabulary that {folder} keeps is not used: {error}", file=sys.stderr)
        return None
    if choice is not None:
        print(f"VOCABULARY is that of {folder}: {choice}.", file=sys.stderr)
    return choice


def _check_vocabulary_is_there(run):
    """Refuses a VOCABULARY whose file is gone, if the run keeps a copy of it, and names the copy."""
    from switch_tf.data import stored_vocabularies, vocabularies

    if "://" in run.vocabulary or vocabularies.is_registered(run.vocabulary) or pathlib.Path(run.vocabulary).exists() \
            or not run_config.is_in(run.model_dir):
        return
    for one in map(stored_vocabularies.Stored.from_data, run_config.read(run.model_dir).vocabularies.values()):
        if one.name == run.vocabulary and one.file:
            copy_ = pathlib.Path(run.model_dir) / one.file
            raise Refusal(f"VOCABULARY {run.vocabulary!r} is not there any more; this run keeps a copy of it: "
                          f"--gin.VOCABULARY=\"'{copy_}'\".")


def origin(words: list[str], config) -> str:
    """Comments before a configuration: what a reader of the run folder will ask."""
    import keras
    import tensorflow as tf

    import switch_tf
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return (f"# {shlex.join(['switch-tf', *words])}\n"
            f"# {now}, switch_tf {switch_tf.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
            f"# {config.num_parameters:,} parameters\n\n")
