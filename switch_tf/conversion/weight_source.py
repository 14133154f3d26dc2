"""Weights of a model that are read a few rows at a time, of a model or of a checkpoint of any format, and slots.

A slot of Adafactor is a mean of squared gradients. Both sides keep it whole ("v"), or its means over columns and over
rows ("v_row", "v_col"), and need not choose the same. Means of a whole slot are those that factored slots would have,
because every step averages linearly. Rows and columns may be exchanged: the second moment is their product divided by
the mean of either. A whole slot cannot be had from its means, and neither can means over other dimensions.
"""

import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import keras
import numpy as np

from switch_tf import checks
from switch_tf.configs import shipped_gin
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion.rules import Link, Rules
from switch_tf.conversion.untrusted_files import Tensor, keeping_last
from switch_tf.hardware import host
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.factoring import factor_dimensions, slot_dimensions
from switch_tf.partitioning import axes_of
from switch_tf.partitioning.variables import PjrtVariable, assign, stored, unfolding_of
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress

LARGEST = 2**28  # bytes of a portion in float32


class Weight(NamedTuple):
    """A weight without its values. It has the attributes by which a checkpoint describes a Keras variable."""

    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str | None, ...]
    value: None = None


class WeightSource(NamedTuple):
    """Weights of a model.

    Args:
        config: Configuration of the model.
        weights: Name of each weight, such as `encoder/layers_0/attention/query`, in the order of reading.
        read: function(name, slice of the first dimension) -> values.
    """

    config: SwitchConfig
    weights: Mapping[str, Weight]
    read: Callable[[str, slice], np.ndarray]


def variables_of(model: SwitchTransformer) -> dict[str, keras.Variable]:
    """Returns the weights of a model by their paths within it, such as `encoder/layers_0/attention/query`."""
    return {variable.path.removeprefix(f"{model.name}/"): variable for variable in model.weights}


def of_model(model: SwitchTransformer) -> WeightSource:
    """Returns the weights of a model, which is built if it is not yet."""
    if not isinstance(model, SwitchTransformer):
        raise Refusal(f"model must be a SwitchTransformer, not {checks.shown(model)}.")
    if not model.built:
        model.build()
    variables = variables_of(model)
    weights = {name: Weight(tuple(variable.shape), variable.dtype, axes_of(variable))
               for name, variable in variables.items()}
    return WeightSource(model.config, weights, lambda name, rows: variables[name].numpy()[rows])


def weights_of(config: SwitchConfig) -> Mapping[str, Weight]:
    """Returns the weights of a configuration's model, without initialising variables."""
    with keras.StatelessScope(initialize_variables=False):
        return of_model(SwitchTransformer(config)).weights


def open_linked(config: SwitchConfig, rules: Rules, tensors: Mapping[str, Tensor], folder: pathlib.Path,
                way_out: str = "give the --gin_file of its model, or download it again if it is incomplete"
                ) -> WeightSource:
    """Links a model to `tensors` and compares all names and shapes before any weight is read.

    Args:
        config: SwitchConfig of the model.
        rules: Rules of the format.
        tensors: Name -> tensor of the checkpoint. Weights are read in this order.
        folder: Path of the checkpoint, for messages.
        way_out: The user's choices if checkpoint and configuration differ, for messages.
    """
    weights = weights_of(config)
    links = rules.link(weights)
    rules.check(links, tensors, way_out)
    places = {name: place for place, name in enumerate(tensors)}
    load = keeping_last(lambda name: tensors[name].load())
    # In the order of the files, so that an array of scanned layers is read once.
    links = {link.ours: link for link in sorted(links, key=lambda link: places[link.theirs[0]])}

    def read_part(name, index):
        tensor = tensors[name]
        return np.asarray(tensor.load(index) if tensor.has_parts else load(name)[index], np.float32)

    def read(name, rows):
        link = links[name]
        values = link.to_ours(read_part, rows)
        if not np.isfinite(values).all():
            raise Refusal(f"{link.theirs[0]!r} in {folder} is not finite, and so would be all that the model computes; "
                          "read a checkpoint from before its training went wrong.")
        return values

    return WeightSource(config, {name: weights[name] for name in links}, read)


