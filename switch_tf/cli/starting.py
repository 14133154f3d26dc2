"""Starts of runs: early refusals, weights from elsewhere, the vocabulary, and the head of the configuration."""

import contextlib
import datetime
import json
import pathlib
import shlex
import sys
import tempfile

from switch_tf.checkpoints import continuation, folders, run_config
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs import factories, names
from switch_tf.configs.choices import nearest
from switch_tf.configs.experiment import Experiment
from switch_tf.refusals import Refusal

_VOCABULARY = "switch_tf.configs.run.Run.vocabulary"


def check(described: Experiment) -> None:
    """Refuses a run that cannot start or go on, as far as that is seen without TensorFlow.

    Raises:
        Refusal: A VOCABULARY or a task of BEST_METRIC that does not exist, or a model or batches other than those
            of the newest checkpoint.
    """
    run = described.run
    if run.vocabulary is not None and not run_config.is_in(run.model_dir):  # a run keeps a copy of its own
        names.check_vocabulary(run.vocabulary)
    tasks = [run.mixture_or_task_name, *sorted(names.task_names())]
    metric = run.best_metric and run.best_metric.rpartition("/")[2]
    known = [f"eval/{task}/{metric}" for task in tasks]
    if metric and run.best_metric not in ("eval/average", *known) and not run.best_metric.startswith(
            tuple(f"eval/{task}" for task in tasks)):
        raise Refusal(f"BEST_METRIC must be of a task that this run evaluates, not {run.best_metric!r}."
                         f"{nearest(run.best_metric, known)}")
    _check_checkpoint(described)


def _check_checkpoint(described):
    """Compares what is known before TensorFlow is imported; the trainer compares everything."""
    run = described.run
    if described.config is None:
        return
    for path in folders.newest_first(RunFolder.checkpoints_of(run.model_dir)):
        try:
            saved = folders.describe(path).get("configuration", {})
        except folders.BrokenCheckpoint:
            continue  # the run passes over it
        new = continuation.record_of_model(described.config) | {
            "BATCH_SIZE": run.batch_size, "MIXTURE_OR_TASK_NAME": run.mixture_or_task_name,
            "TASK_FEATURE_LENGTHS": run.task_feature_lengths}
        continuation.check(saved, json.loads(json.dumps(new, default=lambda value: type(value).__name__)), path,
                           run.restart_changed_data)
        return


@contextlib.contextmanager
def converted(run):
    """Within this scope, gives the checkpoint of weights that a new run starts from if they are Hugging Face's."""
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
    """Returns the trainer of a run that gin has parsed, with the vocabulary that its weights need.

    Args:
        described: Experiment.
        initial_weights: See `Trainer`.

    Raises:
        ValueError: See `Trainer`.
    """
    import gin

    vocabulary = _vocabulary(described.run)
    if vocabulary != described.run.vocabulary:
        is_macro = str(_bound(_VOCABULARY)) == "%VOCABULARY"
        gin.bind_parameter("VOCABULARY/gin.macro.value" if is_macro else _VOCABULARY, vocabulary)
    return gin.get_configurable(factories.Trainer)(
        partitioner=described.partitioner, initial_weights=initial_weights,
        activation_dtype=_bound("ACTIVATION_DTYPE/gin.macro.value"))


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
    """Returns the VOCABULARY that gives a task the vocabulary of a run; None if the task has it or takes no other."""
    from switch_tf.data import providers, stored_vocabularies

    of_task = providers.text_vocabularies_of(task)
    try:
        kept = set(map(stored_vocabularies.Stored.from_data, run_config.read(folder).vocabularies.values()))
        if len(kept) != 1 or not of_task:
            return None
        (stored,) = kept
        if all(stored_vocabularies.name_of(vocabulary) == stored.name for vocabulary in of_task):
            return None  # found by name: reading the task's own may need the network
        choice = stored_vocabularies.choice_of(stored, folder)
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
    for stored in map(stored_vocabularies.Stored.from_data, run_config.read(run.model_dir).vocabularies.values()):
        if stored.name == run.vocabulary and stored.file:
            kept = pathlib.Path(run.model_dir) / stored.file
            raise Refusal(f"VOCABULARY {run.vocabulary!r} is not there any more; this run keeps a copy of it: "
                          f"--gin.VOCABULARY=\"'{kept}'\".")


def origin(words: list[str], config) -> str:
    """Returns the comments at the head of a run's configuration: the command, the time and the versions."""
    import keras
    import tensorflow as tf

    import switch_tf
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return (f"# {shlex.join(['switch-tf', *words])}\n"
            f"# {now}, switch_tf {switch_tf.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
            f"# {config.num_parameters:,} parameters\n\n")
