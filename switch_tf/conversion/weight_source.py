"""Weights of a model or of a checkpoint in any format, read a few rows at a time, and slots of its optimizer.

Rules map names and shapes between switch_tf and another format. A rule is a pair of templates,
`encoder/layers_<i>/mlp/wi` and `encoder.block.<i>.layer.1.mlp.wi.weight`. Exactly one rule must match each name on
either side, and any difference is an error, raised before values move.

A slot of Adafactor is a mean of squared gradients, kept whole ("v") or as its means over columns and over rows
("v_row", "v_col"). The means of a whole slot equal the factored slots, because every step averages linearly. Rows and
columns may be exchanged: the second moment is their product divided by the mean of either. Other slots cannot be
computed from the means.
"""

import math
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from switch_tf import checks
from switch_tf.configs import shipped_gin
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion.untrusted_files import Tensor, keeping_last
from switch_tf.hardware import host
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.factoring import factor_dimensions
from switch_tf.partitioning import axes_of
from switch_tf.partitioning.variables import PjrtVariable, assign, stored, unfolding_of
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress

LARGEST = 2**28  # bytes of a portion in float32
MERGES = {"query": 1, "key": 1, "value": 1, "out": 0}  # attention kernel -> dimension of the heads
_FIELD, _INDEX = re.compile(r"<(\w+)>"), r"0|[1-9]\d*"
_FIELDS = {"i": _INDEX, "e": _INDEX, "kernel": "wi|wi_0|wi_1|wo", "mlp": "mlp|extra_mlp",
           "norm": r"pre_\w+_layer_norm"}


class Rule(NamedTuple):
    """A kind of weight in both formats. Ours becomes theirs when it is unstacked, merged, then transposed.

    Args:
        ours, theirs: Templates in which `<field>`, one of _FIELDS, stands for the same text. `ours` is "" for their
            tensors that are not part of the model.
        merge: Their tensor merges our dimensions `merge` and `merge + 1`.
        transpose: Whether their tensor, after merging, is transposed.
        stack: Field with values 0, 1, ... that number their tensors along our first dimension.
    """

    ours: str
    theirs: str
    merge: int | None = None
    transpose: bool = False
    stack: str | None = None

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each of their tensors."""
        shape = shape[1:] if self.stack else shape
        if self.merge is not None:
            end = self.merge + 2
            shape = (*shape[:self.merge], math.prod(shape[self.merge:end]), *shape[end:])
        return shape[::-1] if self.transpose else shape


class Link(NamedTuple):
    """One of our weights and the names of their tensors, several for stacked experts."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    rule: Rule

    @property
    def their_shape(self) -> tuple[int, ...]:
        return self.rule.their_shape(self.shape)

    def to_ours(self, read: Callable[[str, tuple], np.ndarray], rows: slice = slice(None)) -> np.ndarray:
        """Returns our weight or its rows. `read(name, index)` returns a part of their tensor, () for all."""
        def read_one(name, index, shape):
            tensor = read(name, index)
            return (tensor.T if self.rule.transpose else tensor).reshape(shape)

        start, stop, _ = rows.indices(self.shape[0])
        shape = (stop - start, *self.shape[1:])
        if not self.rule.stack:
            width = self.shape[1] if self.rule.merge == 0 else 1
            part = slice(start * width, stop * width)
            index = () if shape == self.shape else (..., part) if self.rule.transpose else (part,)
            return read_one(self.theirs[0], index, shape)
        weight = None
        for index, name in enumerate(self.theirs[start:stop]):
            tensor = read_one(name, (), shape[1:])
            weight = np.empty(shape, tensor.dtype) if weight is None else weight
            weight[index] = tensor
        return weight

    def to_theirs(self, weight: np.ndarray, rows: slice = slice(None)) -> Iterator[tuple[str, np.ndarray]]:
        """Yields names and values of their tensors from our weight or its `rows`, as views where possible."""
        names, parts, whole = (self.theirs[rows], weight, self.shape) if self.rule.stack else (
            self.theirs, [weight], (len(weight), *self.shape[1:]))
        shape = self.rule.their_shape(whole)
        for name, part in zip(names, parts, strict=True):
            yield name, part.reshape(shape[::-1]).T if self.rule.transpose else part.reshape(shape)


