"""A TensorFlow function as StableHLO, the language of XLA's compilers, with its variables as arguments.

The module is that of one device, with the annotations of `gspmd.XlaAnnotator` in the form of Shardy, the partitioner of
JAX, which cuts it over the devices of a mesh.
"""

import math
import mmap
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from jax.extend.mlir import ir
from jax.interpreters import mlir

from switch_tf.hardware import devices
from switch_tf.partitioning import narrowing

_MAP_NORESERVE = 0x4000  # Linux; Python has a name for it since 3.13


class Program(NamedTuple):
    """A lowered function.

    Attributes:
        module: StableHLO as MLIR bytecode.
        captured: tf.Variables that the function reads, and eager tensors. Its arguments are the function's own and then
            these.
        results: Shape and dtype of each result of the function.
        updated: Indices in `captured` of the variables that the function assigns. Their new values follow the results.
        structure: The nest of the function's results: True for a tensor, False for None.
    """

    module: bytes
    captured: list[tf.Variable | tf.Tensor]
    results: list[tuple[tuple[int, ...], type[np.generic]]]
    updated: list[int]
    structure: Any


def lower(function: Callable[..., Any], specs: Sequence[tf.TensorSpec], variables: Sequence[tf.Variable],
          mesh: dict[str, int]) -> Program:
    """Traces a function and lowers it for the kind of device that this process trains on.

    Args:
        function: Function of tensors that returns a nest of tensors or None and may assign variables.
        specs: Shape and dtype of each argument.
        variables: All variables that the function may read.
        mesh: Mesh axis -> number of devices, of the function's annotations.

    Raises:
        ValueError: The function reads a variable that is not in `variables`.
    """
    structure = []

    def flat(*tensors):
        found = function(*tensors)
        structure[:] = [tf.nest.map_structure(lambda result: result is not None, found)]
        return [result for result in tf.nest.flatten(found) if result is not None]

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
    module, aliased = _prepared(module, mesh)
    return Program(module, [by_handle.get(id(handle), handle) for handle in concrete.captured_inputs],
                   [(tuple(output.shape), output.dtype.as_numpy_dtype) for output in concrete.outputs],
                   [index - len(specs) for index in aliased], structure[0])


def _prepared(module, mesh):
    """Returns a module for Shardy, and the arguments it updates.

    Without TensorFlow's copies of results, which TPUs reject, and with its annotations in Shardy's form: a module with
    a single one in GSPMD's would be cut by GSPMD.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        for operation in list(_operations(parsed.operation)):
            if operation.name == "mhlo.copy":
                _replace(operation, operation.operands[0])
            elif "mhlo.sharding" in operation.attributes:
                _replace(operation, _constraint(operation, mesh))
        if devices.device_type() == "GPU":
            for operation in list(_operations(parsed.operation)):
                narrowing.narrow(operation)
        return mlir.module_to_bytecode(parsed), _aliased(parsed)


def _replace(operation, value):
    operation.results[0].replace_all_uses_with(value)
    operation.erase()


def _constraint(operation, mesh):
    """Returns the result of a new operation, Shardy's for an annotation."""
    spec = _spec(operation.attributes["mhlo.sharding"].value, operation.results[0].type.rank, mesh)
    axes = ", ".join(f'"{axis}"={size}' for axis, size in mesh.items())
    dimensions = ", ".join("{" + ", ".join(f'"{axis}"' for axis in split) + "}" for split in spec)
    with ir.InsertionPoint(operation):
        return ir.Operation.create(
            "sdy.sharding_constraint", results=[operation.results[0].type], operands=[operation.operands[0]],
            attributes={"sharding": ir.Attribute.parse(f"#sdy.sharding<mesh<[{axes}]>, [{dimensions}]>")},
            loc=operation.location).result


def _spec(sharding, rank, mesh):
    """Returns the mesh axes that split each dimension, the outermost first, from GSPMD's text.

    The text lists the numbers of all devices: "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}".
    """
    if sharding in ("{replicated}", "{maximal device=0}"):
        return [[]] * rank
    tiles, listed = re.match(r"\{devices=\[([\d,]+)\]([\d,]+)", sharding).groups()
    tiles = [int(count) for count in tiles.split(",")]
    devices = np.array([int(device) for device in listed.split(",")]).reshape(tiles)
    spec = []
    for dimension in range(rank):
        along = devices[tuple(slice(None) if other == dimension else 0 for other in range(len(tiles)))]
        places = zip(mesh, np.unravel_index(along, list(mesh.values())), strict=True)
        # The innermost axis is the first one to change from piece to piece.
        first_change = {axis: np.flatnonzero(place)[0] for axis, place in places if place.any()}
        spec.append(sorted(first_change, key=first_change.get, reverse=True))
    return spec


def text(module: bytes) -> str:
    """Returns a lowered module in MLIR's text, with names of operations as locations."""
    with mlir.make_ir_context(), ir.Location.unknown():
        return ir.Module.parse(module).operation.get_asm(enable_debug_info=True)


def _aliased(module):
    """Returns the numbers of the arguments that results replace, in the order of these results."""
    attributes = module.operation.attributes
    if "mhlo.input_output_alias" not in attributes:
        return []
    text = str(attributes["mhlo.input_output_alias"])
    return [int(number) for number in re.findall(r"parameter_number = (\d+)", text)]


def _operations(operation):
    """Yields all operations inside one, those of its regions first."""
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield from _operations(inner.operation)
                yield inner.operation


def reserved(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Returns a tensor of zeros in untouched pages, which cost only address space if the kernel overcommits memory."""
    size = math.prod(shape) * dtype.size
    pages = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    # numpy's DLPack knows no bfloat16, and neither float8.
    exchanged = dtype if dtype.as_numpy_dtype.__module__ == "numpy" else {1: tf.uint8, 2: tf.uint16}[dtype.size]
    array = np.frombuffer(pages, exchanged.as_numpy_dtype, count=math.prod(shape)).reshape(shape)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tensor if exchanged == dtype else tf.bitcast(tensor, dtype)
