"""Searches meshes, orders of their axes, group sizes and capacity factors."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from switch_tf.aot import answers
from switch_tf.configs.experiment import Experiment
from switch_tf.partitioning.layout import Layout, mesh_shape
from switch_tf.storage import outputs

SMALLEST_GROUP = 256  # tokens. Smaller groups drop more.
PAPERS_CAPACITY_FACTORS = (1.0, 1.25)
MOST_PERMUTED = 3  # mesh axes
SMALLEST_CHANGE = 0.01  # of a step, to be printed


class Choice(NamedTuple):
    """One point of the search. `capacity_factor` is `SwitchConfig.train_capacity_factor`.

    The other fields have the names of `Layout` and `SwitchConfig`.
    """

    mesh_shape: str
    group_size: int
    num_groups_multiple: int
    capacity_factor: float

    def describe(self) -> str:
        """Returns one line."""
        return f"{self.mesh_shape}, groups of {self.group_size}, capacity {self.capacity_factor:g}"

    def bindings(self, mesh_name: str, has_experts: bool) -> list[str]:
        """Returns the gin bindings. `mesh_name` is the macro or parameter of the mesh's shape."""
        bindings = [f"{mesh_name}='{self.mesh_shape}'"]
        if has_experts:
            bindings += [f"SwitchConfig.group_size={self.group_size}",
                         f"SwitchConfig.num_groups_multiple={self.num_groups_multiple}",
                         f"SwitchConfig.train_capacity_factor={self.capacity_factor}"]
        return bindings


def search(experiment: Experiment, ask: Callable[[dict[str, Choice]], dict[str, dict]]) -> tuple[
        Choice, dict[Choice, dict]]:
    """Tries meshes, orders of the best mesh's axes, then group sizes, then capacity factors.

    Args:
        experiment: Run to start from. Its layout has a complete mesh.
        ask: Maps {name: Choice} to {name: JSON object of the answer, or {"mistake": sentence}}.

    Returns:
        The run's own choice, and the answers, the best first.
    """
    config, layout, num_microbatches = experiment.config, experiment.layout, experiment.settings.num_microbatches
    own = Choice(mesh_shape(layout.mesh), config.group_size, config.num_groups_multiple, config.train_capacity_factor)
    first = meshes(own, layout, config.num_experts, num_microbatches)
    own = next((choice for choice in first if choice.mesh_shape == own.mesh_shape), own)
    results = {}

    def best_with(what, choices):
        new = {choice.describe(): choice for choice in choices if choice not in results}
        if new:
            outputs.say(f"Trying {len(new)} {what} ...")
            results.update({new[name]: answer for name, answer in ask(new).items()})
        return ranked(results)[0]

    best = best_with("meshes", [own, *first])
    best = best_with("orders of its axes on the chips' network", orders(best))
    if config.num_experts:
        num_tokens = experiment.run.batch_size * max(experiment.run.task_feature_lengths.values()) // num_microbatches
        # Halves the size down to SMALLEST_GROUP.
        largest = min(best.group_size, num_tokens // best.num_groups_multiple)
        sizes = itertools.takewhile(
            lambda size: size >= SMALLEST_GROUP, (largest >> times for times in itertools.count(1)))
        best = best_with("group sizes", [best._replace(group_size=size) for size in sizes])
        best_with("capacity factors", [best._replace(capacity_factor=factor) for factor in PAPERS_CAPACITY_FACTORS
                                       if factor != best.capacity_factor])
    return own, {choice: results[choice] for choice in ranked(results)}


def meshes(first: Choice, layout: Layout, num_experts: int, num_microbatches: int) -> list[Choice]:
    """Returns meshes with a model axis of 1 to 16 devices, or an expert axis with 1 to 8 experts per device.

    The data axis takes the remaining devices. A layout without these axes keeps its mesh.
    """
    used = {axis for logical, _ in layout.rules for axis in layout.mesh_axes(logical)}
    inner = next((axis for axis in ("model", "expert") if axis in used), None)
    sizes = {None: [1], "model": [1, 2, 4, 8, 16],
             "expert": [num_experts // count for count in (1, 2, 4, 8) if num_experts % count == 0]}[inner]
    fixed_size = math.prod(size for axis, size in layout.mesh.items() if axis not in ("data", inner))
    choices = []
    for size in sizes:
        data = layout.num_devices // (size * fixed_size)
        if data * size * fixed_size == layout.num_devices:
            shape = mesh_shape({**layout.mesh, "data": data, **({inner: size} if inner else {})})
            pieces = dataclasses.replace(layout, mesh_shape=shape).num_pieces("batch")
            multiple = math.lcm(first.num_groups_multiple, pieces * num_microbatches)
            choices.append(first._replace(mesh_shape=shape, num_groups_multiple=multiple))
    return choices


def orders(best: Choice) -> list[Choice]:
    """Returns the mesh with its axes in other orders. Members of the last axis are neighbours on the network.

    With more than three axes, only neighbouring axes are exchanged.
    """
    mesh = Layout(best.mesh_shape).mesh
    long = [axis for axis, size in mesh.items() if size > 1]
    if len(long) > MOST_PERMUTED:
        variants = ([*long[:place], long[place + 1], long[place], *long[place + 2:]] for place in range(len(long) - 1))
    else:
        variants = map(list, itertools.permutations(long))
    # Axes of one device stay at the end: a rule may name them.
    return [best._replace(mesh_shape=mesh_shape({axis: mesh[axis] for axis in (*order, *mesh)}))
            for order in variants if order != long]


def ranked(found: dict) -> list:
    """Sorts the keys of answers: first by fit, then by predicted time."""
    return sorted(found, key=lambda key: (
        not found[key].get("fits"), found[key].get("predicted", {"step_seconds": math.inf})["step_seconds"]))


def ranking(own: Choice, found: dict[Choice, dict], bindings: list[str]) -> str:
    """Returns the table of answers, the best choice's flags, and its gains over the run's own choice by part.

    `bindings` belong to the best choice, the first of `found`.
    """
    best, *worse = found
    lines = [answers.table({choice.describe(): answer for choice, answer in found.items()})]
    if found[best].get("fits"):
        flags = (f'--gin.{name}="{value}"' if "'" in value else f"--gin.{name}={value}"
                 for name, _, value in (binding.partition("=") for binding in bindings))
        lines.append("The best: " + " ".join(flags))
        other = own if best != own and "predicted" in found[own] else next(
            (choice for choice in worse if "predicted" in found[choice]), None)
        if other is not None:
            before, after = (collections.Counter(found[choice]["predicted"]["parts"]) for choice in (other, best))
            gains = answers.longest({part: before[part] - after[part] for part in before | after})
            smallest = SMALLEST_CHANGE * found[other]["predicted"]["step_seconds"]
            changes = ", ".join(f"{part} {1e3 * before[part]:.1f} -> {1e3 * after[part]:.1f} ms"
                                for part, gain in gains if abs(gain) > smallest)
            lines.append(f"Against {other.describe()}{' (as it was)' if other == own else ''}: "
                         f"{changes or 'they take the same'}.")
    return "\n".join(lines)
