"""What `switch-tf compile --json --save` left behind: the programs of each depth, and sums by part for all layers."""

import argparse
import json
import pathlib

from switch_tf.aot import hlo
from switch_tf.aot.attribution import Attribution


def add_arguments(parser: argparse.ArgumentParser):
    """Declares what to read."""
    parser.add_argument("answer", type=_read, help="what `switch-tf compile --json` printed, a file")
    parser.add_argument("folder", type=pathlib.Path, help="what it saved")


def _read(file):
    return json.loads(pathlib.Path(file).read_text())


def programs(folder: pathlib.Path, depth: tuple[int, int]) -> list[tuple[hlo.Module, Attribution]]:
    """The programs of a step of some depth, in order, with what tells the part of the model of an operation."""
    text = (folder / f"step_{'_'.join(map(str, depth))}.optimized.hlo").read_text()
    modules = map(hlo.Module, text.split("// update\n"))
    return [(module, Attribution(module, default)) for module, default in zip(
        modules, ("logits and loss", "optimizer"), strict=False)]


def of_all_layers(answer: dict, points: list[dict[str, float]]) -> dict[str, float]:
    """Numbers by part, of each depth that was compiled, to those of the whole model."""
    if len(points) == 1:
        return points[0]
    total, first, second = (sum(depth) for depth in (answer["layers"], *answer["compiled_layers"]))
    units = (total - first) / (second - first)
    return {part: points[0].get(part, 0.0) + units * (points[1].get(part, 0.0) - points[0].get(part, 0.0))
            for part in {**points[0], **points[1]}}