class Rules:
    """The rules of a format."""

    def __init__(self, rules: Sequence[Rule]):
        def pattern(template):  # `re.escape` leaves "<field>" as it is
            return re.compile(_FIELD.sub(lambda field: f"(?P{field[0]}{_FIELDS[field[1]]})", re.escape(template)))

        self._ours = [(pattern(rule.ours), rule) for rule in rules]
        self._theirs = [(pattern(rule.theirs), rule) for rule in rules]

    def link(self, weights: Mapping[str, Any]) -> list[Link]:
        """Links each of our weights to the names of their tensors, in order."""
        links, owners = [], {}
        for name, weight in weights.items():
            rule, fields = _only_match(self._ours, name, "the weight")
            shape = tuple(weight.shape)
            every = [fields | {rule.stack: str(index)} for index in range(shape[0])] if rule.stack else [fields]
            template = _FIELD.sub(r"{\1}", rule.theirs)
            tensor_names = tuple(template.format_map(values) for values in every)
            for their_name in tensor_names:
                if owners.setdefault(their_name, name) != name:
                    raise Refusal(f"The weights {owners[their_name]!r} and {name!r} both ask for {their_name!r}; "
                                  "each tensor holds one weight.")
            links.append(Link(name, shape, tensor_names, rule))
        return links

    def check(self, links: list[Link], tensors: Mapping[str, Any], way_out: str) -> None:
        """Refuses the first tensor of a checkpoint that is unknown, left over, missing or of another shape.

        Args:
            tensors: Name -> any object with a shape.
            way_out: End of the messages.
        """
        wanted = {name: link for link in links for name in link.theirs}
        for name in tensors:
            rule, _ = _only_match(self._theirs, name, "the checkpoint's tensor")
            if rule.ours and name not in wanted:
                raise Refusal(f"The checkpoint holds {name!r}, for which a model of this configuration has no "
                              f"place; {way_out}.")
        for name, link in wanted.items():
            if name not in tensors:
                raise Refusal(f"The checkpoint lacks {name!r} of shape {link.their_shape}, which holds the weight "
                              f"{link.ours!r}; {way_out}.")
            if (shape := tuple(tensors[name].shape)) != link.their_shape:
                raise Refusal(f"The checkpoint's {name!r} has shape {shape}, but its "
                              f"configuration asks for {link.their_shape} (the weight {link.ours!r} of shape "
                              f"{link.shape}); {way_out}.")


def _only_match(patterns, name, what):
    """Returns the only rule that matches `name`, and its fields."""
    matches = [(rule, match.groupdict()) for pattern, rule in patterns if (match := pattern.fullmatch(name))]
    if len(matches) != 1:
        known = " and ".join(repr(rule.theirs) for rule, _ in matches)
        problem = f"{len(matches)} rules know {what} {name!r}: {known}" if matches else f"No rule knows {what} {name!r}"
        raise Refusal(f"{problem}; exactly one must, so that nothing is lost or taken twice.")
    return matches[0]


class Weight(NamedTuple):
    """A weight without values, with the attributes of a variable."""

    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str | None, ...]
    value: None = None


class WeightSource(NamedTuple):
    """Weights of a model.

    Args:
        weights: By name, such as `encoder/layers_0/attention/query`, in the order of reading.
        read: function(name, slice of the first dimension) -> values.
    """

    config: SwitchConfig
    weights: Mapping[str, Weight]
    read: Callable[[str, slice], np.ndarray]


def variables_of(model: SwitchTransformer) -> dict[str, keras.Variable]:
    """Returns a model's weights by their paths within it."""
    return {variable.path.removeprefix(f"{model.name}/"): variable for variable in model.weights}


def model_weights(model: SwitchTransformer) -> WeightSource:
    """Returns the weights of a model, built if necessary."""
    if not isinstance(model, SwitchTransformer):
        raise Refusal(f"model must be a SwitchTransformer, not {checks.shown(model)}.")
    if not model.built:
        model.build()
    variables = variables_of(model)
    weights = {name: Weight(tuple(variable.shape), variable.dtype, axes_of(variable))
               for name, variable in variables.items()}
    return WeightSource(model.config, weights, lambda name, rows: variables[name].numpy()[rows])


def weights_of(config: SwitchConfig) -> Mapping[str, Weight]:
    """Returns the weights of a configuration's model."""
    with keras.StatelessScope(initialize_variables=False):
        return model_weights(SwitchTransformer(config)).weights


def open_linked(config: SwitchConfig, rules: Rules, tensors: Mapping[str, Tensor], folder: pathlib.Path,
                way_out: str = "give the --gin_file of its model, or download it again if it is incomplete"
                ) -> WeightSource:
    """Links a model to `tensors`, and compares all names and shapes before reading.

    Args:
        tensors: In the order of reading.
        way_out: See `Rules.check`.
    """
    weights = weights_of(config)
    links = rules.link(weights)
    rules.check(links, tensors, way_out)
    places = {name: place for place, name in enumerate(tensors)}
    load = keeping_last(lambda name: tensors[name].load())
    # In the files' order, to read an array of scanned layers once.
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


