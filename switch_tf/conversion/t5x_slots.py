"""Reads the state of T5X's Adafactor, which has for each weight the arrays v_row and v_col, or v, and m.

Arrays that are not used have shape (1,). `MultiOptimizer` keeps the same tree, with None for weights that it does not
train. The factoring is that of `t5x/adafactor.py`: a matrix is factored over its two dimensions if both have at least
128, the smaller one as rows; arrays with more dimensions, experts and scanned layers among them, by logical axes.
"""

import pathlib
import re
from collections.abc import Mapping

import numpy as np

from switch_tf.conversion import t5x_arrays, t5x_scan
from switch_tf.conversion.checkpoint_files import Tensor
from switch_tf.conversion.optimizer_slots import read_adafactor, unlike, with_momentum, with_ones
from switch_tf.conversion.rules import Rules
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.refusals import Refusal

_SLOT = re.compile(r"state/param_states/(.+)/(v_row|v_col|v|m)")
_SLOTS = {"v_row", "v_col", "v", "m"}
_UNUSED = (1,)
_EMBED_LAST = re.compile(r".*/(?:embedding|out/kernel|wo/kernel)")


def read_optimizer(folder: pathlib.Path, model: SwitchTransformer, rules: Rules) -> Adafactor:
    """Returns the Adafactor of a T5X checkpoint.

    Args:
        folder: Path of the checkpoint.
        model: SwitchTransformer that was read from it.
        rules: T5X's rules.

    Raises:
        Refusal: The checkpoint has another optimizer's state, or one that cannot be represented.
    """
    weights = t5x_arrays.open_arrays(folder)
    step, state = t5x_arrays.open_state(folder)
    slots = {}
    for name, slot in state.items():
        match = _SLOT.fullmatch(name)
        weight = f"target/{match[1]}" if match else None
        if weight not in weights:
            raise Refusal(f"The checkpoint's optimizer holds {name!r}, and T5X's Adafactor holds v_row, v_col, v and m "
                          "of each weight; convert the weights alone, without --with_optimizer.")
        slots.setdefault(weight, {})[match[2]] = slot
    used = {f"{name}/{slot}": tensor for name, group in slots.items()
            for slot, tensor in _used(name, weights[name].shape, group).items()}
    theirs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in t5x_scan.unscan(used, model.config).items():
        weight, _, slot = name.rpartition("/")
        theirs.setdefault(weight, {})[slot] = tensor
    return read_adafactor(model, rules, theirs, step, folder)


def _used(name: str, shape: tuple[int, ...], slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns {"v": slot} or {"v_row": slot, "v_col": slot}, with size 1 for averaged dimensions."""
    if "m" in slots and slots["m"].shape != _UNUSED:
        raise with_momentum(name)
    if slots.keys() != _SLOTS:
        raise unlike(name, shape, slots, "T5X")
    if slots["v"].shape == shape:
        return {"v": slots["v"]}
    rows, columns = _factored(name, shape)
    used = {"v_row": with_ones(slots["v_row"], shape, columns), "v_col": with_ones(slots["v_col"], shape, rows)}
    if not rows or not columns or None in used.values():
        raise unlike(name, shape, slots, "T5X")
    return used


def _factored(name, shape):
    """Returns the rows and the columns of an array."""
    is_scanned = t5x_scan.is_scanned(name)
    if len(shape) == 2 and not is_scanned:
        smaller, larger = (int(dim) for dim in np.argsort(shape, kind="stable"))
        return (smaller,), (larger,)
    batch = ({0} if "/expert/" in name else set()) | ({1} if is_scanned else set())
    dims = tuple(dim for dim in range(len(shape)) if dim not in batch)
    return (dims[-1:], dims[:-1]) if _EMBED_LAST.fullmatch(name) else (dims[:1], dims[1:])
