"""Lowers a TensorFlow function to StableHLO, and compiles it as a `jax.jit` that XLA cuts over a mesh.

The StableHLO is for one device. `XlaAnnotator` annotates some tensors for Shardy, JAX's partitioner, and Shardy infers
all other shardings.
"""

import dataclasses
import math
import mmap
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
import tensorflow as tf
from jax.experimental import mesh_utils
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from keras import ops
from tensorflow.compiler.tf2xla.ops import gen_xla_ops  # it has no public name

from switch_tf import context
from switch_tf.hardware import devices
from switch_tf.partitioning.axes import Axes
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal

_ANNOTATION = "switch_tf.sharding"  # custom call that `lower` replaces
_MAP_NORESERVE = 0x4000  # Linux; named in Python since 3.13
# Platforms that `jax.export` names otherwise.
_EXPORTED = {"gpu": "cuda"}
# Compiler options for one device. YNNPACK gets only products: with its default, sums and elementwise operations too, a
# step takes 1.15 times as long on one CPU device (on eight, 0.86 times; docs/notebook/pjrt.md).
_OPTIONS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}}


def device_mesh(layout: Layout, devices: Sequence[jax.Device]) -> Mesh:
    """Returns a layout's mesh that follows the chips' network."""
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1:
        raise Refusal(f"These {len(devices)} devices are of {len(slices)} TPU slices, and the mesh of a layout covers "
                      "one; start the processes of one slice alone.")
    placed = mesh_utils.create_device_mesh(
        tuple(layout.mesh.values()), devices=list(devices), allow_split_physical_axes=True)
    return Mesh(placed, tuple(layout.mesh), axis_types=(AxisType.Auto,) * len(layout.mesh))


def named_sharding(mesh: Mesh, spec: Sequence[Sequence[str]]) -> NamedSharding:
    """Converts a spec of `Layout.spec`."""
    return NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in spec)))


def rows_of_process(sharding: NamedSharding, batch_size: int, process_index: int) -> list[tuple[int, int]]:
    """Returns the ranges of rows of a process's devices, first and last + 1, which need not follow each other."""
    return sorted({index[0].indices(batch_size)[:2] for device, index in sharding.devices_indices_map(
        (batch_size,)).items() if device.process_index == process_index})


class XlaAnnotator:
    """Annotator (`axes`) of a program that XLA cuts over a complete mesh."""

    is_for_compiler = True

    def __init__(self, layout: Layout):
        self.layout = layout

    def constrain(self, x: Tensor, axes: Axes) -> Tensor:
        return self._split(x, self.layout.spec(axes))

    def gather(self, value: Tensor, axes: Axes) -> Tensor:
        stored = self.layout.spec(axes, at_rest=True)
        if any(len(mesh_axes) > 1 for mesh_axes in stored):
            # Over several mesh axes the cast value is first laid out as stored (docs/notebook/dtensor.md).
            value = self._split(value, stored)
        return self.constrain(value, axes)

    def scatter(self, gradient: Tensor, axes: Axes) -> Tensor:
        used, stored = self.layout.spec(axes), self.layout.spec(axes, at_rest=True)
        # With one expert a device a gradient is [1, d_ff, d_model], and TPUs scatter it along its last dimension only:
        # along d_ff every device would sum it whole (docs/notebook/tpu.md).
        first = next((place for place, size in enumerate(self.layout.piece(gradient.shape, used)) if size > 1), None)
        if not first or first == len(used) - 1 or used[first] == stored[first]:
            return self._split(gradient, stored)
        order = [*(place for place in range(len(used)) if place != first), first]
        turned = self._split(ops.transpose(gradient, order), [stored[place] for place in order])
        return ops.transpose(turned, np.argsort(order).tolist())

    def replicate(self, x: Tensor) -> Tensor:
        return self._split(x, ((),) * len(x.shape))

    def _split(self, x, spec):
        mesh = self.layout.mesh
        sizes = ", ".join(f'"{axis}"={size}' for axis, size in mesh.items())
        split = ", ".join("{" + ", ".join(f'"{axis}"' for axis in axes if mesh[axis] > 1) + "}" for axes in spec)
        return _annotated(x, f"#sdy.sharding<mesh<[{sizes}]>, [{split}]>")


def _annotated(x, sharding):
    x = tf.convert_to_tensor(x)
    (result,) = gen_xla_ops.xla_custom_call_v2(
        [x], call_target_name=_ANNOTATION, backend_config=sharding, has_side_effect=False, result_dtypes=[x.dtype],
        result_shapes=[x.shape], name="XlaSharding")
    return result


