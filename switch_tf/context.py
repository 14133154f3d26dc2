"""The ambient state of a trace: layers, data sources and back ends read it without an argument.

Each thread starts with the defaults. `carried` takes a context along for a function that another thread calls (a
replica of `tf.distribute`) or that runs after its scope (a recomputation in the backward pass). `tf.data` and
`tf.function` trace in the caller's thread and do not need it.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Part `index` (int or int32 scalar tensor) of `count` equal, contiguous parts of the global batch."""

    count: int  # type: ignore[assignment]  # hides an unused method of tuple
    index: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """Ambient state of the code that runs or is traced.

    Attributes:
        annotator: Lays out the tensors of one program for many devices (`partitioning.axes`), or None.
        variable_axes: Logical axes of the variable in creation, for the back end.
        part: Visible part of the global batch.
        seed: int or integer scalar tensor. None draws one from Keras' global generator.
        fused_program: Graph that `forms.fused` traces for XLA on a CPU, and the tensors shared by its loops, by key.
            Elsewhere None.
        no_drop: Whether each expert has a slot for every token, so that no prediction depends on its neighbours.
        routes: Path of a layer of experts -> its gates, <float32>[batch, length, expert], 0 for experts without the
            token. Layers store them here. None records no gates.
        is_lowered: Whether the traced function is lowered for JAX, with variables of the pjrt back end as arguments.
        initial: Function of an initializer of `ops.random` and a shape, called in place of a draw, or None.
        draws_weights: See `Partitioner.build`.
        endless_passes: Whether `data.passes` repeats a training split without end.
    """

    annotator: Any = None
    variable_axes: tuple[str | None, ...] | None = None
    part: Part = Part(1, 0)
    seed: Any = None
    fused_program: Any = None
    no_drop: bool = False
    routes: dict[str, Any] | None = None
    is_lowered: bool = False
    initial: Any = None
    draws_weights: bool = True
    endless_passes: bool = False


_DEFAULTS = Context()
_context = contextvars.ContextVar("switch_tf", default=_DEFAULTS)


def current() -> Context:
    """Returns the calling thread's context."""
    return _context.get()


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Changes the context in a `with` block, or in each call of a decorated function."""
    token = _context.set(dataclasses.replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)


def carried(function: Callable, **changes: Any) -> Callable:
    """Makes a function run, in any thread, in the current context with these changes."""
    return within(**vars(dataclasses.replace(_context.get(), **changes)))(function)
