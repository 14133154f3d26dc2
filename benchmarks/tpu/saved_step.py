"""Reader of the files of `switch-tf compile --json --save`: programs of each depth, and sums by part for all layers."""

import argparse
import json
import pathlib

from switch_tf.aot import hlo
from switch_tf.aot.hlo import attribute


def add_arguments(parser: argparse.ArgumentParser):
    """Declares the files to read."""
    parser.add_argument("answer", type=_read, help="file with the output of `switch-tf compile --json`")
    parser.add_argument("folder", type=pathlib.Path, help="folder of --save")


def _read(file):
    return json.loads(pathlib.Path(file).read_text())


def program(folder: pathlib.Path, depth: tuple[int, int]) -> tuple[hlo.Module, dict]:
    """Returns the program of a step of one depth with the attribution of its operations."""
    module = hlo.Module((folder / f"step_{'_'.join(map(str, depth))}.optimized.hlo").read_text())
    return module, attribute(module)


def of_all_layers(answer: dict, points: list[dict[str, float]]) -> dict[str, float]:
    """Extrapolates numbers by part from the compiled depths to the whole model."""
    if len(points) == 1:
        return points[0]
    total, first, second = (sum(depth) for depth in (answer["layers"], *answer["compiled_layers"]))
    units = (total - first) / (second - first)
    return {part: points[0].get(part, 0.0) + units * (points[1].get(part, 0.0) - points[0].get(part, 0.0))
            for part in {**points[0], **points[1]}}
