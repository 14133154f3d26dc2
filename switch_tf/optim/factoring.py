"""Factored dimensions of Adafactor's second moments, and the bytes of weights and slots."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.partitioning.layout import Layout

_ROWS = frozenset(("embed",))
_COLUMNS = frozenset(("vocab", "heads", "kv", "mlp", "expert_mlp"))
_STACKED = frozenset(("expert",))


class Factors(NamedTuple):
    """Dimensions of a weight by role. Each index of the `stacked` dimensions (experts) is a separate matrix."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def factor_dimensions(shape: Sequence[int], axes: Sequence[str | None]) -> Factors | None:
    """Returns the roles of a weight's dimensions, or None to keep the whole second moment.

    Logical axes decide at any size, as in T5X: embed is the rows; mlp, heads, kv and vocab are the columns; experts are
    stacked. Weights with other axes (routers, position biases) are factored over their two largest dimensions if both
    have at least 128 entries.
    """
    by_role = [tuple(dim for dim, axis in enumerate(axes) if axis in role) for role in (_STACKED, _ROWS, _COLUMNS)]
    if sum(map(len, by_role)) == len(shape) and by_role[1] and by_role[2]:
        return Factors(*by_role)
    if len(shape) < 2:
        return None
    *rest, small, large = sorted(range(len(shape)), key=lambda dim: shape[dim])
    if shape[small] < 128:
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


def stored_bytes(config: SwitchConfig) -> dict[str, int]:
    """Returns the bytes of float32 weights, of Adafactor's slots and, to compare, of Adam's two slots."""
    weights, slots = _bytes(config, lambda shape, axes: math.prod(shape))
    return {"weights": weights, "optimizer": slots, "optimizer_adam": 2 * weights}


def bytes_per_device(config: SwitchConfig, layout: Layout) -> dict:
    """Returns each device's bytes of float32 weights and Adafactor's slots, under a layout with a complete mesh."""
    layout.check_sizes(config.axis_sizes)
    weights, slots = _bytes(config, lambda shape, axes: math.prod(
        layout.piece(shape, layout.spec(axes, at_rest=True)) if layout.stores_pieces else shape))
    return {"weights": weights, "optimizer_slots": slots, "total": weights + slots, "mesh": layout.mesh}


def _bytes(config, count):
    """`count` maps shape and axes to the number of stored elements."""
    weights = slots = 0
    for weight in config.weights():
        weights += 4 * weight.count * count(weight.shape, weight.axes)
        factors = factor_dimensions(weight.shape, weight.axes)
        for dims in slot_dimensions(weight.shape, factors).values():
            slots += 4 * weight.count * count([weight.shape[dim] for dim in dims], [weight.axes[dim] for dim in dims])
    return weights, slots
