"""Which meshes, group sizes and capacity factors to try, one kind after the other, and which answer is best."""

import math
from typing import NamedTuple

from switch_tf.partitioning.layout import mesh_shape

SMALLEST_GROUP = 256  # tokens; the share of dropped tokens grows as groups shrink
PAPERS_CAPACITY_FACTORS = (1.0, 1.25)


class Choice(NamedTuple):
    """`group_size`: most tokens of a group; `capacity_factor`: in training; the others as Layout and SwitchConfig."""

    mesh_shape: str
    group_size: int
    num_groups_multiple: int
    capacity_factor: float

    def describe(self) -> str:
        """One line."""
        return f"{self.mesh_shape}, groups of {self.group_size}, capacity {self.capacity_factor:g}"


def meshes(first: Choice, layout, num_devices: int, num_microbatches: int) -> list[Choice]:
    """The model axis, where the layout has one, as 1, 2, 4, 8 or 16 devices, and the data axis as the rest."""
    uses_model = any(axis == "model" for _, axis in layout.rules)
    others = math.prod(size for axis, size in layout.mesh.items() if axis not in ("data", "model"))
    choices = []
    for model in (1, 2, 4, 8, 16) if uses_model else (layout.mesh.get("model", 1),):
        data = num_devices // (model * others)
        if data * model * others == num_devices:
            sizes = {**layout.mesh, "data": data, **({"model": model} if uses_model else {})}
            multiple = math.lcm(first.num_groups_multiple, data * num_microbatches)
            choices.append(first._replace(mesh_shape=mesh_shape(sizes), num_groups_multiple=multiple))
    return choices


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
    """Keys of answers, those that fit and are predicted to be fastest, links after the rest, first."""
    def order(key):
        result = results[key]
        seconds = result["predicted"]["step_seconds"][1] if "predicted" in result else math.inf
        return (not result.get("fits"), seconds)

    return sorted(results, key=order)
