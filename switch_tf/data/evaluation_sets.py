"""Tasks that hold the evaluation data of another task, such as MNLI's two development sets."""

from switch_tf import checks

_owners = {}  # evaluation set -> task


def register_evaluation_sets(task: str, sets: list[str]) -> None:
    """Declares the tasks on which a task without an evaluation split is evaluated.

    They count as one task in averages, as in GLUE, and share their owner's weight in a mixture.

    Args:
        task: Name of the task to train on.
        sets: Names of the tasks to evaluate on.
    """
    checks.text("The name of a task", task)
    for name in sets:
        _owners[checks.text("The name of an evaluation set", name)] = task


def evaluation_owner(task: str) -> str:
    """Returns the task that an evaluation set belongs to, or the given name."""
    return _owners.get(task, task)
