"""Rules that carry names and shapes of weights from switch_tf to another format and back.

A rule is a pair of templates, `encoder/layers_<i>/mlp/wi` and `encoder.block.<i>.layer.1.mlp.wi.weight`, matched from
end to end. Everything is total both ways: a name that no rule knows, or two, is an error, and so is a tensor that is
missing, left over or of the wrong shape. All of it is found out from names and shapes, before a number is moved.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from switch_tf.refusals import Refusal

INDEX = r"0|[1-9]\d*"


class Rule(NamedTuple):
    """One kind of weight here and there; from ours to theirs it is unstacked, merged, then transposed.

    Args:
        ours, theirs: templates, in which `<field>` stands for the same text on both sides.
        merge: int or None. Their tensor has our dimensions `merge` and `merge + 1` as one.
        transpose: bool. Their tensor has its two dimensions (after merging) the other way round.
        stack: a field or None. Our first dimension is one tensor of theirs for each value 0, 1, ... of that field.
    """

    ours: str
    theirs: str
    merge: int | None = None
    transpose: bool = False
    stack: str | None = None

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of (each of) their tensors for our weight of `shape`."""
        shape = tuple(shape[1:] if self.stack else shape)
        if self.merge is not None:
            end = self.merge + 2
            shape = (*shape[:self.merge], shape[self.merge] * shape[end - 1], *shape[end:])
        return shape[::-1] if self.transpose else shape


class Ignore(NamedTuple):
    """Names of theirs (a template) that hold nothing of the model."""

    theirs: str


class Link(NamedTuple):
    """One of our weights, and the tensors of theirs that hold it: several where experts are stacked."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    rule: Rule

    @property
    def their_shape(self) -> tuple[int, ...]:
        return self.rule.their_shape(self.shape)

    def to_ours(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Our weight, from `read(name)`, which is asked for one tensor of theirs at a time."""
        if not self.rule.stack:
            return self._one_to_ours(read(self.theirs[0]), self.shape)
        weight = None
        for index, name in enumerate(self.theirs):
            tensor = self._one_to_ours(read(name), self.shape[1:])
            weight = np.empty(self.shape, tensor.dtype) if weight is None else weight
            weight[index] = tensor
        return weight

    def to_theirs(self, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Names and values (views where possible) of their tensors, from our weight."""
        for name, part in zip(self.theirs, weight if self.rule.stack else [weight], strict=True):
            shape = self.their_shape
            yield name, part.reshape(shape[::-1]).T if self.rule.transpose else part.reshape(shape)

    def _one_to_ours(self, tensor, shape):
        return (tensor.T if self.rule.transpose else tensor).reshape(shape)


class Rules:
    """A format: its rules and what the fields of their templates may be.

    Args:
        rules: Rule and Ignore objects.
        fields: field -> regular expression, e.g. {"i": rules.INDEX}.
    """

    def __init__(self, rules: Iterable[Rule | Ignore], fields: Mapping[str, str]):
        self._rules = list(rules)
        self._fields = dict(fields)
        self._ours = [(self._pattern(rule.ours), rule) for rule in self._rules if isinstance(rule, Rule)]
        self._theirs = [(self._pattern(rule.theirs), rule) for rule in self._rules]

    def link(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Link]:
        """Their tensors for each of our weights, given as name -> shape, in the same order.

        Raises:
            Refusal: no rule or two know a weight, or two weights ask for the same tensor.
        """
        links, owners = [], {}
        for name, shape in shapes.items():
            rule, fields = _only_match(self._ours, name, "the weight")
            indices = range(shape[0]) if rule.stack else [None]
            theirs = tuple(_fill(rule.theirs, fields | ({rule.stack: str(index)} if rule.stack else {}))
                           for index in indices)
            for their_name in theirs:
                if owners.setdefault(their_name, name) != name:
                    raise Refusal(f"The weights {owners[their_name]!r} and {name!r} both ask for {their_name!r}; "
                                  "each tensor holds one weight.")
            links.append(Link(name, tuple(shape), theirs, rule))
        return links

    def check(self, links: list[Link], their_shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compares `links` with the tensors that a checkpoint holds, given as name -> shape.

        Raises:
            Refusal: the first tensor that is unknown, left over, missing or of another shape, with both shapes.
        """
        wanted = {name: link for link in links for name in link.theirs}
        for name in their_shapes:
            rule, _ = _only_match(self._theirs, name, "the checkpoint's tensor")
            if isinstance(rule, Rule) and name not in wanted:
                raise Refusal(f"The checkpoint holds {name!r}, for which a model of this configuration has no "
                              "place; its configuration and its tensors belong to different models.")
        for name, link in wanted.items():
            if name not in their_shapes:
                raise Refusal(f"The checkpoint lacks {name!r} of shape {link.their_shape}, which holds the weight "
                              f"{link.ours!r}; it is incomplete, or its configuration is of another model.")
            if tuple(their_shapes[name]) != link.their_shape:
                raise Refusal(f"The checkpoint's {name!r} has shape {tuple(their_shapes[name])}, but its "
                              f"configuration asks for {link.their_shape} (the weight {link.ours!r} of shape "
                              f"{link.shape}).")

    def _pattern(self, template):
        # Splitting by a group puts the fields at the odd places.
        parts = enumerate(re.split(r"<(\w+)>", template))
        return re.compile("".join(f"(?P<{part}>{self._fields[part]})" if index % 2 else re.escape(part)
                                  for index, part in parts))


def _fill(template, fields):
    return re.sub(r"<(\w+)>", lambda match: fields[match[1]], template)


def _only_match(patterns, name, what):
    """The one rule that knows `name`, and the values of its fields."""
    found = [(rule, match.groupdict()) for pattern, rule in patterns if (match := pattern.fullmatch(name))]
    if len(found) != 1:
        known = " and ".join(repr(rule.theirs) for rule, _ in found)
        problem = f"{len(found)} rules know {what} {name!r}: {known}" if found else f"No rule knows {what} {name!r}"
        raise Refusal(f"{problem}; exactly one must, so that nothing is lost or taken twice.")
    return found[0]
