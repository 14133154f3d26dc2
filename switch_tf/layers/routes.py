"""Where tokens went: what layers of experts decided while they ran, for those who want to look at it."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

_routes = None


class Route(NamedTuple):
    """What one layer of experts decided.

    `layer`: str, its path in the model.
    `gates`: <float32>[batch, length, expert], what each expert's output for a token was multiplied by; 0 where it did
        not go.
    """

    layer: str
    gates: Any


@contextlib.contextmanager
def recorded() -> Iterator[list[Route]]:
    """Within this scope every layer of experts that runs, or is traced, adds its Route to the list."""
    global _routes
    previous, _routes = _routes, []
    try:
        yield _routes
    finally:
        _routes = previous


def are_recorded() -> bool:
    """Whether code runs, or is traced, within `recorded`."""
    return _routes is not None


def record(layer: str, gates) -> None:
    """Adds the Route of a layer; only where `are_recorded`."""
    _routes.append(Route(layer, gates))
