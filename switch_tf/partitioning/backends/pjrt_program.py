"""A lowered TensorFlow function that JAX compiles and runs, with the variables of the pjrt back end as arguments."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorflow as tf
from jax.sharding import NamedSharding, PartitionSpec

from switch_tf import context
from switch_tf.partitioning import lowering
from switch_tf.partitioning.backends import pjrt_jit
from switch_tf.partitioning.backends.pjrt_variable import PjrtVariable, put


class _Constant(NamedTuple):
    """A tensor that the function captured."""

    array: jax.Array


class _Compiled(NamedTuple):
    """The program for features of some shapes.

    Attributes:
        executable: Compiled program of `(features, kept, updated)`.
        names: Features in the order of its arguments.
        kept, updated: Variables that it only reads, and those that it assigns.
        structure: Nest of the function's results.
    """

    executable: jax.stages.Compiled
    names: list[str]
    kept: list[PjrtVariable | _Constant]
    updated: list[PjrtVariable]
    structure: Any


class PjrtProgram:
    """A function of placed features as one program on all devices, which updates the variables that it assigns.

    It is compiled by `build`, or by the first call with features of other shapes.

    Args:
        function: Function of features, as tensors, that returns a nest of tensors, equal on every device.
        annotator: `axes.Annotator` of the trace, or None for one device.
        variables: Function that returns the variables that exist when the program is lowered.
        features: jax.sharding.NamedSharding of each feature.
    """

    def __init__(self, function: Callable[..., Any], annotator: Any, variables: Callable[[], list[PjrtVariable]],
                 features: NamedSharding):
        self._function, self._annotator, self._variables, self._features = function, annotator, variables, features
        self._compiled: dict[tuple, _Compiled] = {}

    @property
    def text(self) -> str:
        """The program that was compiled first, of one device, as XLA prints it; "" before `build`."""
        first = next(iter(self._compiled.values()), None)
        return first.executable.as_text() if first else ""

    def build(self, specs: Mapping[str, tf.TensorSpec]) -> None:
        """Compiles the program for features of these shapes, without running it."""
        self._compiled[_shapes(specs)] = self._build(specs)

    def _build(self, specs):
        by_symbol = {id(variable.symbol): variable for variable in self._variables()}

        def traced(*tensors):
            with context.within(annotator=self._annotator, is_lowered=True):
                return self._function(dict(zip(specs, tensors, strict=True)))

        mesh = self._features.mesh
        lowered = lowering.lower(traced, [tf.TensorSpec(spec.shape, spec.dtype) for spec in specs.values()],
                                 [variable.symbol for variable in by_symbol.values()], dict(mesh.shape))
        whole = NamedSharding(mesh, PartitionSpec())
        state = [by_symbol[id(captured)] if id(captured) in by_symbol else _Constant(put(captured.numpy(), whole))
                 for captured in lowered.captured]
        kept, updated = pjrt_jit.split(lowered, state)
        inputs = [jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype.as_numpy_dtype, sharding=self._features)
                  for spec in specs.values()]
        jitted = pjrt_jit.jit(lowered, inputs, [variable.array for variable in state], [whole] * len(lowered.results))
        executable = jitted.lower(inputs, *([one.array for one in part] for part in (kept, updated))).compile()
        return _Compiled(executable, list(specs), kept, updated, lowered.structure)

    def __call__(self, features: dict[str, jax.Array]) -> Any:
        """Runs the program.

        An exception while it runs, such as one for want of memory, leaves the variables that it assigns without values.

        Args:
            features: Feature name -> <int32>[steps, batch, length], laid out by the partitioner's `place`.

        Returns:
            The nest of the function's results, as jax.Arrays that every device has.
        """
        if _shapes(features) not in self._compiled:
            self.build({name: tf.TensorSpec(value.shape, value.dtype) for name, value in features.items()})
        program = self._compiled[_shapes(features)]
        results, updated = program.executable([features[name] for name in program.names],
                                              [variable.array for variable in program.kept],
                                              [variable.array for variable in program.updated])
        for variable, array in zip(program.updated, updated, strict=True):
            variable.array = array
        found = iter(results)
        return tf.nest.map_structure(lambda is_tensor: next(found) if is_tensor else None, program.structure)


def _shapes(features):
    """Returns a key for the names, shapes and dtypes of features or of their specs."""
    return tuple((name, tuple(feature.shape), np.dtype(tf.as_dtype(feature.dtype).as_numpy_dtype))
                 for name, feature in features.items())