def require_config(config: Any, kind: str, folder: pathlib.Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuses a checkpoint without a SwitchConfig, and names the presets of its size.

    Args:
        kind: Name of the software that wrote the checkpoint.
    """
    if isinstance(config, SwitchConfig):
        return
    num_parameters = sum(tensor.size for tensor in tensors.values())
    alike = [f"gin/models/{name}.gin" for name in shipped_gin.preset_names()
             if SwitchConfig.from_preset(name).num_parameters == num_parameters]
    hint = f"; {' and '.join(alike)} {'have' if alike[1:] else 'has'} as many parameters" if alike else ""
    raise Refusal(f"A {kind} checkpoint does not describe its model, so {folder} of {num_parameters:,} parameters "
                  f"needs a configuration: give --gin_file=gin/models/NAME.gin, or a SwitchConfig in Python{hint}.")


def read_model(source: WeightSource) -> SwitchTransformer:
    """Builds a model and reads its weights, with a progress bar."""
    num_bytes, memory = 4 * source.config.num_parameters, host.memory("MemTotal") + host.memory("SwapTotal")
    if num_bytes > memory:
        raise Refusal(f"This model needs {num_bytes / 1e9:,.1f} GB for its float32 weights, and this machine has "
                      f"{memory / 1e9:,.1f} GB of memory; read it on a larger one.")
    model = SwitchTransformer(source.config)
    model.build()
    fill(source, variables_of(model))
    return model


def fill(source: WeightSource, variables: Mapping[str, keras.Variable]) -> None:
    """Reads variables in any layout by their weights' names, one at a time."""
    sizes = {name: 4 * math.prod(variables[name].shape) for name in source.weights if name in variables}
    with progress.bar(sum(sizes.values()), "reading weights") as bar:
        for name, num_bytes in sizes.items():
            variable = variables[name]
            held = stored(variable)
            if isinstance(held, PjrtVariable) and variable.shape and not unfolding_of(variable).first:
                held.load(_reading_pieces(source, name, held.array))
            else:
                assign(variable, source.read(name, slice(None)))
            bar.update(num_bytes)


def _reading_pieces(source, name, array):
    """Returns a function from a piece's slices to its values. It also reads rows of the process's next pieces.

    Separate reads would repeat T5X's chunks, and all columns for each piece of a row.
    """
    num_rows, row_size = array.shape[0], 4 * math.prod(array.shape[1:])
    portions: list[tuple[int, int]] = []
    for first, last in sorted({index[0].indices(num_rows)[:2] for index in
                               array.sharding.addressable_devices_indices_map(array.shape).values()}):
        begin, end = portions[-1] if portions else (0, -1)
        if first <= end and (last - begin) * row_size <= LARGEST:
            portions[-1] = begin, max(end, last)
        else:
            portions.append((first, last))
    read = keeping_last(lambda portion: source.read(name, slice(*portion)))

    def piece(index):
        first, last, _ = index[0].indices(num_rows)
        portion = next(portion for portion in portions if portion[0] <= first and last <= portion[1])
        return read(portion)[(slice(first - portion[0], last - portion[0]), *index[1:])]

    return piece


Portion = tuple[str, slice, int]


def groups_of(source: WeightSource, undivided: Collection[str] = ()) -> list[list[Portion]]:
    """Returns all weights in portions, in the order of reading and in groups of at most LARGEST bytes.

    A portion has the name of a weight, its rows and their bytes in float32.

    Args:
        undivided: Weights to keep whole. A whole weight, or a single row, may exceed LARGEST.
    """
    groups, room = [], 0
    for name, weight in source.weights.items():
        num_rows, row_size = weight.shape[0], 4 * math.prod(weight.shape[1:])
        step = max(1, LARGEST // row_size) if name not in undivided else num_rows
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            size = (rows.stop - start) * row_size
            if not groups or size > room:
                groups.append([])
                room = LARGEST
            groups[-1].append((name, rows, size))
            room -= size
    return groups


def read_groups(source: WeightSource, groups: list[list[Portion]], title: str, done: int = 0
                ) -> Iterator[tuple[int, Iterator[tuple[str, slice, np.ndarray]]]]:
    """Yields the number of each group after the first `done`, and an iterator of its names, rows and values."""
    sizes = [sum(size for *_, size in group) for group in groups]
    with progress.bar(sum(sizes), title, initial=sum(sizes[:done])) as bar:
        def read(group):
            for name, rows, size in group:
                yield name, rows, source.read(name, rows)
                bar.update(size)

        for index, group in enumerate(groups[done:], done):
            yield index, read(group)


Slots = Mapping[str, Tensor]


def read_adafactor(model: SwitchTransformer, rules: Rules, theirs: Mapping[str, Slots], step_name: str, step: Any,
                   folder: pathlib.Path) -> Adafactor:
    """Returns an Adafactor with the slots of a checkpoint, read one at a time.

    Args:
        model: Built, with the checkpoint's weights.
        theirs: Their name of a weight -> {"v": slot} or {"v_row": slot, "v_col": slot}. In factored slots, averaged
            dimensions have size 1.
        step_name: Their name of the step.
        step: Tensor or int. Any other value is refused.
    """
    if isinstance(step, Tensor) and step.size == 1:
        step = np.asarray(step.load()).item()
    if type(step) is not int or not 0 <= step < 2**31:
        raise Refusal(f"{folder} must hold its number of steps as {step_name!r}, and holds {checks.shown(step)}; "
                      "convert its weights alone, without --with_optimizer.")
    optimizer = Adafactor()
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(step)
    variables = variables_of(model)
    links = {link.theirs[0]: link for link in rules.link(variables)}
    if missing := [name for name in links if name not in theirs]:
        raise Refusal(f"The checkpoint has no slots of Adafactor for {missing[0]!r}: its optimizer did not train that "
                      "weight, or is another one; convert the weights alone, without --with_optimizer.")
    if unknown := [name for name in theirs if name not in links]:
        raise Refusal(f"The checkpoint has slots of {unknown[0]!r}, and no such weight; convert the weights alone, "
                      "without --with_optimizer.")
    total = 4 * sum(slot.size for slots in theirs.values() for slot in slots.values())
    with progress.bar(total, "reading the optimizer") as bar:
        for name, slots in theirs.items():
            variable = variables[links[name].ours]
            for slot, values in _convert_slots(links[name], axes_of(variable), slots).items():
                if not np.isfinite(values).all() or (values < 0).any():
                    raise Refusal(f"The slot {slot!r} of {name!r} in {folder} must hold means of squares, and has "
                                  "values that are not finite or negative; read an earlier checkpoint, or the weights "
                                  "alone, without --with_optimizer.")
                optimizer.slots_of(variable)[slot].assign(values)
            bar.update(4 * sum(slot.size for slot in slots.values()))
    return optimizer


def used_slots(name: str, shape: tuple[int, ...], slots: Slots, averaged: Mapping[str, tuple[str, Collection[int]]],
               software: str) -> dict[str, Tensor]:
    """Returns the slots of a weight in `read_adafactor`'s form.

    Args:
        slots: By name. An array of shape (1,) is unused.
        averaged: "v_row" and "v_col" -> (their name of the slot, dimensions that it averages over).
    """
    if "m" in slots and slots["m"].shape != (1,):
        raise Refusal(f"The checkpoint's optimizer keeps momentum of {name!r}, and this package's Adafactor has none; "
                      "convert the weights alone, without --with_optimizer.")
    if "v" in slots and slots["v"].shape == shape:
        return {"v": slots["v"]}
    used = {}
    for slot, (their_slot, dims) in averaged.items():
        kept = tuple(size for dim, size in enumerate(shape) if dim not in dims)
        if not dims or their_slot not in slots or slots[their_slot].shape != kept:
            raise Refusal(f"The checkpoint's optimizer keeps {_listed(slots)} of {name!r} of shape {shape}, and "
                          f"{software}'s Adafactor keeps a slot of that shape, or means over its two largest "
                          "dimensions or by its logical axes; convert the weights alone, without --with_optimizer.")
        used[slot] = slots[their_slot].reshaped(_keep_dims(shape, dims))
    return used


def _keep_dims(shape, dims):
    return tuple(1 if dim in dims else size for dim, size in enumerate(shape))


def _convert_slots(link, axes, slots):
    factors = factor_dimensions(link.shape, axes)
    averaged = None if factors is None else {"v_row": factors.columns, "v_col": factors.rows}
    if "v" in slots:
        if slots["v"].shape in (link.shape, link.their_shape):
            whole = slots["v"].read().reshape(link.shape)
            return {"v": whole} if averaged is None else {name: whole.mean(dims) for name, dims in averaged.items()}
    elif averaged is not None:
        shapes = {name: _keep_dims(link.shape, dims) for name, dims in averaged.items()}
        for names in (("v_row", "v_col"), ("v_col", "v_row")):
            pair = {ours: slots[theirs] for ours, theirs in zip(shapes, names, strict=True)}
            if all(slot.shape in (shapes[name], link.rule.their_shape(shapes[name])) for name, slot in pair.items()):
                return {name: slot.read().reshape(shapes[name]).squeeze(averaged[name]) for name, slot in pair.items()}
    raise Refusal(f"The checkpoint's Adafactor keeps {_listed(slots)} of {link.theirs[0]!r} (size 1 where it "
                  f"averages), and that of this package factors its {link.ours!r} of shape {link.shape} over other "
                  "dimensions; convert the weights alone, without --with_optimizer.")


def _listed(slots):
    return ", ".join(f"{name} {slots[name].shape}" for name in sorted(slots))
