"""Adafactor's slots of other software, given to this package's Adafactor.

A slot is a mean of squared gradients. Both sides keep it whole ("v"), or its means over columns and over rows ("v_row",
"v_col"), and need not choose the same. Means of a whole slot are those that factored slots would have, because every
step averages linearly. Rows and columns may be exchanged: the second moment is their product divided by the mean of
either. A whole slot cannot be had from its means, and neither can means over other dimensions.
"""

import pathlib
from collections.abc import Collection, Mapping

import numpy as np

from switch_tf import partitioning
from switch_tf.conversion.rules import Link, Rules
from switch_tf.conversion.untrusted_files import Tensor
from switch_tf.conversion.weight_source import variables_of
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.factoring import factor_dimensions, slot_dimensions
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress

Slots = Mapping[str, Tensor]


def read_adafactor(model: SwitchTransformer, rules: Rules, theirs: Mapping[str, Slots], step: int,
                   folder: pathlib.Path) -> Adafactor:
    """Returns an Adafactor of a model with the slots of a checkpoint, read one at a time.

    Args:
        model: SwitchTransformer, built, with the weights of the checkpoint.
        rules: The rules that link them.
        theirs: Their name of a weight -> {"v": slot} or {"v_row": slot, "v_col": slot}. In factored slots, dimensions
            that were averaged over have size 1.
        step: Number of steps taken.
        folder: Path of the checkpoint, for messages.
    """
    optimizer = Adafactor()
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(step)
    variables = variables_of(model)
    links = {link.theirs[0]: link for link in rules.link(variables)}
    if missing := next((name for name in links if name not in theirs), None):
        raise Refusal(f"The checkpoint has no slots of Adafactor for {missing!r}: its optimizer did not train that "
                      "weight, or is another one; convert the weights alone, without --with_optimizer.")
    if unknown := next((name for name in theirs if name not in links), None):
        raise Refusal(f"The checkpoint has slots of {unknown!r}, and no such weight; convert the weights alone, "
                      "without --with_optimizer.")
    total = 4 * sum(slot.size for slots in theirs.values() for slot in slots.values())
    with progress.bar(total, "reading the optimizer") as bar:
        for name, slots in theirs.items():
            variable = variables[links[name].ours]
            for slot, values in _as_ours(links[name], partitioning.axes_of(variable), slots).items():
                if not np.isfinite(values).all() or (values < 0).any():
                    raise Refusal(f"The slot {slot!r} of {name!r} in {folder} must hold means of squares, and has "
                                  "values that are not finite or negative; read an earlier checkpoint, or the weights "
                                  "alone, without --with_optimizer.")
                optimizer.slots_of(variable)[slot].assign(values)
            bar.update(4 * sum(slot.size for slot in slots.values()))
    return optimizer


def used_slots(name: str, shape: tuple[int, ...], slots: Slots, averaged: Mapping[str, tuple[str, Collection[int]]],
               software: str) -> dict[str, Tensor]:
    """Returns the slots of a weight as `read_adafactor` takes them.

    Args:
        name, shape: Name and shape of the weight.
        slots: Means of its squared gradients, by their names. An array of shape (1,) is not used.
        averaged: "v_row" and "v_col" -> (name of the slot in their checkpoint, dimensions that the slot averages over).
        software: Name of the software that keeps them so, for messages.
    """
    if "m" in slots and slots["m"].shape != (1,):
        raise Refusal(f"The checkpoint's optimizer keeps momentum of {name!r}, and this package's Adafactor has none; "
                      "convert the weights alone, without --with_optimizer.")
    if "v" in slots and slots["v"].shape == shape:
        return {"v": slots["v"]}
    used = {}
    for ours, (theirs, dims) in averaged.items():
        kept = tuple(size for dim, size in enumerate(shape) if dim not in dims)
        if not dims or theirs not in slots or slots[theirs].shape != kept:
            raise Refusal(f"The checkpoint's optimizer keeps {_listed(slots)} of {name!r} of shape {shape}, and "
                          f"{software}'s Adafactor keeps a slot of that shape, or means over its two largest "
                          "dimensions or by its logical axes; convert the weights alone, without --with_optimizer.")
        used[ours] = _reshaped(slots[theirs], _with_ones(shape, dims))
    return used


def _reshaped(slot, shape):
    return Tensor(shape, lambda: slot.load().reshape(shape))


def _with_ones(shape, dims):
    return tuple(1 if dim in dims else size for dim, size in enumerate(shape))


def _as_ours(link: Link, axes, slots: Slots) -> dict[str, np.ndarray]:
    """Returns our slots of a weight."""
    factors = factor_dimensions(link.shape, axes)
    if "v" in slots:
        if slots["v"].shape in (link.shape, link.their_shape):
            whole = slots["v"].read().reshape(link.shape)
            return {"v": whole} if factors is None else {
                "v_row": whole.mean(factors.columns), "v_col": whole.mean(factors.rows)}
    elif factors is not None:
        kept = slot_dimensions(link.shape, factors)
        shapes = [_with_ones(link.shape, dims) for dims in (factors.columns, factors.rows)]
        for first, second in (("v_row", "v_col"), ("v_col", "v_row")):
            pair = {"v_row": slots[first], "v_col": slots[second]}
            if all(slot.shape in (shape, link.rule.their_shape(shape))
                   for slot, shape in zip(pair.values(), shapes, strict=True)):
                return {name: slot.read().reshape([link.shape[dim] for dim in kept[name]])
                        for name, slot in pair.items()}
    raise Refusal(f"The checkpoint's Adafactor keeps {_listed(slots)} of {link.theirs[0]!r} (size 1 where it "
                  f"averages), and that of this package factors its {link.ours!r} of shape {link.shape} over other "
                  "dimensions; convert the weights alone, without --with_optimizer.")


def _listed(slots):
    return ", ".join(f"{name} {slots[name].shape}" for name in sorted(slots))
