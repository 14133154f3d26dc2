"""A lowered TensorFlow function that JAX compiles and runs, with the variables of the pjrt back end as arguments."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
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
        mesh: jax.sharding.Mesh of the devices.
        features: jax.sharding.NamedSharding of each feature.
    """

    def __init__(self, function: Callable[..., Any], annotator: Any, variables: Callable[[], list[PjrtVariable]],
                 mesh: jax.sharding.Mesh, features: NamedSharding):
        self._function, self._annotator, self._variables = function, annotator, variables
        self._mesh, self._features = mesh, features
        self._compiled: jax.stages.Compiled | None = None

    @property
    def text(self) -> str:
        """The compiled program of one device, as XLA prints it; "" before `build`."""
        return self._compiled.as_text() if self._compiled else ""

    def build(self, specs: Mapping[str, tf.TensorSpec]) -> None:
        """Compiles the program for features of these shapes, without running it."""
        names = list(specs)
        by_symbol = {id(variable.symbol): variable for variable in self._variables()}

        def annotated(*tensors):
            with context.within(annotator=self._annotator):
                return self._function(dict(zip(names, tensors, strict=True)))

        self._lowered = lowered = lowering.lower(annotated, [tf.TensorSpec(spec.shape, spec.dtype) for spec in
                                                             specs.values()],
                                                 [variable.symbol for variable in by_symbol.values()])
        self._names = names
        state = [by_symbol[id(symbol)] for symbol in lowered.captured]
        self._updated = [state[index] for index in lowered.updated]
        self._kept = [variable for index, variable in enumerate(state) if index not in set(lowered.updated)]
        shapes = {name: jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype.as_numpy_dtype, sharding=self._features)
                  for name, spec in specs.items()}
        self._compiled = self._jit(specs, state).lower(shapes, *self._arrays()).compile()

    def _jit(self, specs, state):
        lowered, num_results = self._lowered, len(self._lowered.results)
        kept = [index for index in range(len(state)) if index not in set(lowered.updated)]
        call = _as_jax_function(
            lowered, [(tuple(spec.shape), spec.dtype.as_numpy_dtype) for spec in specs.values()],
            [variable.array for variable in state], self._mesh.devices.flat[0].platform)

        def step(features, kept_arrays, updated_arrays):
            arrays = dict(zip(kept, kept_arrays, strict=True)) | dict(zip(lowered.updated, updated_arrays, strict=True))
            found = call(*[features[name] for name in self._names], *[arrays[index] for index in range(len(state))])
            return found[:num_results], found[num_results:]

        whole = NamedSharding(self._mesh, PartitionSpec())
        in_kept, in_updated = ([variable.array.sharding for variable in variables]
                               for variables in (self._kept, self._updated))
        return jax.jit(step, donate_argnums=2,
                       in_shardings=(dict.fromkeys(self._names, self._features), in_kept, in_updated),
                       out_shardings=([whole] * num_results, in_updated))

    def _arrays(self):
        return [variable.array for variable in self._kept], [variable.array for variable in self._updated]

    def __call__(self, features: dict[str, jax.Array]) -> Any:
        if self._compiled is None:
            self.build({name: tf.TensorSpec(value.shape, value.dtype) for name, value in features.items()})
        results, updated = self._compiled(features, *self._arrays())
        for variable, array in zip(self._updated, updated, strict=True):
            variable.array = array
        return tf.nest.pack_sequence_as(self._lowered.structure, results)


def _as_jax_function(lowered, features, state, platform):
    """Returns a function of jax.Arrays that runs a lowered program.

    A function of the same signature is exported, and its module replaced. `jax.export.Exported` is public, and one that
    was exported for a single device may be called in a program of any number of them.
    """
    results = [*lowered.results, *((state[index].shape, state[index].dtype) for index in lowered.updated)]
    skeleton = jax.jit(lambda *_: [jax.numpy.zeros(*result) for result in results])
    shapes = [*(jax.ShapeDtypeStruct(*feature) for feature in features),
              *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state)]
    exported = jax.export.export(skeleton, platforms=[platform])(*shapes)
    return dataclasses.replace(exported, mlir_module_serialized=lowered.module,
                               module_kept_var_idx=tuple(range(len(shapes)))).call
