"""Tasks that hold the evaluation data of another task, such as MNLI's two development sets."""

from switch_tf import checks

_owners: dict[str, str] = {}


def register_evaluation_sets(task: str, sets: list[str]) -> None:
    """Declares the tasks on which a task without an evaluation split is evaluated.

    In an average over tasks they count as one task, as in GLUE's own average, and `evaluation_owner` gives their weight
    in a mixture.

    Args:
        task: str. Name of the task to train on.
        sets: Names of the tasks to evaluate on.

    Raises:
        Refusal: A name is not text.
    """
    checks.text("The name of a task", task)
    for name in sets:
        _owners[checks.text("The name of an evaluation set", name)] = task


def evaluation_owner(task: str) -> str:
    """Returns the name of the task that a task is an evaluation set of, or its own name."""
    return _owners.get(task, task)
