"""Rules that map names and shapes of weights between switch_tf and another format.

A rule is a pair of templates, `encoder/layers_<i>/mlp/wi` and `encoder.block.<i>.layer.1.mlp.wi.weight`, that match
whole names. Rules are total both ways: a name that matches no rule, or two, is an error, and so is a tensor that is
missing, left over or of another shape. Names and shapes suffice for that, so errors come before any values move.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from switch_tf.refusals import Refusal

INDEX, KERNELS = r"0|[1-9]\d*", "wi|wi_0|wi_1|wo"
MERGES = {"query": 1, "key": 1, "value": 1, "out": 0}  # attention kernel -> the dimension that holds heads, see Rule
_FIELD = re.compile(r"<(\w+)>")


class Rule(NamedTuple):
    """A kind of weight in both formats. From ours to theirs it is unstacked, merged, then transposed.

    Args:
        ours, theirs: str. Templates in which `<field>` stands for the same text on both sides. `ours` is "" for
            tensors of theirs that are not part of the model.
        merge: int or None. Their tensor merges our dimensions `merge` and `merge + 1`.
        transpose: bool. Whether their tensor, after merging, is transposed.
        stack: str or None. Field whose values 0, 1, ... number their tensors along our first dimension.
    """

    ours: str
    theirs: str
    merge: int | None = None
    transpose: bool = False
    stack: str | None = None

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each of their tensors for our weight of `shape`."""
        shape = tuple(shape[1:] if self.stack else shape)
        if self.merge is not None:
            end = self.merge + 2
            shape = (*shape[:self.merge], shape[self.merge] * shape[end - 1], *shape[end:])
        return shape[::-1] if self.transpose else shape

    def their_index(self, shape: tuple[int, ...], rows: slice) -> tuple:
        """Returns the part of their tensor, unless stacked, that holds rows of our weight of `shape`; () for all."""
        start, stop, _ = rows.indices(shape[0])
        if stop - start == shape[0]:
            return ()
        width = shape[1] if self.merge == 0 else 1
        part = slice(start * width, stop * width)
        return (..., part) if self.transpose else (part,)


class Link(NamedTuple):
    """One of our weights and the names of their tensors, which are several for stacked experts."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    rule: Rule

    @property
    def their_shape(self) -> tuple[int, ...]:
        return self.rule.their_shape(self.shape)

    def to_ours(self, read: Callable[[str, tuple], np.ndarray], rows: slice = slice(None)) -> np.ndarray:
        """Returns our weight, or rows of it. `read(name, index)` returns a part of one of their tensors, () for all."""
        def read_one(name, index, shape):
            tensor = read(name, index)
            return (tensor.T if self.rule.transpose else tensor).reshape(shape)

        start, stop, _ = rows.indices(self.shape[0])
        shape = (stop - start, *self.shape[1:])
        if not self.rule.stack:
            return read_one(self.theirs[0], self.rule.their_index(self.shape, rows), shape)
        weight = None
        for index, name in enumerate(self.theirs[start:stop]):
            tensor = read_one(name, (), shape[1:])
            weight = np.empty(shape, tensor.dtype) if weight is None else weight
            weight[index] = tensor
        return weight

    def to_theirs(self, weight: np.ndarray, rows: slice = slice(None)) -> Iterator[tuple[str, np.ndarray]]:
        """Yields names and values of their tensors from our weight, as views where possible.

        From rows of a divisible weight it yields those experts, or rows of their tensor.
        """
        names, parts, whole = (self.theirs[rows], weight, self.shape) if self.rule.stack else (
            self.theirs, [weight], (len(weight), *self.shape[1:]))
        shape = self.rule.their_shape(whole)
        for name, part in zip(names, parts, strict=True):
            yield name, part.reshape(shape[::-1]).T if self.rule.transpose else part.reshape(shape)


class Rules:
    """The rules of a format.

    Args:
        rules: Rule objects.
        fields: dict, field of the templates -> regular expression, such as {"i": rules.INDEX}.
    """

    def __init__(self, rules: Iterable[Rule], fields: Mapping[str, str]):
        rules, self._fields = list(rules), fields
        self._ours = [(self._pattern(rule.ours), rule) for rule in rules]
        self._theirs = [(self._pattern(rule.theirs), rule) for rule in rules]

    def link(self, weights: Mapping[str, Any]) -> list[Link]:
        """Links each of our weights, given as name -> anything with a shape, to the names of their tensors, in order.

        Refuses a weight that no rule or several rules match, and two weights that need the same tensor.
        """
        links, owners = [], {}
        for name, weight in weights.items():
            rule, fields = _only_match(self._ours, name, "the weight")
            shape = tuple(weight.shape)
            every = [fields | {rule.stack: str(index)} for index in range(shape[0])] if rule.stack else [fields]
            template = _FIELD.sub(r"{\1}", rule.theirs)
            theirs = tuple(template.format_map(values) for values in every)
            for their_name in theirs:
                if owners.setdefault(their_name, name) != name:
                    raise Refusal(f"The weights {owners[their_name]!r} and {name!r} both ask for {their_name!r}; "
                                  "each tensor holds one weight.")
            links.append(Link(name, shape, theirs, rule))
        return links

    def check(self, links: list[Link], tensors: Mapping[str, Any], way_out: str) -> None:
        """Refuses the first tensor of a checkpoint that is unknown, left over, missing or of another shape.

        Args:
            links: From `link`.
            tensors: Name -> tensor, or anything else with its shape.
            way_out: End of the messages, the user's choices if checkpoint and configuration differ.
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

    def _pattern(self, template):
        parts = enumerate(_FIELD.split(template))  # fields are at odd places
        return re.compile("".join(f"(?P<{part}>{self._fields[part]})" if index % 2 else re.escape(part)
                                  for index, part in parts))


def _only_match(patterns, name, what):
    """Returns the one rule that matches `name`, and the values of its fields."""
    matches = [(rule, match.groupdict()) for pattern, rule in patterns if (match := pattern.fullmatch(name))]
    if len(matches) != 1:
        known = " and ".join(repr(rule.theirs) for rule, _ in matches)
        problem = f"{len(matches)} rules know {what} {name!r}: {known}" if matches else f"No rule knows {what} {name!r}"
        raise Refusal(f"{problem}; exactly one must, so that nothing is lost or taken twice.")
    return matches[0]
