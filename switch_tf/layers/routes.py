"""Recording of routing decisions, for inspection."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from switch_tf import context
from switch_tf.partitioning.tensors import Tensor


class Route(NamedTuple):
    """Gates of one Switch layer.

    `layer`: str. Path of the layer in the model.
    `gates`: <float32>[batch, length, expert]. Multiplied the experts' outputs. 0 for experts without the token.
    """

    layer: str
    gates: Any


@contextlib.contextmanager
def recorded() -> Iterator[list[Route]]:
    """Collects a Route from every Switch layer that runs or is traced within this scope."""
    routes = []
    with context.within(routes=routes):
        yield routes


def are_recorded() -> bool:
    """Returns whether the caller runs or is traced within `recorded`."""
    return context.current().routes is not None


def record(layer: str, gates: Tensor) -> None:
    """Adds a layer's Route. Requires `are_recorded()`."""
    context.current().routes.append(Route(layer, gates))
