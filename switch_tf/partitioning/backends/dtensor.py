"""DTensor: one program, which TensorFlow cuts over a mesh of CPUs, GPUs or TPUs, in one process or several.

Every variable is a `DTensorVariable`, stored in the pieces of its logical axes. Two things would go wrong without an
error:

* TensorFlow combines all-reduces, which may move the read of a variable past its update. So one function computes
  gradients and another applies them.
* A variable that is not one would be updated once for each device. So all are converted, and checked.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from switch_tf import context
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.hardware import chips
from switch_tf.partitioning.axes import axes_of_new_variable
from switch_tf.partitioning.backends import dtensor_mesh
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.dtensor_variable import DTensorVariable, pack, slices
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.pieces import Piece, in_host_memory, slice_text
from switch_tf.partitioning.tensors import Tensor
from switch_tf.partitioning.unfolded import UnfoldedVariable, as_stored, as_used, stored, unfolding
from switch_tf.refusals import Refusal


def create(layout: Layout, members: Cluster) -> "DTensorPartitioner":
    """Creates the partitioner of one program over the devices of all processes; see `dtensor_mesh.start`."""
    return DTensorPartitioner(*dtensor_mesh.start(layout, members))


class DTensorPartitioner(Partitioner):
    """A mesh of devices, over which the layout's rules split weights, slots and activations.

    DTensor splits a dimension over one mesh axis. Weights that lie over several axes are stored unfolded.

    Args:
        layout: Layout with its mesh complete.
        mesh: DTensor's mesh with the same axes.

    Raises:
        Refusal: See `dtensor_mesh.check_layout`.
    """

    is_for_compiler = False

    def __init__(self, layout: Layout, mesh: dtensor.Mesh):
        super().__init__(layout)
        dtensor_mesh.check_layout(layout)
        self.mesh = mesh
        self.num_processes = dtensor.num_clients()
        self.process_index = dtensor.client_id()
        self._any = tf.function(lambda flags: self._replicate(tf.reduce_max(flags)), autograph=False)

    def check(self, config: SwitchConfig, steps_per_call: int, use_xla: bool) -> None:
        if steps_per_call > 1:
            raise Refusal(f"steps_per_call is {steps_per_call}, but under DTensor a step is two functions, so that "
                          "no variable is read after its update; set it to 1.")
        if use_xla:
            raise Refusal("use_xla=True compiles the step of one device; DTensor cuts the step first, so leave "
                          "use_xla at False under a layout of several devices.")
        if self.mesh.device_type() == "TPU":
            chips.check_memory(self.layout.stored_bytes(config.weights()),
                               "The layout stores weights and gradients in pieces",
                               "use a layout that cuts them into smaller ones (at_rest_rules), or more devices")

    def sharding(self, axes: Sequence[str | None]) -> dtensor.Layout:
        """Returns DTensor's layout for logical axes, split over the outermost mesh axis of each."""
        spec = [[axis for axis in mesh_axes if axis in self.mesh.dim_names and self.mesh.dim_size(axis) > 1]
                for mesh_axes in self.layout.spec(axes)]
        return self._layout([(*mesh_axes, None)[0] for mesh_axes in spec])

    def _layout(self, mesh_axes):
        return dtensor.Layout([axis or dtensor.UNSHARDED for axis in mesh_axes], self.mesh)

    # An `axes.Annotator`.

    def constrain(self, x: Tensor, axes: Sequence[str | None]) -> Tensor:
        return dtensor.relayout(x, self.sharding(axes))

    def gather(self, value: Tensor, axes: Sequence[str | None]) -> Tensor:
        if self.layout.spec(axes) == self.layout.spec(axes, at_rest=True):
            return value
        return self.constrain(value, axes)

    def scatter(self, gradient: Tensor, axes: Sequence[str | None]) -> Tensor:
        # As it is used; `step` scatters it. Scattered here, its pieces would decide the layouts of activations.
        return self.constrain(gradient, axes)

    def replicate(self, x: Tensor) -> Tensor:
        return x  # already replicated, and DTensor cannot move unsigned integers

    # Variables.

    @contextlib.contextmanager
    def creates_variables(self) -> Iterator[None]:
        with tf.variable_creator_scope(self._create):
            yield

    def _create(self, next_creator, **kwargs):
        with tf.device("CPU:0"):
            value = kwargs["initial_value"]
            value = tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))
        axes = axes_of_new_variable(value.shape.rank)
        storage, mesh_axes = unfolding(value.shape, self.layout.spec(axes, at_rest=True), self.layout.mesh)
        variable = DTensorVariable(pack(storage.unfold(value.numpy(), np), self._layout(mesh_axes)),
                                   name=kwargs.get("name"), trainable=kwargs.get("trainable"))
        if not storage.first:
            return variable
        return UnfoldedVariable(variable, storage, self.sharding(axes))

    def _adopt(self, optimizer):
        for variable in optimizer.variables:
            # Keras identifies the variable by the object that wraps it.
            variable._value = self._create(None, initial_value=variable.value, dtype=variable.dtype,
                                           name=variable.name, trainable=False)

    def build(self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None,
              select: Callable[[keras.Model], None] = lambda model: None) -> None:
        super().build(model, optimizer, select)
        if optimizer is not None:  # and not one that an objective runs beside the trained model
            self._trained = model.trainable_variables

    def _is_laid_out(self, variable):
        return isinstance(stored(variable), DTensorVariable)

    # Steps.

    def rows(self, batch_size: int) -> tuple[int, int]:
        axis = self.sharding(("batch",)).sharding_specs[0]
        if axis == dtensor.UNSHARDED:
            return 0, batch_size
        pieces = [location[axis] for location in self.mesh.local_device_locations()]
        size = batch_size // self.mesh.dim_size(axis)
        return min(pieces) * size, (max(pieces) + 1) * size

    def place(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        # One step a call, without the axis of steps: indexing that axis would move the batch between devices.
        sharding = self.sharding(("batch", "length"))
        return {name: pack(np.asarray(value[0]), sharding) for name, value in features.items()}

    def step(self, compute: Callable[..., Any], apply: Callable[..., Any], use_xla: bool = False) -> Callable[..., Any]:
        def computed(features):
            with context.within(annotator=self):
                gradients, totals, measured, is_finite = compute(features)
                others = tf.nest.map_structure(self._replicate, (totals, measured, is_finite))
                return as_stored(gradients, self._trained), others

        def applied(gradients, totals):
            with context.within(annotator=self):
                apply(as_used(gradients, self._trained), totals)

        compute_function = tf.function(computed, autograph=False)
        apply_function = tf.function(applied, autograph=False)

        def one_step(features, index):
            gradients, (totals, measured, is_finite) = compute_function(features)
            is_finite = self.on_host(is_finite)
            if bool(is_finite):
                apply_function(gradients, totals)
            return tf.nest.map_structure(self.on_host, measured), is_finite

        return one_step

    def results(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def traced(features):
            with context.within(annotator=self):
                return tf.nest.map_structure(self._replicate, call(features))

        function = tf.function(traced, autograph=False)
        return lambda features: tf.nest.map_structure(self.on_host, function(features))

    def compile(self, function: Callable[..., Any], use_xla: bool = False) -> Callable[..., Any]:
        return function  # its two parts are compiled functions

    def trace(self, function: Any, specs: dict[str, tf.TensorSpec]) -> None:
        """Does nothing, because a DTensor function is traced with tensors."""

    def pieces(self, state: dict[str, Any]) -> list[Piece]:
        return [piece for path, variable in state.items() for piece in self._pieces_of(path, variable)]

    def _pieces_of(self, path, variable):
        """Yields the pieces of this process's devices, without copies of another device's piece."""
        layout = variable.layout
        for location, index, piece in zip(self.mesh.local_device_locations(), slices(variable.shape, layout),
                                          dtensor.unpack(variable.read_value()), strict=True):
            if all(place == 0 or axis in layout.sharding_specs for axis, place in location.items()):
                yield Piece(path, slice_text(variable.shape, index), in_host_memory(piece.numpy()))

    def _on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return tf.function(lambda: self._replicate(function()), autograph=False)

    def any_process(self, flag: bool) -> bool:
        if self.num_processes == 1:
            return flag
        everywhere = dtensor.Layout(list(self.mesh.dim_names), self.mesh)
        flags = dtensor.pack([tf.fill([1] * len(self.mesh.dim_names), int(flag))] * self.mesh.num_local_devices(),
                             everywhere)
        return bool(self.on_host(self._any(flags)))

    def barrier(self) -> None:
        if self.num_processes > 1:
            dtensor.barrier(self.mesh)

    def _replicate(self, x):
        return dtensor.relayout(x, dtensor.Layout.replicated(self.mesh, x.shape.rank))

    def on_host(self, tensor: Tensor) -> Tensor:
        return dtensor.unpack(tensor)[0]
