"""PJRT, XLA's client in JAX for CPUs, GPUs and TPUs: TensorFlow writes the step, and JAX runs it.

Every weight and slot is a `jax.Array` in the pieces of its logical axes. XLA cuts a step, gradients and update
together, over the mesh.
"""

import contextlib
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.hardware import chips, devices
from switch_tf.partitioning import lowering
from switch_tf.partitioning.axes import Axes, axes_of_new_variable
from switch_tf.partitioning.backends import pjrt_client
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import FLAGS, Partitioner, initial_value
from switch_tf.partitioning.variables import Piece, PjrtVariable, laid_out, put
from switch_tf.refusals import Refusal

_FEATURES = (None, "batch", "length")  # axes of placed features
# Phrases of a lost process, from collectives on CPUs and GPUs and the coordination service.
_LOST_PROCESS = ("Gloo ", "remote process exited", "CoordinationServiceError", "GetKeyValue")


def create(layout: Layout, members: Cluster) -> "PjrtPartitioner":
    """Creates the partitioner of one program over all processes' devices."""
    layout.check_processes(len(members.addresses))
    pjrt_client.start(members)
    return PjrtPartitioner(layout.resolve(jax.device_count(), devices.device_type()))


class PjrtPartitioner(Partitioner):
    """A mesh of JAX's devices. The layout's rules split weights, slots and activations over it.

    Attributes:
        variables: The live variables.
    """

    has_fixed_shapes = is_asynchronous = True

    def __init__(self, layout: Layout):
        super().__init__(layout)
        self.mesh: Mesh = lowering.device_mesh(layout, jax.devices()[:layout.num_devices])
        self.num_processes, self.process_index = jax.process_count(), jax.process_index()
        self.variables: weakref.WeakSet[PjrtVariable] = weakref.WeakSet()
        self._flags = jax.jit(lambda arrays: jax.numpy.stack([jax.numpy.isfinite(array).all() for array in arrays]),
                              out_shardings=self.sharding((None,)))

    def check(self, config: SwitchConfig, steps_per_call: int, use_xla: bool) -> None:
        if use_xla:
            raise Refusal("The pjrt back end compiles every step with XLA, so use_xla=True has no meaning there; "
                          "leave it at False.")
        if config.dispatch == "ragged":
            raise Refusal("dispatch='ragged' needs shapes that depend on values, which XLA has not; use "
                          "dispatch='auto' with the pjrt back end.")
        # The host's memory has no limit here.
        room = (self.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
        chips.check_memory(self.layout.stored_bytes(config.weights()), room)

    def sharding(self, axes: Axes, at_rest: bool = False) -> NamedSharding:
        """Returns JAX's sharding for logical axes."""
        return lowering.named_sharding(self.mesh, self.layout.spec(axes, at_rest))

    def _is_laid_out(self, variable):
        return isinstance(variable.value, PjrtVariable)

    def _create(self, next_creator, **kwargs):
        initial = initial_value(kwargs)
        sharding = self.sharding(axes_of_new_variable(len(initial.shape)), at_rest=True)
        symbol = next_creator(**{**kwargs, "initial_value": lowering.reserved(initial.shape, initial.dtype)})
        return self._variable(symbol, initial.piece, sharding)

    def _variable(self, symbol, piece, sharding):
        variable = PjrtVariable(symbol, laid_out(tuple(symbol.shape), symbol.dtype.as_numpy_dtype, sharding, piece))
        self.variables.add(variable)
        return variable

    def _adopt(self, optimizer):
        for variable in optimizer.variables:
            if not self._is_laid_out(variable):
                variable._value = self._variable(
                    variable.value, variable.value.numpy().__getitem__, self.sharding(()))

    def keep_programs(self, folder: str) -> None:
        if jax.config.jax_compilation_cache_dir == pjrt_client.own_programs():
            jax.config.update("jax_compilation_cache_dir", folder)

    def rows(self, batch_size: int) -> list[tuple[int, int]]:
        return lowering.rows_of_process(self.sharding(("batch",)), batch_size, self.process_index)

    def place(self, features: dict[str, Any]) -> dict[str, jax.Array]:
        sharding = self.sharding(_FEATURES)
        return {name: put(np.asarray(value), sharding) for name, value in features.items()}

    def place_flags(self, flags: Sequence[bool]) -> dict[str, jax.Array]:
        rows = np.tile(np.array(flags, np.int32), (self.layout.num_devices, 1))
        return {name: put(rows, self.sharding_of(name)) for name in self.flag_specs(len(flags))}

    def flag_specs(self, count: int) -> dict[str, tf.TensorSpec]:
        several = self.num_processes > 1
        return {FLAGS: tf.TensorSpec((self.layout.num_devices, count), tf.int32)} if several else {}

    def sharding_of(self, feature: str) -> NamedSharding:
        """Returns the sharding of a placed feature."""
        if feature == FLAGS:
            return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        return self.sharding(_FEATURES)

    def compile(self, function: Callable, use_xla: bool = False) -> "PjrtProgram":
        return PjrtProgram(function, self)

    def trace(self, function: "PjrtProgram", specs: dict[str, tf.TensorSpec]) -> None:
        """Compiles a program before its first call."""
        function.build(specs)

    @contextlib.contextmanager
    def profile(self, folder: pathlib.Path) -> Iterator[Callable[[int], AbstractContextManager]]:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python calls would fill the file
        with jax.profiler.trace(folder, profiler_options=options):
            yield lambda number: jax.profiler.StepTraceAnnotation("train", step_num=number)

    def program_text(self, function: "PjrtProgram") -> str:
        return function.text

    def pieces(self, state: dict[str, PjrtVariable]) -> list[Piece]:
        return [Piece(path, text, value) for path, variable in state.items()
                for text, value in variable.pieces().items()]

    def _finite_flags(self, values):
        return self._flags([value.array for value in values])

    def any_process(self, flag: bool) -> bool:
        if self.num_processes == 1:
            return flag
        return bool(np.any(multihost_utils.process_allgather(np.array(flag))))

    def gather_texts(self, text: str) -> list[str]:
        if self.num_processes == 1:
            return [text]
        letters = np.frombuffer(text.encode(), np.uint8)
        lengths = multihost_utils.process_allgather(np.array(letters.size))
        rows = multihost_utils.process_allgather(np.pad(letters, (0, lengths.max() - letters.size)))
        return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def barrier(self) -> None:
        if self.num_processes > 1:
            multihost_utils.sync_global_devices("switch_tf")

    def is_lost_process(self, error: BaseException) -> bool:
        # JAX raises its own class, or ValueError for a program that just started.
        return (self.num_processes > 1 and isinstance(error, (jax.errors.JaxRuntimeError, ValueError))
                and any(words in str(error) for words in _LOST_PROCESS))


class PjrtProgram:
    """A function of placed features as one program on all devices. It updates the variables that it assigns.

    `build` compiles it, or the first call with new shapes.

    Args:
        function: Returns a nest of tensors, equal on every device.
    """

    def __init__(self, function: Callable, partitioner: PjrtPartitioner):
        self._function, self._partitioner = function, partitioner
        # Shapes -> executable, feature names in order, captured state, updated variables, structure of results.
        self._compiled: dict[tuple, tuple] = {}

    @property
    def text(self) -> str:
        """XLA's text of the first program, for one device; "" before `build`."""
        return next(iter(self._compiled.values()))[0].as_text() if self._compiled else ""

    def build(self, specs: Mapping[str, tf.TensorSpec]) -> None:
        """Compiles the program for these shapes."""
        by_symbol = {id(variable.symbol): variable for variable in self._partitioner.variables}
        lowered = lowering.lower_call(
            self._function, specs, [variable.symbol for variable in by_symbol.values()], self._partitioner.layout)
        whole, sharding_of = self._partitioner.sharding(()), self._partitioner.sharding_of
        state = [by_symbol[id(captured)] if id(captured) in by_symbol else put(captured.numpy(), whole)
                 for captured in lowered.captured]
        arguments = [jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype.as_numpy_dtype, sharding=sharding_of(name))
                     for name, spec in specs.items()] + _arrays(state)
        executable = lowering.jit(lowered, arguments).lower(*arguments).compile()
        self._compiled[_shapes(specs)] = (executable, list(specs), state, [state[index] for index in lowered.updated],
                                          lowered.structure)

    def __call__(self, features: dict[str, jax.Array]) -> Any:
        """Runs the program, and returns its nest of results as jax.Arrays on every device.

        A failure while it runs, e.g. for lack of memory, leaves the variables that it assigns without values.

        Args:
            features: Feature name -> <int32>[steps, batch, length], from `place`.
        """
        if _shapes(features) not in self._compiled:
            self.build({name: tf.TensorSpec(value.shape, value.dtype) for name, value in features.items()})
        executable, names, state, updated, structure = self._compiled[_shapes(features)]
        arrays = iter(executable(*(features[name] for name in names), *_arrays(state)))
        results = tf.nest.map_structure(lambda is_tensor: next(arrays) if is_tensor else None, structure)
        for variable, array in zip(updated, arrays, strict=True):
            variable.array = array
        return results


def _arrays(state):
    return [one.array if isinstance(one, PjrtVariable) else one for one in state]


def _shapes(features):
    return tuple((name, tuple(feature.shape), np.dtype(tf.as_dtype(feature.dtype).as_numpy_dtype))
                 for name, feature in features.items())
