"""Lowered functions: the entry points that the pjrt back end leans on, and a small program by hand."""

import dataclasses
import inspect

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental import mesh_utils, multihost_utils
from jax.extend.mlir import ir
from jax.interpreters import mlir
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from switch_tf.partitioning import lowering


def _taken(function, *names):
    """Returns the names of arguments that a function does not take."""
    return [name for name in names if name not in inspect.signature(function).parameters]


def _read_only():
    @tf.function(jit_compile=True, autograph=False)
    def double(number):
        return 2 * number

    return double.experimental_get_compiler_ir(tf.TensorSpec([2], tf.float32))


# Name -> a check that is True as long as TensorFlow or JAX has what `lowering.py`, `variables.py` and `pjrt*.py` ask of
# it. Not all of it is promised, so an upgrade has to stop here, with the name of what is gone.
ENTRY_POINTS = {
    'tf.function.experimental_get_compiler_ir(stage="stablehlo_serialized", device_name=...)':
        lambda: isinstance(_read_only()(stage="stablehlo_serialized", device_name="/device:CPU:0"), bytes),
    "ConcreteFunction.captured_inputs, .outputs":
        lambda: tf.function(lambda: tf.zeros([2])).get_concrete_function().captured_inputs == [],
    "tensorflow.compiler.tf2xla.ops.gen_xla_ops.xla_custom_call_v2": lambda: not _taken(
        gen_xla_ops.xla_custom_call_v2, "operands", "call_target_name", "backend_config", "has_side_effect",
        "result_dtypes", "result_shapes"),
    "tf.variable_creator_scope": lambda: callable(tf.variable_creator_scope),
    "tf.experimental.dlpack.from_dlpack": lambda: callable(tf.experimental.dlpack.from_dlpack),
    "tf.__internal__.tracking.Trackable._serialize_to_tensors":
        lambda: hasattr(tf.__internal__.tracking.Trackable, "_serialize_to_tensors"),
    "tf.Variable._unique_id, ._shared_name":
        lambda: all(hasattr(tf.Variable(1.0), name) for name in ("_unique_id", "_shared_name", "handle")),
    "tf.raw_ops.SaveV2": lambda: not _taken(tf.raw_ops.SaveV2, "prefix", "tensor_names", "shape_and_slices", "tensors"),
    "tf.raw_ops.RestoreV2": lambda: not _taken(tf.raw_ops.RestoreV2, "prefix", "tensor_names", "shape_and_slices"),
    "tf.raw_ops.MergeV2Checkpoints": lambda: not _taken(
        tf.raw_ops.MergeV2Checkpoints, "checkpoint_prefixes", "destination_prefix", "delete_old_dirs"),
    "jax.interpreters.mlir.make_ir_context": lambda: isinstance(mlir.make_ir_context(), ir.Context),
    "jax.interpreters.mlir.module_to_bytecode": lambda: not _taken(mlir.module_to_bytecode, "module"),
    "jax.extend.mlir.ir": lambda: all(hasattr(ir, name) for name in ("Module", "Location", "Context")),
    "jax.export.export(fun, platforms=...)": lambda: not _taken(jax.export.export, "platforms"),
    "jax.export.Exported: mlir_module_serialized, module_kept_var_idx, call": lambda: (
        {"mlir_module_serialized", "module_kept_var_idx"} <= {
            field.name for field in dataclasses.fields(jax.export.Exported)} and hasattr(jax.export.Exported, "call")),
    "jax.experimental.mesh_utils.create_device_mesh(devices=...)":
        lambda: not _taken(mesh_utils.create_device_mesh, "mesh_shape", "devices", "allow_split_physical_axes"),
    "jax.sharding.AxisType.Auto": lambda: hasattr(jax.sharding.AxisType, "Auto"),
    "jax.make_array_from_callback": lambda: callable(jax.make_array_from_callback),
    "jax.jit(donate_argnums=..., in_shardings=..., out_shardings=...)":
        lambda: not _taken(jax.jit, "donate_argnums", "in_shardings", "out_shardings"),
    "jax.distributed.initialize(coordinator_address, num_processes, process_id)": lambda: [
        *inspect.signature(jax.distributed.initialize).parameters][:3] == [
            "coordinator_address", "num_processes", "process_id"],
    "jax.experimental.multihost_utils.process_allgather(tiled=...)":
        lambda: not _taken(multihost_utils.process_allgather, "tiled"),
    "jax.experimental.multihost_utils.sync_global_devices": lambda: callable(multihost_utils.sync_global_devices),
    **{f"jax.config.{name}": lambda name=name: hasattr(jax.config, name) for name in (
        "jax_enable_x64", "jax_platforms", "jax_num_cpu_devices", "jax_cpu_collectives_implementation")},
}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_tensorflow_and_jax_have_what_the_pjrt_back_end_asks_of_them(name):
    assert ENTRY_POINTS[name](), f"{name} is gone or another one; see switch_tf/partitioning/lowering.py"


