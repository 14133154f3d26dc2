"""Variables of the pjrt back end: where they lie, how TensorFlow, Keras and NumPy see them, and what is refused."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import types

import jax
import jax.export
import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer, metrics
from switch_tf.checkpoints import bundles, tensors
from switch_tf.configs.run import StepSettings
from switch_tf.decoding import log_likelihoods
from switch_tf.inference.text_model import compile_features, compile_prediction
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.factoring import bytes_per_device
from switch_tf.partitioning import cluster, lowering
from switch_tf.partitioning.axes import with_axes
from switch_tf.partitioning.backends import create_partitioner, pjrt_client
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import PjrtVariable, laid_out, slice_text
from switch_tf.refusals import Refusal
from switch_tf.training import train_step
from switch_tf.training.train_step import compile_steps

SEVERAL = {"name": "fully_sharded_experts", "mesh_shape": "fsdp=2,data=2,expert=2", "backend": "pjrt"}
SINGLE = {"name": "single", "backend": "pjrt"}


def _variable(partitioner, value, axes):
    with partitioner.creates_variables():
        return with_axes(axes, keras.Variable, np.asarray(value), dtype=np.asarray(value).dtype.name)


@pytest.fixture(scope="module")
def pieces(make_partitioner):
    """Partitioner of 2 x 2 x 2 devices, which stores "mlp" over fsdp and "expert" over expert and fsdp."""
    return make_partitioner(**SEVERAL)


def test_every_piece_is_on_the_device_that_the_layout_gives_it(pieces):
    variable = _variable(pieces, np.arange(8.0).reshape(4, 2), ("expert", None))
    # Rows over expert, then fsdp; the devices of the mesh [fsdp, data, expert] in order.
    rows = {tuple(place): shard.data[:, 0].tolist() for place, shard in zip(
        np.ndindex(2, 2, 2), sorted(variable.value.array.addressable_shards, key=lambda shard: shard.device.id),
        strict=True)}
    assert {place: row[0] / 2 for place, row in rows.items()} == {
        (fsdp, data, expert): 2 * expert + fsdp for fsdp in (0, 1) for data in (0, 1) for expert in (0, 1)}


def test_each_device_holds_what_inspect_computes(pieces):
    config, optimizer = SwitchConfig.from_preset("switch_tiny"), Adafactor()
    model = SwitchTransformer(config)
    pieces.build(model, optimizer)
    computed = bytes_per_device(config, pieces.layout)

    def of_first(variables):
        return sum(variable.value.array.addressable_shards[0].data.nbytes for variable in variables)

    assert of_first(model.variables) == computed["weights"]
    assert of_first(variable for variable in optimizer.variables if hasattr(variable, "logical_axes")
                    ) == computed["optimizer_slots"]


def test_one_process_reads_the_rows_of_all_its_devices(pieces):
    assert len(pieces.sharding(("batch",)).addressable_devices_indices_map((8,))) == 8
    assert pieces.rows(8) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)]


def test_a_value_is_the_same_to_numpy_keras_and_tensorflow_and_after_every_assignment(pieces):
    variable = _variable(pieces, np.arange(8.0).reshape(4, 2), ("expert", None))
    expected = np.arange(8.0).reshape(4, 2)
    for change in (lambda: None, lambda: variable.assign(expected * 2), lambda: variable.assign_add(np.ones((4, 2))),
                   lambda: variable.assign_sub(np.full((4, 2), 3.0))):
        change()
        for seen in (variable.numpy(), np.asarray(variable.value), keras.ops.convert_to_numpy(variable + 0.0),
                     tf.convert_to_tensor(variable.value).numpy(), tf.cast(variable.value, "float32").numpy()):
            np.testing.assert_array_equal(seen, variable.value.array)
    np.testing.assert_array_equal(variable.numpy(), expected * 2 + 1 - 3)
    assert isinstance(variable.value, PjrtVariable) and len(variable.value.array.sharding.device_set) == 8


def test_a_program_updates_what_it_assigns_and_nothing_else(pieces):
    changed, kept = (_variable(pieces, np.full((4, 2), value), ("expert", None)) for value in (1.0, 5.0))

    def add(features):
        changed.assign_add(keras.ops.convert_to_tensor(kept))
        return {"sum": tf.reduce_sum(changed.value), "rows": features["x"][0, :, 0]}

    before, replaced = kept.value.array, changed.value.array
    program = pieces.compile(add)
    for step in (1, 2):
        found = program(pieces.place({"x": np.arange(16).reshape(1, 8, 2)}))
        assert float(found["sum"]) == 8 * (1 + 5 * step)
        np.testing.assert_array_equal(found["rows"], np.arange(0, 16, 2))
    np.testing.assert_array_equal(changed.numpy(), np.full((4, 2), 11.0))
    assert kept.value.array is before
    assert replaced.is_deleted()  # its memory has the new numbers


def test_a_value_is_a_copy_of_what_was_assigned(pieces):
    variable, memory = _variable(pieces, np.ones(8), (None,)), np.zeros(16)
    start = -memory.ctypes.data % 64 // 8  # JAX keeps memory that is aligned to 64 bytes
    numbers = memory[start:start + 8]
    variable.assign(numbers)
    numbers[:] = 7
    np.testing.assert_array_equal(variable.numpy(), np.zeros(8))


def test_threads_read_what_was_assigned_last(pieces):
    variable = _variable(pieces, np.zeros(1000), (None,))
    for number in range(1, 50):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            read = [pool.submit(lambda: tf.convert_to_tensor(variable.value).numpy()) for _ in range(4)]
            variable.assign(np.full(1000, float(number)))
        assert all(set(np.unique(future.result())) <= {number - 1.0, float(number)} for future in read)
        np.testing.assert_array_equal(tf.convert_to_tensor(variable.value), variable.numpy())


def test_gradients_of_eager_code_reach_the_variable(pieces):
    variable = _variable(pieces, [3.0, 4.0], (None,))
    variable.assign(np.array([5.0, 6.0]))
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.convert_to_tensor(variable.value)**2)
    np.testing.assert_array_equal(tape.gradient(total, variable.value), [10, 12])


@pytest.mark.parametrize("index, text", [
    ((slice(0, 2), slice(None)), "4 8 0,2:-"), ((slice(None), slice(None)), ""), ((slice(2, 4), slice(4, 8)),
     "4 8 2,2:4,4"), ((slice(0, 4), slice(None)), "")])
def test_a_slice_is_written_as_tensorflow_writes_it(index, text):
    assert slice_text((4, 8), index) == text


@pytest.mark.slow  # inference/pjrt_test.py compares the answers of one device
@pytest.mark.parametrize("layout", [SINGLE, SEVERAL], ids=lambda layout: layout["name"])
def test_answers_and_likelihoods_are_those_of_one_tensorflow_device(layout, make_partitioner, shallow_config, batch):
    answers = []
    for partitioner in (Partitioner(), make_partitioner(**layout)):
        keras.utils.set_random_seed(1)
        model = SwitchTransformer(shallow_config, dtype="float64")
        partitioner.build(model)
        answers.append((compile_prediction(model, 6, partitioner)(batch),
                        compile_features(functools.partial(log_likelihoods, model), partitioner)(batch)))
    np.testing.assert_array_equal(answers[0][0], answers[1][0])
    np.testing.assert_allclose(answers[0][1], answers[1][1], rtol=1e-12)
    assert len(np.unique(answers[0][0])) > 2


@pytest.mark.slow
def test_several_steps_a_call_are_those_of_single_ones(make_partitioner, shallow_config, batch):
    losses = {}
    for steps_per_call in (1, 2):
        partitioner = make_partitioner("expert", "data=4", backend="pjrt")
        keras.utils.set_random_seed(1)
        model, optimizer = SwitchTransformer(shallow_config), Adafactor(0.01)
        partitioner.build(model, optimizer)
        step = compile_steps(model, optimizer, 3, StepSettings(steps_per_call=steps_per_call), partitioner)
        sums = None
        for _ in range(4 // steps_per_call):
            measured, bad_step = step(partitioner.place(
                {name: np.stack([value] * steps_per_call) for name, value in batch.items()}))
            assert int(bad_step) == -1
            sums = metrics.merge(sums, keras.tree.map_structure(np.float64, measured))
        assert int(optimizer.iterations.numpy()) == 4
        losses[steps_per_call] = float(sums.loss.total)
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)


@pytest.mark.slow
def test_a_step_that_diverges_on_one_device_names_the_layer(make_partitioner, shallow_config, batch):
    partitioner = make_partitioner(**SINGLE)
    model = SwitchTransformer(shallow_config)
    partitioner.build(model, Adafactor(0.01))
    wo = model.encoder.layers[0].mlp.experts.wo
    wo.assign(np.full(wo.shape, 3e38, np.float32))
    features = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
    found = train_step.first_bad_tensor(model, features, 3, 0, StepSettings(), partitioner)
    assert found.startswith(("the output of encoder", "the output of decoder", "the gradient of")), found


@pytest.mark.parametrize("backend", ["pjrt", "dtensor", "mirrored"])
def test_one_number_that_is_not_finite_is_found_among_many(backend, make_partitioner):
    partitioner = make_partitioner("data", "data=2", backend=backend)
    values = [np.arange(4.0, dtype=np.float32), np.array([1, 2, np.nan, 3], np.float32), np.arange(4, dtype=np.int32)]
    assert partitioner.are_finite([_variable(partitioner, value, (None,)) for value in values]) == [True, False, True]


def test_a_piece_that_several_devices_hold_is_read_once(make_partitioner):
    partitioner = make_partitioner("expert_model", "data=4,model=2", backend="pjrt")
    numbers, indices = np.arange(32.0).reshape(4, 8), []

    def read(index):
        indices.append(index)
        return numbers[index]

    array = laid_out((4, 8), np.float32, partitioner.sharding((None, "mlp")), read)
    assert len(indices) == 2 and array.dtype == np.float32
    np.testing.assert_array_equal(array, numbers)


def test_a_model_whose_pieces_find_no_room_is_refused(pieces, monkeypatch):
    pieces.check(SwitchConfig.from_preset("switch_base_8"), 1, False)  # the host's memory is not counted
    config = SwitchConfig.from_preset("switch_tiny")
    needed = 2 * bytes_per_device(config, pieces.layout)["weights"]
    for room, refuses in ((needed, False), (needed - 1, True)):
        device = types.SimpleNamespace(memory_stats=lambda room=room: {"bytes_limit": room})
        monkeypatch.setattr(pieces, "mesh", types.SimpleNamespace(local_devices=[device]))
        with pytest.raises(ValueError, match="would store 0.0 GiB of") if refuses else contextlib.nullcontext():
            pieces.check(config, 1, False)


def test_what_the_back_end_cannot_do_is_refused(pieces, make_partitioner):
    config = SwitchConfig.from_preset("switch_tiny")
    with pytest.raises(ValueError, match="compiles every step with XLA, so use_xla=True has no meaning"):
        pieces.check(config, 1, True)
    with pytest.raises(ValueError, match="dispatch='ragged' needs shapes that depend on values, which XLA has not"):
        make_partitioner(**SINGLE).check(dataclasses.replace(config, dispatch="ragged"), 1, False)
    with pytest.raises(ValueError, match="MESH_SHAPE 'data=16' is for 16 devices, but there are 8"):
        create_partitioner(Layout("data=16", (("batch", "data"),), backend="pjrt"))


def test_checkpoints_hold_slices_that_any_reader_joins(pieces, tmp_path):
    variable = _variable(pieces, np.arange(32.0).reshape(4, 8), ("expert", "mlp"))
    bundles.write(tmp_path / "state", pieces.pieces({"model/kernel": variable.value}),
                  bundles.object_graph(["model/kernel"]))
    reader = tf.train.load_checkpoint(str(tmp_path / "state"))
    (name,) = (name for name in reader.get_variable_to_shape_map() if "kernel" in name)
    np.testing.assert_array_equal(reader.get_tensor(name), np.arange(32.0).reshape(4, 8))
    whole = keras.Variable(np.zeros((4, 8)), dtype="float64")
    tensors._read(tmp_path, {"model/kernel": {"shape": [4, 8], "dtype": "float64"}}, {"model/kernel": whole})
    np.testing.assert_array_equal(whole.numpy(), np.arange(32.0).reshape(4, 8))


def test_functions_that_tensorflow_runs_are_refused(pieces):
    variable = _variable(pieces, np.ones(4, np.float32), (None,))
    for function in (lambda: tf.convert_to_tensor(variable.value) + 0.0, lambda: variable.assign(tf.zeros(4)),
                     lambda: variable.assign_add(tf.zeros(4)), lambda: variable.assign_sub(tf.zeros(4))):
        with pytest.raises(ValueError, match="A function that TensorFlow runs cannot read or assign variables of the"):
            tf.function(function, autograph=False)()


def test_a_program_takes_other_shapes_captured_tensors_and_none(pieces):
    variable = _variable(pieces, np.full(2, 3.0), (None,))
    weights = tf.constant(np.arange(2000.0))
    program = pieces.compile(lambda features: (tf.reduce_sum(features["x"]), None, [
        tf.reduce_sum(weights) * tf.convert_to_tensor(variable.value)]))
    for length in (2, 3):
        total, none, (scaled,) = program(pieces.place({"x": np.ones((1, 8, length), np.int32)}))
        assert int(total) == 8 * length and none is None
        np.testing.assert_array_equal(scaled, [1999 * 1000 * 3.0] * 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool", "int8", "uint32"])
def test_variables_of_every_dtype_are_kept(dtype, pieces):
    with pieces.creates_variables():
        variable = tf.Variable(tf.cast(tf.constant([[1, 0], [1, 1]]), dtype))
    program = pieces.compile(lambda features: tf.convert_to_tensor(variable))
    found = program(pieces.place({"x": np.ones((1, 8, 2), np.int32)}))
    np.testing.assert_array_equal(np.asarray(found, np.float32), [[1, 0], [1, 1]])


def test_a_value_of_another_shape_is_refused_and_a_scalar_is_a_number(pieces):
    variable = _variable(pieces, np.full(2, 3.0), (None,))
    for value in (np.zeros(3), 1.0):
        with pytest.raises(ValueError, match=r"has shape \(2,\), so it cannot become"):
            variable.value.assign(value)
    scalar = _variable(pieces, np.float32(2.0), ())
    assert float(scalar.value) == 2.0 and int(scalar.value) == 2


def test_a_variable_without_a_value_is_refused(pieces):
    variable = _variable(pieces, np.full(2, 3.0), (None,))
    variable.value.array.delete()
    with pytest.raises(ValueError, match="has no value since a step failed while it ran; restore a checkpoint"):
        variable.numpy()


@pytest.mark.parametrize("backend", ["pjrt", "dtensor"])
def test_an_optimizer_made_where_the_layout_makes_variables_keeps_them(backend, make_partitioner):
    partitioner = make_partitioner("data", "data=2", backend=backend)
    with partitioner.creates_variables():
        optimizer, model = keras.optimizers.SGD(0.5), keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made = [variable.value for variable in optimizer.variables]
    partitioner.build(model, optimizer)
    assert made and all(one is variable.value for one, variable in zip(made, optimizer.variables, strict=False))


def test_a_variable_made_elsewhere_is_refused(pieces):
    class Counting(SwitchTransformer):
        def build(self, input_shape=None):
            super().build(input_shape)
            self.counter = keras.Variable(0, trainable=False)
            self.counter._value = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[])

    with pytest.raises(ValueError, match="was created outside of the layout, so not all devices would update it"):
        pieces.build(Counting(SwitchConfig.from_preset("switch_tiny")))


def test_gpus_have_another_name_when_a_program_is_exported(monkeypatch):
    """JAX calls a GPU "gpu" and exports programs for "cuda"; a program of another name is refused when it is called."""
    asked, export, jit = [], jax.export.export, jax.jit

    def recorded(function, platforms, **options):
        asked.extend(platforms)
        return export(function, platforms=["cpu"], **options)

    monkeypatch.setattr(jax.export, "export", recorded)
    device = types.SimpleNamespace(platform="gpu")
    mesh = types.SimpleNamespace(devices=np.array([device]))
    sharding = types.SimpleNamespace(mesh=mesh)
    value = types.SimpleNamespace(shape=(2,), dtype=np.dtype(np.float32), sharding=sharding)
    program = lowering.Program(b"", [], [((2,), np.float32)], [], True)
    monkeypatch.setattr(jax, "jit", lambda function, **options: jit(function))
    monkeypatch.setattr(lowering, "named_sharding", lambda mesh, spec: None)
    lowering.jit(program, [value])
    assert asked == ["cuda"]


def test_devices_of_several_slices_are_refused():
    devices = [types.SimpleNamespace(slice_index=index // 4) for index in range(8)]
    with pytest.raises(ValueError, match="These 8 devices are of 2 TPU slices, and the mesh of a layout covers one"):
        lowering.device_mesh(Layout("data=8", (("batch", "data"),), backend="pjrt"), devices)


def test_without_compilation_by_jax_it_is_refused(monkeypatch):
    monkeypatch.setattr(pjrt_client.devices, "are_jax", lambda: False)
    with jax.disable_jit(), pytest.raises(Refusal, match="compiles the step with JAX, which JAX_DISABLE_JIT forbids"):
        pjrt_client.start(cluster.members())
