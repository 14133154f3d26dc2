"""Checks of a run against its names and its newest checkpoint that need no TensorFlow."""

from switch_tf.checkpoints import continuation, folders, run_config
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs import names
from switch_tf.configs.choices import nearest
from switch_tf.configs.experiment import Experiment
from switch_tf.refusals import Refusal


def check(described: Experiment) -> None:
    """Refuses a run that cannot start or resume, in the cases known without TensorFlow.

    Raises:
        Refusal: VOCABULARY or the task of BEST_METRIC does not exist, or the model or the batches differ from those of
            the newest checkpoint.
    """
    run = described.run
    if run.vocabulary is not None and not run_config.is_in(run.model_dir):  # a run folder has a copy
        names.check_vocabulary(run.vocabulary)
    metric = run.best_metric and run.best_metric.rpartition("/")[2]
    if metric and run.best_metric != "eval/average" and not run.best_metric.startswith(
            tuple(f"eval/{task}" for task in (run.mixture_or_task_name, *names.task_names()))):
        hint = nearest(run.best_metric, [f"eval/{run.mixture_or_task_name}/{metric}"])
        raise Refusal(f"BEST_METRIC must be of a task that this run evaluates, not {run.best_metric!r}."
                      + (hint or f" The task of this run is {run.mixture_or_task_name!r}."))
    _check_checkpoint(described)


def _check_checkpoint(described):
    """Compares the values that are known without TensorFlow. The trainer compares all values."""
    run = described.run
    if described.config is None:
        return
    newest = next(folders.described(RunFolder.checkpoints_of(run.model_dir)), None)
    if newest is None:
        return
    path, description = newest
    new = continuation.record_of_model(described.config) | {
        "BATCH_SIZE": run.batch_size, "MIXTURE_OR_TASK_NAME": run.mixture_or_task_name,
        "TASK_FEATURE_LENGTHS": run.task_feature_lengths}
    continuation.check(description["configuration"], continuation.as_recorded(new), path, run.restart_changed_data)
