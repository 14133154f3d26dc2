"""The share of a teacher's gain that a student keeps (Tables 6 to 8 of the paper)."""

import numpy as np

from switch_tf.comparison.curves import Curves

# In the record of a run, the `folders.identity` of its teacher's checkpoint.
_TEACHER = "Distillation.teacher"


def share_of_gain(paired: list[tuple[Curves, Curves]], curves: list[Curves]) -> dict | None:
    """Returns the share of a variant whose teachers are among the runs, JSON-able; None for any other variant.

    Args:
        paired: Each run of the variant with the baseline of its seed.
        curves: All runs.

    Returns:
        dict of `teacher`, the name of a variant; `share`, the mean gain of the variant over the baseline divided by
        that of the teacher, None if the teacher has none; `shares`, the same by seed; and `compression`, the share of
        the teacher's parameters that the student lacks.
    """
    of_checkpoint = {run.checkpoint: run for run in curves}
    teachers = [of_checkpoint.get(run.record.get(_TEACHER)) for run, _ in paired]
    if not all(teachers) or len({teacher.name for teacher in teachers}) > 1:
        return None
    gains = [float(reference.losses[-1] - run.losses[-1]) for run, reference in paired]
    whole = [float(reference.losses[-1] - teacher.losses[-1])
             for (_, reference), teacher in zip(paired, teachers, strict=True)]
    student, teacher = paired[0][0].config, teachers[0].config
    return {"teacher": teachers[0].name, "share": _divided(float(np.mean(gains)), float(np.mean(whole))),
            "shares": [_divided(*pair) for pair in zip(gains, whole, strict=True)],
            "compression": 1 - student.num_parameters / teacher.num_parameters}


def _divided(gain, whole):
    return gain / whole if whole > 0 else None


def sentence(variant: dict, baseline: str) -> str | None:
    """Returns a sentence about `share_of_gain` of a variant of the results, None without one."""
    kept = variant["distilled"]
    if kept is None or variant["name"] == baseline:
        return None
    size = f"with {kept['compression']:.0%} fewer parameters"
    if kept["share"] is None:
        return (f"{kept['teacher']} is no better than {baseline}, so there is no gain that {variant['name']}, {size}, "
                "could keep.")
    by_seed = ", ".join("none to keep" if share is None else f"{share:.0%}" for share in kept["shares"])
    amount = f"{kept['share']:.0%}" if kept["share"] > 0 else "nothing"
    return (f"{variant['name']} keeps {amount} of the gain of {kept['teacher']} over {baseline} "
            + f"({by_seed} by seed) " * (len(kept["shares"]) > 1) + f"{size}.")