def without_config(kind: str, folder: pathlib.Path, tensors: Mapping[str, Tensor]) -> Refusal:
    """Returns the Refusal to read a checkpoint without a configuration, with the presets of its size.

    Args:
        kind: Name of the software that wrote it.
        folder: Path of the checkpoint.
        tensors: Its weights.
    """
    num_parameters = sum(tensor.size for tensor in tensors.values())
    alike = [f"gin/models/{name}.gin" for name in shipped_gin.preset_names()
             if SwitchConfig.from_preset(name).num_parameters == num_parameters]
    verb = "has" if len(alike) == 1 else "have"
    hint = f"; {' and '.join(alike)} {verb} as many parameters" if alike else ""
    return Refusal(f"A {kind} checkpoint does not describe its model, so {folder} of {num_parameters:,} parameters "
                   f"needs a configuration: give --gin_file=gin/models/NAME.gin, or a SwitchConfig in Python{hint}.")


def read_model(source: WeightSource) -> SwitchTransformer:
    """Builds a model and reads its weights, with a progress bar if that takes more than some seconds."""
    num_bytes, memory = 4 * source.config.num_parameters, host.memory("MemTotal") + host.memory("SwapTotal")
    if num_bytes > memory:
        raise Refusal(f"This model needs {num_bytes / 1e9:,.1f} GB for its float32 weights, and this machine has "
                      f"{memory / 1e9:,.1f} GB of memory; read it on a larger one.")
    model = SwitchTransformer(source.config)
    model.build()
    fill(source, variables_of(model))
    return model


def fill(source: WeightSource, variables: Mapping[str, keras.Variable]) -> None:
    """Reads variables in any layout, by the names of their weights, one at a time in the order of reading.

    Raises:
        Refusal: A weight cannot be read, or is not finite.
    """
    sizes = {name: 4 * math.prod(variables[name].shape) for name in source.weights if name in variables}
    with progress.bar(sum(sizes.values()), "reading weights") as bar:
        for name, num_bytes in sizes.items():
            variable = variables[name]
            held = stored(variable)
            if isinstance(held, PjrtVariable) and variable.shape and not unfolding_of(variable).first:
                def piece(index, name=name, length=variable.shape[0]):
                    return source.read(name, slice(*index[0].indices(length)))[(slice(None), *index[1:])]

                held.load(piece)
            else:
                assign(variable, source.read(name, slice(None)))
            bar.update(num_bytes)


class Portion(NamedTuple):
    """Rows of a weight, whose name it has. `size`: number of elements."""

    name: str
    rows: slice
    size: int


def groups_of(source: WeightSource, undivided: Collection[str] = ()) -> list[list[Portion]]:
    """Returns all weights in portions, in the order of reading and in groups of at most LARGEST bytes.

    Args:
        source: Weights.
        undivided: Names of weights to keep whole. A whole weight, or a single row, may exceed LARGEST.
    """
    groups, num_bytes = [[]], 0
    for name, weight in source.weights.items():
        num_rows, row_size = weight.shape[0], math.prod(weight.shape[1:])
        step = max(1, LARGEST // max(1, 4 * row_size)) if name not in undivided else num_rows
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            size = (rows.stop - start) * row_size
            if groups[-1] and num_bytes + 4 * size > LARGEST:
                groups.append([])
                num_bytes = 0
            groups[-1].append(Portion(name, rows, size))
            num_bytes += 4 * size
    return groups


def read_groups(source: WeightSource, groups: list[list[Portion]], title: str, done: int = 0
                ) -> Iterator[tuple[int, Iterator[tuple[Portion, np.ndarray]]]]:
    """Yields the number of each group after the first `done`, and its portions with their values, one at a time.

    Args:
        source: Weights.
        groups: From `groups_of`.
        title: Title of the progress bar.
        done: Number of groups to leave out.
    """
    sizes = [4 * sum(portion.size for portion in group) for group in groups]
    with progress.bar(sum(sizes), title, initial=sum(sizes[:done])) as bar:
        for index, group in enumerate(groups[done:], done):
            yield index, _read(source, group, bar)


def _read(source, group, bar):
    for portion in group:
        yield portion, source.read(portion.name, portion.rows)
        bar.update(4 * portion.size)


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
            for slot, values in _as_ours(links[name], axes_of(variable), slots).items():
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
