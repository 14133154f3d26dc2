"""Reads the state of Mesh TensorFlow's Adafactor, which has for each variable x_slot_vr and x_slot_vc, or x_slot_v.

The factoring is that of `mesh_tensorflow/optimize.py`: over the two largest dimensions if both are large enough. "vr"
is the mean over the largest one, of equal ones the first, and "vc" the mean over the other.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from switch_tf.conversion import mesh_tensorflow_file
from switch_tf.conversion.checkpoint_files import Tensor
from switch_tf.conversion.optimizer_slots import read_adafactor, unlike, with_momentum, with_ones
from switch_tf.conversion.rules import Rules
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor

SLOT = re.compile(r"(.+)_slot_(vr|vc|v|m)")


def read_optimizer(prefix: Any, model: SwitchTransformer, rules: Rules, weights: Mapping[str, Tensor]) -> Adafactor:
    """Returns the Adafactor of a checkpoint of Mesh TensorFlow.

    Args:
        prefix: Path such as `folder/model.ckpt-1000`.
        model: SwitchTransformer that was read from it.
        rules: The rules that read it.
        weights: Name -> weight of the checkpoint.

    Raises:
        Refusal: The checkpoint has no such state, or one that cannot be represented.
    """
    slots: dict[str, dict[str, Tensor]] = {}
    for name, tensor in mesh_tensorflow_file.open_variables(prefix, lambda name: bool(SLOT.fullmatch(name))).items():
        weight, _, slot = name.rpartition("_slot_")
        slots.setdefault(weight, {})[slot] = tensor
    theirs = {name: _used(name, weights[name].shape, group) if name in weights else group
              for name, group in slots.items()}
    return read_adafactor(model, rules, theirs, mesh_tensorflow_file.read_step(prefix), prefix)


def _used(name, shape, slots):
    """Returns {"v": slot} or {"v_row": slot, "v_col": slot}, with size 1 for averaged dimensions."""
    if slots.keys() == {"v"}:
        return slots
    if "m" in slots:
        raise with_momentum(name)
    averaged = [int(dim) for dim in np.argsort([-size for size in shape], kind="stable")[:2]]
    if slots.keys() != {"vr", "vc"} or len(averaged) < 2:
        raise unlike(name, shape, slots, "Mesh TensorFlow")
    used = {ours: with_ones(slots[slot], shape, [dim])
            for ours, slot, dim in zip(("v_row", "v_col"), ("vr", "vc"), averaged, strict=True)}
    if None in used.values():
        raise unlike(name, shape, slots, "Mesh TensorFlow")
    return used
