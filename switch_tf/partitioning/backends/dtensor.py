"""DTensor: one program that TensorFlow cuts over a mesh of CPUs or GPUs, in one process or several.

Two rules prevent silent errors:

* TensorFlow combines all-reduces, and may move a variable's read past its update. So one function computes gradients
  and another applies them.
* A plain tf.Variable would be updated once per device. So all variables are converted to `DTensorVariable` and checked.
"""

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from switch_tf import context, environment
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.hardware import devices
from switch_tf.partitioning.axes import Axes, axes_of_new_variable
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner, initial_value
from switch_tf.partitioning.tensors import Tensor
from switch_tf.partitioning.variables import (
    DTensorVariable,
    Piece,
    UnfoldedVariable,
    fold_gradients,
    host_tensor,
    pack,
    slice_text,
    slices,
    stored,
    unfolding,
)
from switch_tf.refusals import Refusal


def create(layout: Layout, members: Cluster) -> Partitioner:
    """Creates the partitioner of one program over all processes' devices, and starts this process's.

    With backend="auto", one device trains without DTensor.
    """
    kind, num_processes = devices.device_type(), len(members.addresses)
    if kind == "TPU":
        way = "'tpu'" if environment.installed_version("tensorflow-tpu") else "'pjrt', which 'auto' stands for here"
        raise Refusal(f"backend={layout.backend!r} trains with DTensor here, which is for CPUs and GPUs, and this "
                      f"machine has a TPU; use backend={way}.")
    layout.check_processes(num_processes)
    if num_processes > 1:
        os.environ.update(DTENSOR_JOB_NAME="worker", DTENSOR_JOBS=",".join(members.addresses),
                          DTENSOR_CLIENT_ID=str(members.index), DTENSOR_NUM_CLIENTS=str(num_processes))
    # Counts virtual devices too, without starting them: several processes must not list devices yet.
    count = num_processes * dtensor.num_local_devices(kind)
    layout = layout.resolve(count, kind)
    if split := layout.axes_over_several:
        raise Refusal(f"The layout splits {' and '.join(split)} over several mesh axes at once, and DTensor splits "
                      "an axis of activations over one; use backend='pjrt', which splits it over all of them, "
                      "gin/layouts/expert.gin or fully_sharded.gin, or leave all of these mesh axes but one at "
                      "size 1 in MESH_SHAPE.")
    if layout.backend == "auto" and num_processes == layout.num_devices == 1:
        return Partitioner(layout)
    dimensions = list(layout.mesh.items())
    if kind == "GPU":
        os.environ.setdefault("DTENSOR_GPU_USE_NCCL_COMMUNICATION", "1")
        # Makes a CPU device for each GPU, to write checkpoints.
        dtensor.initialize_accelerator_system(kind)
    elif num_processes > 1:
        # TensorFlow recreates the virtual CPU devices here.
        dtensor.initialize_accelerator_system(kind, num_logical_cpu_devices=count // num_processes)
    if num_processes > 1:
        return DTensorPartitioner(layout, dtensor.create_distributed_mesh(dimensions, device_type=kind))
    return DTensorPartitioner(layout, dtensor.create_mesh(
        dimensions, devices=[f"{kind}:{index}" for index in range(layout.num_devices)]))


class DTensorPartitioner(Partitioner):
    """A mesh of devices. The layout's rules split weights, slots and activations over it.

    Args:
        layout: Has a complete mesh, and splits each axis of activations over one mesh axis.
        mesh: DTensor's mesh with the same axes.
    """

    is_for_compiler = False

    def __init__(self, layout: Layout, mesh: dtensor.Mesh):
        super().__init__(layout)
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

    def sharding(self, axes: Axes) -> dtensor.Layout:
        """Returns DTensor's layout for logical axes, over the outermost mesh axes."""
        return self._layout([next((axis for axis in mesh_axes if self.mesh.dim_size(axis) > 1), None)
                             for mesh_axes in self.layout.spec(axes)])

    def _layout(self, mesh_axes):
        return dtensor.Layout([axis or dtensor.UNSHARDED for axis in mesh_axes], self.mesh)

    def constrain(self, x: Tensor, axes: Axes) -> Tensor:
        return dtensor.relayout(x, self.sharding(axes))

    def gather(self, value: Tensor, axes: Axes) -> Tensor:
        if self.layout.spec(axes) == self.layout.spec(axes, at_rest=True):
            return value
        return self.constrain(value, axes)

    def scatter(self, gradient: Tensor, axes: Axes) -> Tensor:
        # As used; `step` scatters it. Scattered pieces here would decide the layouts of activations.
        return self.constrain(gradient, axes)

    def replicate(self, x: Tensor) -> Tensor:
        return x  # already replicated; DTensor cannot move unsigned integers

    def _create(self, next_creator, **kwargs):
        with tf.device("CPU:0"):
            initial = initial_value(kwargs)
        axes = axes_of_new_variable(len(initial.shape))
        storage, mesh_axes = unfolding(initial.shape, self.layout.spec(axes, at_rest=True), self.layout.mesh)
        whole = initial.piece((slice(None),) * len(initial.shape)).astype(initial.dtype.as_numpy_dtype)
        variable = DTensorVariable(pack(storage.unfold(whole, np), self._layout(mesh_axes)),
                                   name=kwargs.get("name"), trainable=kwargs.get("trainable"))
        if not storage.first:
            return variable
        return UnfoldedVariable(variable, storage, self.sharding(axes))

    def _adopt(self, optimizer):
        for variable in optimizer.variables:
            if not self._is_laid_out(variable):
                # Keras' identity is the wrapper.
                variable._value = self._create(None, initial_value=variable.value, dtype=variable.dtype,
                                               name=variable.name, trainable=False)

    def build(self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None,
              select: Callable[[keras.Model], None] = lambda model: None, draws_weights: bool = True) -> None:
        super().build(model, optimizer, select, draws_weights)
        if optimizer is not None:  # not for an objective's second model
            self._trained = model.trainable_variables

    def _is_laid_out(self, variable):
        return isinstance(stored(variable), DTensorVariable)

    def rows(self, batch_size: int) -> list[tuple[int, int]]:
        return sorted({index[0].indices(batch_size)[:2] for index in slices((batch_size,), self.sharding(("batch",)))})

    def place(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        # One step a call: indexing an axis of steps would move the batch between devices.
        sharding = self.sharding(("batch", "length"))
        return {name: pack(np.asarray(value[0]), sharding) for name, value in features.items()}

    def step(self, compute: Callable, apply: Callable, use_xla: bool = False) -> Callable:
        def computed(features):
            gradients, totals, measured, is_finite = compute(features)
            replicated = tf.nest.map_structure(self._replicate, (totals, measured, is_finite))
            return [variable.value.unfold(gradient) if isinstance(variable.value, UnfoldedVariable) else
                    dtensor.relayout(gradient, variable.value.layout)
                    for gradient, variable in zip(gradients, self._trained, strict=True)], replicated

        def applied(gradients, totals):
            apply(fold_gradients(gradients, self._trained), totals)

        compute_function, apply_function = self._function(computed), self._function(applied)

        def one_step(features, index):
            gradients, (totals, measured, is_finite) = compute_function(features)
            is_finite = self.on_host(is_finite)
            if bool(is_finite):
                apply_function(gradients, totals)
            return tf.nest.map_structure(self.on_host, measured), is_finite

        return one_step

    def results(self, call: Callable) -> Callable:
        function = self._function(lambda features: tf.nest.map_structure(self._replicate, call(features)))
        return lambda features: tf.nest.map_structure(self.on_host, function(features))

    def _function(self, call):
        return tf.function(context.within(annotator=self)(call), autograph=False)

    def compile(self, function: Callable, use_xla: bool = False) -> Callable:
        return function  # its two parts are compiled functions

    def trace(self, function: Any, specs: dict[str, tf.TensorSpec]) -> None:
        """Does nothing: a DTensor function is traced with tensors."""

    def pieces(self, state: dict[str, Any]) -> list[Piece]:
        # Skips copies of another device's piece.
        return [Piece(path, slice_text(variable.shape, index), host_tensor(piece.numpy()))
                for path, variable in state.items()
                for location, index, piece in zip(
                    self.mesh.local_device_locations(), slices(variable.shape, variable.layout),
                    dtensor.unpack(variable.read_value()), strict=True)
                if all(place == 0 or axis in variable.layout.sharding_specs for axis, place in location.items())]

    def _finite_flags(self, values):
        return self._replicate(super()._finite_flags(values))

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
