"""A lowered TensorFlow function as a `jax.jit`, for devices that are here or that only have a place in a topology."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.export
from jax.sharding import NamedSharding

from switch_tf.partitioning import lowering

Value = TypeVar("Value")
# Names that `jax.export` has for platforms of devices, where they differ.
_EXPORTED = {"gpu": "cuda"}
# By platform, of one device. YNNPACK is given products alone: with sums and elementwise operations, its default, a step
# of one CPU device takes 1.15 times as long, and one of eight 0.86 times (docs/notebook/pjrt.md).
_OPTIONS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}}


def jit(program: lowering.Program, inputs: Sequence[jax.ShapeDtypeStruct], state: Sequence[Any],
        results: Sequence[NamedSharding]) -> jax.stages.Wrapped:
    """Returns a function of `(inputs, kept, updated)`, lists of jax.Arrays, that returns `(results, updated)`.

    `kept` and `updated` are the captured variables, as `split` orders them. The memory of `updated` is donated.

    Args:
        program: Lowered function.
        inputs: Shape, dtype and sharding of each of the function's own arguments.
        state: The same of each captured variable; jax.Arrays have them.
        results: Sharding of each result of the function.
    """
    arguments = [*inputs, *state]
    devices = arguments[0].sharding.mesh.devices
    platform = devices.flat[0].platform
    call = _as_jax_function(program, arguments, _EXPORTED.get(platform, platform))

    def step(inputs, kept, updated):
        found = call(*inputs, *_joined(program, kept, updated))
        return found[:len(results)], found[len(results):]

    of_inputs = [value.sharding for value in inputs]
    of_kept, of_updated = split(program, [value.sharding for value in state])
    options = _OPTIONS.get(platform) if devices.size == 1 else None
    return jax.jit(step, donate_argnums=2, in_shardings=(of_inputs, of_kept, of_updated),
                   out_shardings=(list(results), of_updated), compiler_options=options)


def split(program: lowering.Program, state: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Returns the captured variables that the function only reads, and those that it assigns."""
    updated = set(program.updated)
    return ([value for index, value in enumerate(state) if index not in updated],
            [state[index] for index in program.updated])


def _joined(program, kept, updated):
    """Returns the captured variables in order."""
    assigned, others = dict(zip(program.updated, updated, strict=True)), iter(kept)
    return [assigned[index] if index in assigned else next(others) for index in range(len(program.captured))]


def _as_jax_function(program, arguments, platform):
    """Returns a function of jax.Arrays that runs a lowered program.

    A function of the same signature is exported, and its module replaced. `jax.export.Exported` is public, and one that
    was exported for a single device may be called in a program of any number of them.
    """
    updated = [arguments[index - len(program.captured)] for index in program.updated]
    results = [*program.results, *((value.shape, value.dtype) for value in updated)]
    skeleton = jax.jit(lambda *_: [jax.numpy.zeros(*result) for result in results])
    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in arguments]
    exported = jax.export.export(skeleton, platforms=[platform])(*shapes)
    return dataclasses.replace(exported, mlir_module_serialized=program.module,
                               module_kept_var_idx=tuple(range(len(shapes)))).call