@tf.RegisterGradient("XlaCustomCallV2")
def _annotated_gradient(operation, gradient):
    return _annotated(gradient, operation.get_attr("backend_config").decode())


class Program(NamedTuple):
    """A lowered function.

    Attributes:
        module: StableHLO as MLIR bytecode.
        captured: tf.Variables and eager tensors that the function reads, the module's last arguments.
        results: Shape and dtype of each result.
        updated: Indices in `captured` of the assigned variables. Their new values follow the results.
        structure: Nest of the results: True for a tensor, False for None.
    """

    module: bytes
    captured: list[tf.Variable | tf.Tensor]
    results: list[tuple[tuple[int, ...], type[np.generic]]]
    updated: list[int]
    structure: Any


def lower(function: Callable[..., Any], specs: Sequence[tf.TensorSpec], variables: Sequence[tf.Variable]) -> Program:
    """Traces a function and lowers it for this process's kind of device.

    Args:
        function: Returns a nest of tensors or None, and may assign variables.
        variables: All variables that the function may read.

    Raises:
        ValueError: The function reads another variable.
    """
    structure = []

    def flat(*tensors):
        results = function(*tensors)
        structure[:] = [tf.nest.map_structure(lambda result: result is not None, results)]
        return [result for result in tf.nest.flatten(results) if result is not None]

    traced = tf.function(flat, jit_compile=True, autograph=False)
    concrete = traced.get_concrete_function(*specs)
    with warnings.catch_warnings():
        # TensorFlow calls `device_name` deprecated, but refuses variables with its successor.
        warnings.simplefilter("ignore", UserWarning)
        module = traced.experimental_get_compiler_ir(*specs)(
            stage="stablehlo_serialized", device_name="/device:CPU:0")
    by_handle = {id(variable.handle): variable for variable in variables}
    for handle in concrete.captured_inputs:
        if handle.dtype == tf.resource and id(handle) not in by_handle:
            raise ValueError(f"The function reads {handle}, which is no variable of the model, the optimizer or the "
                             "objective; create it in `build`.")
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        operations = list(_operations(parsed.operation))
        for operation in operations:
            value = None
            if operation.name == "mhlo.copy":  # TensorFlow's copies; TPUs reject them
                value = operation.operands[0]
            elif operation.name == "stablehlo.custom_call" and operation.attributes[
                    "call_target_name"].value == _ANNOTATION:
                value = ir.Operation.create(
                    "sdy.sharding_constraint", [operation.results[0].type], [operation.operands[0]],
                    {"sharding": ir.Attribute.parse(operation.attributes["backend_config"].value)},
                    ip=ir.InsertionPoint(operation), loc=operation.location).result
            if value is not None:
                operation.results[0].replace_all_uses_with(value)
                operation.erase()
        if devices.device_type() == "GPU":
            for operation in list(_operations(parsed.operation)):
                _narrow(operation)
        # Parameter numbers that results replace, in the results' order.
        aliases = parsed.operation.attributes
        aliased = re.findall(r"parameter_number = (\d+)", str(aliases["mhlo.input_output_alias"])
                             if "mhlo.input_output_alias" in aliases else "")
        module = mlir.module_to_bytecode(parsed)
    return Program(module, [by_handle.get(id(handle), handle) for handle in concrete.captured_inputs],
                   [(tuple(output.shape), output.dtype.as_numpy_dtype) for output in concrete.outputs],
                   [int(number) - len(specs) for number in aliased], structure[0])


def lower_call(function: Callable[..., Any], specs: Mapping[str, tf.TensorSpec], variables: Sequence[tf.Variable],
               layout: Layout) -> Program:
    """Lowers a function of features, from `Partitioner.step` or `Partitioner.results`, for a layout's complete mesh.

    Args:
        specs: Feature name -> shape and dtype, in the order of the program's arguments.
    """
    @context.within(annotator=XlaAnnotator(layout) if layout.num_devices > 1 else None, is_lowered=True)
    def traced(*tensors):
        return function(dict(zip(specs, tensors, strict=True)))

    return lower(traced, [tf.TensorSpec(spec.shape, spec.dtype) for spec in specs.values()], variables)


def _operations(operation):
    """Yields all operations inside one, inner ones first."""
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield from _operations(inner.operation)
                yield inner.operation