@pytest.fixture
def scale():
    return tf.Variable([2.0, 3.0], name="scale")


@pytest.fixture
def total():
    return tf.Variable(10.0, name="total")


@pytest.fixture
def program(scale, total):
    """A program that reads `scale`, adds to `total`, and returns a tuple."""
    def step(tokens):
        scaled = tf.cast(tokens, tf.float32) * scale
        total.assign_add(tf.reduce_sum(scaled))
        return {"scaled": scaled}, (tf.reduce_max(tokens), tf.reduce_any(tokens > 4))

    unread = tf.Variable(1.0, name="unread")
    return lowering.lower(step, [tf.TensorSpec([3, 2], tf.int32)], [unread, total, scale])


def test_a_program_knows_its_variables_and_its_results(program, scale, total):
    assert {id(variable) for variable in program.captured} == {id(scale), id(total)}
    assert [id(program.captured[index]) for index in program.updated] == [id(total)]
    # In the order of tf.nest: keys of dictionaries, then the entries of the tuple.
    assert program.results == [((3, 2), np.float32), ((), np.int32), ((), np.bool_)]
    packed = tf.nest.pack_sequence_as(program.structure, ["scaled", "largest", "any"])
    assert packed == ({"scaled": "scaled"}, ("largest", "any"))


def test_its_module_takes_features_and_variables_and_returns_results_and_updates(program, scale):
    """As `jit` calls it, with the numbers worked out by hand."""
    shapes = [jax.ShapeDtypeStruct((3, 2), np.int32),
              *(jax.ShapeDtypeStruct(tuple(variable.shape), np.float32) for variable in program.captured)]
    results = [*program.results, ((), np.float32)]
    skeleton = jax.jit(lambda *_: [jnp.zeros(*result) for result in results])
    exported = dataclasses.replace(
        jax.export.export(skeleton, platforms=["cpu"])(*shapes), mlir_module_serialized=program.module,
        module_kept_var_idx=tuple(range(len(shapes))))
    values = [np.array([2, 3], np.float32) if variable is scale else np.float32(10) for variable in program.captured]
    scaled, largest, is_any, total = jax.jit(exported.call)(np.array([[1, 2], [3, 4], [0, 5]], np.int32), *values)
    np.testing.assert_array_equal(scaled, [[2, 6], [6, 12], [0, 15]])
    assert (int(largest), bool(is_any)) == (5, True)
    assert float(total) == 10 + 2 + 6 + 6 + 12 + 15


def test_a_program_that_updates_nothing_has_no_updates(scale):
    program = lowering.lower(lambda x: x * scale, [tf.TensorSpec([2], tf.float32)], [scale])
    assert (program.updated, len(program.captured), program.results) == ([], 1, [((2,), np.float32)])


def test_a_variable_that_nobody_listed_is_refused_by_its_name(scale, total):
    with pytest.raises(ValueError, match="total"):
        lowering.lower(lambda x: x * scale + total, [tf.TensorSpec([2], tf.float32)], [scale])


def test_a_module_has_no_copies_which_tpus_reject(program):
    # TensorFlow copies the new value of a variable, such as `total`.
    with mlir.make_ir_context(), ir.Location.unknown():
        text = str(ir.Module.parse(program.module))
    assert "stablehlo.multiply" in text and "mhlo.input_output_alias" in text and "mhlo.copy" not in text


def test_reserved_memory_is_zeros_of_any_shape_and_dtype():
    for shape, dtype in (((3, 2), tf.float32), ((), tf.int64), ((0,), tf.float32), ((2, 2), tf.bfloat16)):
        found = lowering.reserved(shape, dtype)
        assert (found.shape, found.dtype) == (shape, dtype)
        np.testing.assert_array_equal(found, np.zeros(shape, dtype.as_numpy_dtype))
