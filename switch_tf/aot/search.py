"""Search over meshes, orders of their axes, group sizes and capacity factors, one kind after the other."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from switch_tf.partitioning.layout import Layout, mesh_shape

if TYPE_CHECKING:
    from switch_tf.aot.estimate import Question  # imports TensorFlow, which a search does not need

SMALLEST_GROUP = 256  # tokens. Smaller groups drop more tokens.
PAPERS_CAPACITY_FACTORS = (1.0, 1.25)
MOST_PERMUTED = 3  # mesh axes


class Choice(NamedTuple):
    """One point of the search.

    Attributes:
        mesh_shape: Shape of the mesh, as in `Layout`.
        group_size: Largest number of tokens in a group.
        num_groups_multiple: As in `SwitchConfig`.
        capacity_factor: Capacity factor in training.
    """

    mesh_shape: str
    group_size: int
    num_groups_multiple: int
    capacity_factor: float

    def describe(self) -> str:
        """Returns the choice as one line."""
        return f"{self.mesh_shape}, groups of {self.group_size}, capacity {self.capacity_factor:g}"

    def bindings(self, mesh_name: str, has_experts: bool) -> list[str]:
        """Returns the gin bindings of the choice; `mesh_name` is the macro or parameter of the mesh's shape."""
        bindings = [f"{mesh_name}='{self.mesh_shape}'"]
        if has_experts:
            bindings += [f"SwitchConfig.group_size={self.group_size}",
                         f"SwitchConfig.num_groups_multiple={self.num_groups_multiple}",
                         f"SwitchConfig.train_capacity_factor={self.capacity_factor}"]
        return bindings


def search(question: "Question", ask: Callable[[dict[str, Choice]], dict[str, dict]],
           say: Callable[[str], None]) -> tuple[Choice, dict[Choice, dict]]:
    """Tries meshes, orders of the best mesh's axes, group sizes on the best of these, and capacity factors.

    Args:
        question: Run to start from.
        ask: Maps {name: Choice} to {name: JSON object of the answer, or {"mistake": sentence}}.
        say: Prints a line.

    Returns:
        The run's own choice, and the answers by choice, the best first.
    """
    config, layout, num_microbatches = question.config, question.layout, question.settings.num_microbatches
    own = Choice(mesh_shape(layout.mesh), config.group_size, config.num_groups_multiple, config.train_capacity_factor)
    first = meshes(own, layout, config.num_experts, num_microbatches)
    own = next((choice for choice in first if choice.mesh_shape == own.mesh_shape), own)
    results = {}

    def best_with(what, choices):
        new = {choice.describe(): choice for choice in choices if choice not in results}
        if new:
            say(f"Trying {len(new)} {what} ...")
            results.update({new[name]: result for name, result in ask(new).items()})
        return ranked(results)[0]

    best = best_with("meshes", [own, *first])
    best = best_with("orders of its axes on the chips' network", orders(best))
    if config.num_experts:
        num_tokens = question.batch_size * max(question.task_feature_lengths.values()) // num_microbatches
        best = best_with("group sizes", group_sizes(best, num_tokens))
        best_with("capacity factors", capacity_factors(best))
    return own, {choice: results[choice] for choice in ranked(results)}


def meshes(first: Choice, layout: Layout, num_experts: int, num_microbatches: int) -> list[Choice]:
    """Returns meshes with a model axis of 1 to 16 devices, or an expert axis with 1 to 8 experts on each device.

    The data axis takes the other devices. A layout without these axes keeps its mesh.
    """
    used = {axis for logical, _ in layout.rules for axis in layout.mesh_axes(logical)}
    inner = next((axis for axis in ("model", "expert") if axis in used), None)
    sizes = {None: [1], "model": [1, 2, 4, 8, 16],
             "expert": [num_experts // count for count in (1, 2, 4, 8) if num_experts % count == 0]}[inner]
    others = math.prod(size for axis, size in layout.mesh.items() if axis not in ("data", inner))
    choices = []
    for size in sizes:
        data = layout.num_devices // (size * others)
        if data * size * others == layout.num_devices:
            shape = mesh_shape({**layout.mesh, "data": data, **({inner: size} if inner else {})})
            pieces = dataclasses.replace(layout, mesh_shape=shape).num_pieces("batch")
            multiple = math.lcm(first.num_groups_multiple, pieces * num_microbatches)
            choices.append(first._replace(mesh_shape=shape, num_groups_multiple=multiple))
    return choices


def orders(best: Choice) -> list[Choice]:
    """Returns the mesh with its axes in other orders. Members of the last axis are neighbours on the chips' network.

    More than three axes have too many orders, so only two neighbouring axes are exchanged at a time.
    """
    mesh = Layout(best.mesh_shape).mesh
    long = [axis for axis, size in mesh.items() if size > 1]
    if len(long) > MOST_PERMUTED:
        others = ([*long[:place], long[place + 1], long[place], *long[place + 2:]] for place in range(len(long) - 1))
    else:
        others = map(list, itertools.permutations(long))
    # Axes of one device stay, at the end: a rule may name them, and a mesh may leave out only one axis.
    return [best._replace(mesh_shape=mesh_shape({axis: mesh[axis] for axis in (*order, *mesh)}))
            for order in others if order != long]


def group_sizes(best: Choice, num_tokens: int) -> list[Choice]:
    """Returns group sizes that halve the present one, or the number of tokens if it is less, down to the smallest."""
    sizes, size = [], min(best.group_size, num_tokens // best.num_groups_multiple) // 2
    while size >= SMALLEST_GROUP:
        sizes.append(best._replace(group_size=size))
        size //= 2
    return sizes


def capacity_factors(best: Choice) -> list[Choice]:
    """Returns the paper's capacity factors other than the present one."""
    return [best._replace(capacity_factor=factor) for factor in PAPERS_CAPACITY_FACTORS
            if factor != best.capacity_factor]


def ranked(results: dict) -> list:
    """Sorts the keys of answers: first those that fit, then by predicted time."""
    def order(key):
        result = results[key]
        seconds = result["predicted"]["step_seconds"] if "predicted" in result else math.inf
        return (not result.get("fits"), seconds)

    return sorted(results, key=order)
