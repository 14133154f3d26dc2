"""A search over meshes, orders of their axes, group sizes and capacity factors, one kind after the other."""

import dataclasses
import itertools
import math
from typing import NamedTuple

from switch_tf.aot.estimate import Question
from switch_tf.partitioning.layout import Layout, mesh_shape

SMALLEST_GROUP = 256  # tokens; the share of dropped tokens grows as groups shrink
PAPERS_CAPACITY_FACTORS = (1.0, 1.25)
MOST_PERMUTED = 3  # mesh axes


class Choice(NamedTuple):
    """`group_size`: most tokens of a group; `capacity_factor`: in training; the others as Layout and SwitchConfig."""

    mesh_shape: str
    group_size: int
    num_groups_multiple: int
    capacity_factor: float

    def describe(self) -> str:
        """One line."""
        return f"{self.mesh_shape}, groups of {self.group_size}, capacity {self.capacity_factor:g}"

    def bindings(self, mesh_name: str, has_experts: bool) -> list[str]:
        """Returns the gin bindings of the choice; `mesh_name` is the macro or parameter of the mesh's shape."""
        bindings = [f"{mesh_name}='{self.mesh_shape}'"]
        if has_experts:
            bindings += [f"SwitchConfig.group_size={self.group_size}",
                         f"SwitchConfig.num_groups_multiple={self.num_groups_multiple}",
                         f"SwitchConfig.train_capacity_factor={self.capacity_factor}"]
        return bindings


def search(question: Question, ask, say) -> tuple[Choice, dict[Choice, dict]]:
    """Meshes, then the best one's axes in another order, then group sizes on the best of these, then capacity factors.

    Args:
        question: Question about the run from which to start.
        ask: function of {name: Choice} to {name: the JSON object of its answer, or {"mistake": sentence}}.
        say: function of a line of text.

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


def meshes(first: Choice, layout, num_experts: int, num_microbatches: int) -> list[Choice]:
    """A model axis of 1, 2, 4, 8 or 16 devices, or an axis of experts with 1, 2, 4 or 8 on each, and data as the rest.

    A layout that splits over neither keeps its mesh.
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
    """The same axes in each other order: the members of the last one are neighbours on the chips' network.

    Of more than three axes, whose orders are too many to ask for, those that exchange two neighbours.
    """
    mesh = Layout(best.mesh_shape).mesh
    long = [axis for axis, size in mesh.items() if size > 1]
    if len(long) > MOST_PERMUTED:
        others = ([*long[:place], long[place + 1], long[place], *long[place + 2:]] for place in range(len(long) - 1))
    else:
        others = map(list, itertools.permutations(long))
    # Axes of one device stay, at the end: a rule may name them, and of those that a mesh leaves out only one is open.
    return [best._replace(mesh_shape=mesh_shape({axis: mesh[axis] for axis in (*order, *mesh)}))
            for order in others if order != long]


def group_sizes(best: Choice, num_tokens: int) -> list[Choice]:
    """The size of its groups, which `num_tokens` at once may not fill, halved again and again."""
    sizes, size = [], min(best.group_size, num_tokens // best.num_groups_multiple) // 2
    while size >= SMALLEST_GROUP:
        sizes.append(best._replace(group_size=size))
        size //= 2
    return sizes


def capacity_factors(best: Choice) -> list[Choice]:
    """The paper's factors."""
    return [best._replace(capacity_factor=factor) for factor in PAPERS_CAPACITY_FACTORS
            if factor != best.capacity_factor]


def ranked(results: dict) -> list:
    """Keys of answers, those that fit and are predicted to be fastest first."""
    def order(key):
        result = results[key]
        seconds = result["predicted"]["step_seconds"] if "predicted" in result else math.inf
        return (not result.get("fits"), seconds)

    return sorted(results, key=order)
