"""A lowered TensorFlow function that JAX compiles and runs, with the variables of the pjrt back end as arguments."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import tensorflow as tf
from jax.sharding import NamedSharding, PartitionSpec

from switch_tf import context
from switch_tf.partitioning import lowering
from switch_tf.partitioning.backends.pjrt_variable import PjrtVariable


class PjrtProgram:
    """A function of placed features as one program on all devices, which updates the variables that it assigns.

    It is compiled by `build` or by the first call, for the shapes of that call.

    Args:
        function: Function of features, as tensors, that returns a nest of tensors, equal on every device.
        annotator: `axes.Annotator` of the trace, or None for one device.
        variables: Function that returns the variables that exist when the program is lowered.
        features: jax.sharding.NamedSharding of each feature.
    """

    def __init__(self, function: Callable[..., Any], annotator: Any, variables: Callable[[], list[PjrtVariable]],
                 features: NamedSharding):
        self._function, self._annotator, self._variables, self._features = function, annotator, variables, features
        self._compiled: jax.stages.Compiled | None = None
        self._structure: Any = None  # of the function's results
        self._kept: list[PjrtVariable] = []
        self._updated: list[PjrtVariable] = []

    @property
    def text(self) -> str:
        """The compiled program of one device, as XLA prints it; "" before `build`."""
        return self._compiled.as_text() if self._compiled else ""

    def build(self, specs: Mapping[str, tf.TensorSpec]) -> None:
        """Compiles the program for features of these shapes, without running it."""
        by_symbol = {id(variable.symbol): variable for variable in self._variables()}
        lowered = lowering.lower(
            context.within(annotator=self._annotator)(
                lambda *tensors: self._function(dict(zip(specs, tensors, strict=True)))),
            [tf.TensorSpec(spec.shape, spec.dtype) for spec in specs.values()],
            [variable.symbol for variable in by_symbol.values()])
        state = [by_symbol[id(symbol)] for symbol in lowered.captured]
        self._structure = lowered.structure
        self._updated = [state[index] for index in lowered.updated]
        self._kept = [variable for index, variable in enumerate(state) if index not in set(lowered.updated)]
        features = {name: jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype.as_numpy_dtype, sharding=self._features)
                    for name, spec in specs.items()}
        self._compiled = self._jit(lowered, features, state).lower(features, *self._arrays()).compile()

    def _jit(self, lowered, features, state):
        """Returns the program as a `jax.jit` of features, the arrays that stay, and those that results replace."""
        kept = [index for index in range(len(state)) if index not in set(lowered.updated)]
        program = as_jax_function(lowered, [*features.values(), *(variable.array for variable in state)],
                                  self._features.mesh.devices.flat[0].platform)

        names = list(features)  # in the program's order; JAX sorts those of a dict

        def step(features, kept_arrays, updated_arrays):
            arrays = dict(zip(kept, kept_arrays, strict=True)) | dict(zip(lowered.updated, updated_arrays, strict=True))
            found = program(*(features[name] for name in names), *(arrays[index] for index in range(len(state))))
            return found[:len(lowered.results)], found[len(lowered.results):]

        whole = NamedSharding(self._features.mesh, PartitionSpec())
        updated = [variable.array.sharding for variable in self._updated]
        return jax.jit(step, donate_argnums=2, in_shardings=(
            dict.fromkeys(features, self._features), [variable.array.sharding for variable in self._kept], updated),
            out_shardings=([whole] * len(lowered.results), updated))

    def _arrays(self):
        return [variable.array for variable in self._kept], [variable.array for variable in self._updated]

    def __call__(self, features: dict[str, jax.Array]) -> Any:
        if self._compiled is None:
            self.build({name: tf.TensorSpec(value.shape, value.dtype) for name, value in features.items()})
        results, updated = self._compiled(features, *self._arrays())
        for variable, array in zip(self._updated, updated, strict=True):
            variable.array = array
        return tf.nest.pack_sequence_as(self._structure, results)


def as_jax_function(lowered: lowering.Program, arguments: Sequence[Any], platform: str) -> Callable[..., Any]:
    """Returns a function of jax.Arrays that runs a lowered program; it returns its results, then the updated variables.

    A function of the same signature is exported, and its module replaced. `jax.export.Exported` is public, and one that
    was exported for a single device may be called in a program of any number of them.

    Args:
        lowered: Lowered function.
        arguments: Arrays, or their shapes and dtypes, of its own arguments and of the variables that it captured.
        platform: JAX's name of the devices, such as "cpu".
    """
    shapes = [jax.ShapeDtypeStruct(argument.shape, argument.dtype) for argument in arguments]
    state = shapes[len(shapes) - len(lowered.captured):]
    results = [*lowered.results, *((state[index].shape, state[index].dtype) for index in lowered.updated)]
    skeleton = jax.jit(lambda *_: [jax.numpy.zeros(*result) for result in results])
    exported = jax.export.export(skeleton, platforms=[platform])(*shapes)
    return dataclasses.replace(exported, mlir_module_serialized=lowered.module,
                               module_kept_var_idx=tuple(range(len(shapes)))).call
