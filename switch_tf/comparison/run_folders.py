"""The run folders that a report compares."""

import pathlib
import re
from collections.abc import Iterable

from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.comparison import curves
from switch_tf.comparison.report import table, words, write
from switch_tf.refusals import Refusal
from switch_tf.storage import places

_SEED = re.compile(r"seed_\d+")


def find(folders: Iterable) -> list[tuple[str, pathlib.Path]]:
    """Returns (name of the variant, run folder) of each run.

    Args:
        folders: Run folders, and folders of comparisons, which stand for all of their runs.

    Raises:
        Refusal: There are fewer than two runs, or one of them twice.
    """
    runs = []
    for folder in map(places.at, folders):
        runs_of_comparison = sorted(path.parent for path in folder.glob("*/seed_*/checkpoints"))
        if RunFolder.checkpoints_of(folder).is_dir() or not runs_of_comparison:
            runs.append(folder)
        else:
            runs += runs_of_comparison
    if len(runs) < 2:
        raise Refusal("--runs compares at least two run folders; name several, or the folder of a comparison.")
    resolved = [folder.resolve() for folder in runs]
    for folder, place in zip(runs, resolved, strict=True):
        if resolved.count(place) > 1:
            raise Refusal(f"--runs names {str(folder)!r} twice; name each run once.")
    return [(_variant_of(folder), folder) for folder in runs]


def _variant_of(folder):
    is_seed = _SEED.fullmatch(folder.resolve().name)
    return (folder.parent if is_seed else folder).resolve().name


def report(output: str | pathlib.Path, runs: Iterable[tuple[str, pathlib.Path]],
           is_complete: bool = True) -> tuple[dict, str]:
    """Writes the report on runs.

    Args:
        output: Folder of the report.
        runs: (name of the variant, run folder) of each run.
        is_complete: Whether every run must have an evaluation. Otherwise runs without one are left out.

    Returns:
        (content of comparison.json, text for people). Without any evaluation the first is {}.

    Raises:
        Refusal: A run has no evaluation, the runs cannot be compared, or the report cannot be written.
    """
    evaluated = []
    for name, folder in runs:
        try:
            evaluated.append(curves.read(folder, name))
        except Refusal:
            if is_complete:
                raise
    if not evaluated:
        return {}, "No run was evaluated yet, so there is no report."
    result = write(output, curves.told_apart(evaluated))
    folder = places.at(output)
    return result, "\n".join([table(result), *words(result), f"Report: {folder / 'comparison.html'}",
                              f"Plot:   {folder / 'comparison.png'}"])