# Operations that only move numbers, so a cast commutes with them.
_MOVES = ("stablehlo.transpose", "stablehlo.reshape", "stablehlo.slice", "sdy.sharding_constraint")


def _narrow(operation):
    """Gives a float32 matrix product the bfloat16 operands that were cast to float32 for it.

    TensorFlow has no product of bfloat16 numbers with a float32 result, so layers widen both operands, which is
    exact. A TPU's compiler removes the casts. A GPU's keeps them, and would multiply at half the rate, with twice the
    memory. A one-hot mask, cast from booleans, is cast to bfloat16.
    """
    if operation.name not in ("stablehlo.dot", "stablehlo.dot_general") or not _is_of(operation.results[0], ir.F32Type):
        return
    sources = [_source(value) for value in operation.operands]
    if all(sources):
        for index, (cast, moves) in enumerate(sources):
            value = cast.operands[0]
            if not _is_of(value, ir.BF16Type):
                value = _like(cast, value, {})
            for move in moves:
                value = _like(move, value, {name: move.attributes[name] for name in move.attributes})
            operation.operands[index] = value


def _source(value):
    """Returns a value's exact cast and the moves since, in order; None without such a cast."""
    moves = []
    while isinstance(value, ir.OpResult):
        operation = value.owner
        if operation.name == "stablehlo.convert":
            cast = operation.operands[0]
            is_exact = _is_of(cast, ir.BF16Type) or cast.type.element_type == ir.IntegerType.get_signless(1)
            return (operation, moves[::-1]) if is_exact else None
        if operation.name not in _MOVES:
            return None
        moves.append(operation)
        value = operation.operands[0]
    return None


def _like(operation, value, attributes):
    shape = ir.RankedTensorType.get(operation.results[0].type.shape, ir.BF16Type.get())
    return ir.Operation.create(operation.name, [shape], [value], attributes, ip=ir.InsertionPoint(operation),
                               loc=operation.location).result


def _is_of(value, element_type):
    return isinstance(value.type.element_type, element_type)


def text(module: bytes) -> str:
    """Returns a module as MLIR text, with operation names as locations."""
    with mlir.make_ir_context(), ir.Location.unknown():
        return ir.Module.parse(module).operation.get_asm(enable_debug_info=True)


def jit(program: Program, arguments: Sequence[Any]) -> jax.stages.Wrapped:
    """Compiles a program to a function of jax.Arrays. It returns the results and the updated variables.

    Every device holds whole results. The memory of updated variables is donated.

    Args:
        arguments: Shape, dtype and sharding of each argument, as jax.Arrays have them, on local devices or places in a
            topology.
    """
    mesh = arguments[0].sharding.mesh
    platform = mesh.devices.flat[0].platform
    donated = [len(arguments) - len(program.captured) + index for index in program.updated]
    shapes = [*program.results, *((arguments[index].shape, arguments[index].dtype) for index in donated)]
    # Exports any function of the same signature and replaces its module: `jax.export.Exported` is public, and one for a
    # single device serves any number.
    exported = jax.export.export(jax.jit(lambda *_: [jax.numpy.zeros(*shape) for shape in shapes]),
                                 platforms=[_EXPORTED.get(platform, platform)])(
        *(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in arguments))
    call = dataclasses.replace(exported, mlir_module_serialized=program.module,
                               module_kept_var_idx=tuple(range(len(arguments)))).call

    def step(*arguments):  # `aot.hlo` knows it by this name
        return call(*arguments)

    shardings = tuple(value.sharding for value in arguments)
    return jax.jit(step, donate_argnums=donated, in_shardings=shardings,
                   out_shardings=[*[named_sharding(mesh, ())] * len(program.results),
                                  *(shardings[index] for index in donated)],
                   compiler_options=_OPTIONS.get(platform) if mesh.devices.size == 1 else None)


def reserved(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Returns zeros in untouched pages: only address space, if the kernel overcommits memory."""
    size = math.prod(shape) * dtype.size
    pages = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    # numpy's DLPack does not support bfloat16 or float8.
    exchanged = dtype if dtype.as_numpy_dtype.__module__ == "numpy" else {1: tf.uint8, 2: tf.uint16}[dtype.size]
    array = np.frombuffer(pages, exchanged.as_numpy_dtype, count=math.prod(shape)).reshape(shape)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tensor if exchanged == dtype else tf.bitcast(tensor, dtype)
