"""The ambient state of a trace: what layers, data sources and back ends read without receiving it as an argument.

Each thread has a context of its own and starts with the defaults. A function that another thread calls (a replica of
`tf.distribute`), or that runs after its scope was left (a recomputation in the backward pass), takes a context along by
`carried`. Functions that TensorFlow traces in the thread of the caller, such as those of `tf.data` and `tf.function`,
need nothing.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Part `index` (int or int32 scalar tensor) of `count` equal, contiguous parts of the global batch."""

    count: int  # type: ignore[assignment]  # hides a method of tuple that nobody calls
    index: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """Ambient state of the code that runs or is traced.

    Attributes:
        annotator: Object (`partitioning.axes`) that lays out the tensors of one program for many devices. None leaves
            them as they are.
        variable_axes: Logical axes of the variable that is being created, for the back end that stores it.
        part: Part of the global batch that the code sees.
        seed: int or integer scalar tensor, the seed of random numbers. None draws one from Keras' global generator.
        fused_program: Graph that `forms.fused` traces for XLA on a CPU, and tensors that its loops share by key. None
            outside one.
        no_drop: Whether each expert has a slot for every token, so that no prediction depends on its neighbours.
        routes: Dictionary in which every layer of experts stores its gates, <float32>[batch, length, expert], by its
            path. They multiply the experts' outputs, and are 0 for experts without the token. None records nothing.
        is_lowered: Whether the traced function is lowered for JAX. Variables of the pjrt back end become its arguments.
        endless_passes: Whether `data.passes` yields pass after pass of a training split without an end.
    """

    annotator: Any = None
    variable_axes: tuple[str | None, ...] | None = None
    part: Part = Part(1, 0)
    seed: Any = None
    fused_program: Any = None
    no_drop: bool = False
    routes: dict[str, Any] | None = None
    is_lowered: bool = False
    endless_passes: bool = False


_DEFAULTS = Context()
_context = contextvars.ContextVar("switch_tf", default=_DEFAULTS)


def current() -> Context:
    """Returns the context of the calling thread."""
    return _context.get()


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Changes fields of the context in a `with` block, or in each call of a function that this decorates."""
    token = _context.set(dataclasses.replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)


def carried(function: Callable, **changes: Any) -> Callable:
    """Returns a function that runs in the context in which `carried` was called, with these changes, in any thread."""
    return within(**vars(dataclasses.replace(_context.get(), **changes)))(function)
