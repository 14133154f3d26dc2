"""Dimensions over which Adafactor factors the second moment of a weight."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_ROWS = frozenset(("embed",))
_COLUMNS = frozenset(("vocab", "heads", "kv", "mlp", "expert_mlp"))
_STACKED = frozenset(("expert",))


class Factors(NamedTuple):
    """Dimensions of a weight by role. Each index of the `stacked` dimensions (experts) is a separate matrix."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def factor_dimensions(shape: Sequence[int], axes: Sequence[str | None], min_size: int = 128) -> Factors | None:
    """Returns the roles of a weight's dimensions, or None to keep the whole second moment.

    Logical axes decide, as in T5X, regardless of sizes: embed is the rows; mlp, heads, kv and vocab are the columns;
    experts are stacked. Weights with other axes (routers, position biases, other packages' layers) are factored over
    their two largest dimensions if both have at least `min_size`.

    Args:
        shape: Sizes of the weight's dimensions.
        axes: Logical axis or None for each dimension.
        min_size: int.
    """
    by_role = [tuple(dim for dim, axis in enumerate(axes) if axis in role) for role in (_STACKED, _ROWS, _COLUMNS)]
    if sum(map(len, by_role)) == len(shape) and by_role[1] and by_role[2]:
        return Factors(*by_role)
    if len(shape) < 2:
        return None
    *rest, small, large = sorted(range(len(shape)), key=lambda dim: shape[dim])
    if shape[small] < min_size:
        return None
    rows, columns = sorted((small, large))
    return Factors(tuple(sorted(rest)), (rows,), (columns,))


def slot_dimensions(shape: Sequence[int], factors: Factors | None) -> dict[str, tuple[int, ...]]:
    """Returns the dimensions kept by each slot: `v_row` and `v_col`, or `v` with all of them."""
    every = tuple(range(len(shape)))
    if factors is None:
        return {"v": every}
    return {"v_row": tuple(dim for dim in every if dim not in factors.columns),
            "v_col": tuple(dim for dim in every if dim not in factors.rows)}


def num_slot_elements(shape: Sequence[int], axes: Sequence[str | None]) -> int:
    """Counts the elements of Adafactor's slots for one weight. Arguments as for `factor_dimensions`."""
    slots = slot_dimensions(shape, factor_dimensions(shape, axes))
    return sum(math.prod(shape[dim] for dim in dims) for dims in slots.values())
