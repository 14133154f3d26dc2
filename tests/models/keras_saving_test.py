"""Keras' ways to save and load, under every back end: whole values in the files, or a refusal before there is one."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.checkpoints import bundles, tensors
from switch_tf.configs import policies
from switch_tf.configs.run import StepSettings
from switch_tf.layers import SwitchFeedForward, slots
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning import cluster
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import assign, stored, unfolding_of
from switch_tf.training import train_step

# An encoder of one sparse layer: what takes time is the number of variables.
CONFIG = SwitchConfig(vocab_size=32, d_model=8, d_ff=8, d_kv=4, num_heads=2, num_encoder_layers=1, num_decoder_layers=0,
                      encoder_sparse_step=1, num_experts=4, num_groups_multiple=2, min_expert_capacity=1,
                      dropout_rate=0.0, jitter_noise=0.0)
# Some weights lie over two mesh axes; DTensor stores them unfolded.
SPLIT = {"name": "expert", "mesh_shape": "data=2,model=2", "at_rest_rules": (
    ("vocab", ("model", "data")), ("kv", ("data", "model")), ("expert_mlp", "model"))}
LAYOUTS = {
    "one_device": {"name": "single"}, "mirrored": {"name": "data", "mesh_shape": "data=2", "backend": "mirrored"},
    "dtensor": {**SPLIT, "backend": "dtensor"}, "pjrt": {**SPLIT, "backend": "pjrt"}}
IDS = np.random.default_rng(0).integers(2, 32, (4, 8)).astype("int32")
FEATURES = {"encoder_input_tokens": IDS}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _adam():
    return keras.optimizers.Adam(1e-2, use_ema=True)


def _build(partitioner, make_optimizer=_adam, config=CONFIG):
    """A compiled model, built under a layout."""
    model, optimizer = SwitchTransformer(config), make_optimizer()
    partitioner.build(model, optimizer)
    model.compile(optimizer, LOSS, jit_compile=False)
    return model


def _variables(model):
    return [*model.variables, *model.optimizer.variables]


def _fill(model, seed):
    """Gives every variable random numbers, and returns them."""
    random, values = np.random.default_rng(seed), []
    for variable in _variables(model):
        values.append(random.uniform(1, 100, tuple(variable.shape)).astype(variable.dtype))
        assign(variable, values[-1])
    return values


def _assert_equal(model, values):
    for variable, value in zip(_variables(model), values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_have_whole_values_and_load_under_a_layout_and_without(make_partitioner, layout, tmp_path):
    partitioner = make_partitioner(**LAYOUTS[layout])
    model, single = _build(partitioner), _build(Partitioner())
    held = _fill(model, 1)
    _assert_equal(model, held)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    _assert_equal(loaded, held)
    assert isinstance(loaded, SwitchTransformer) and loaded.config == CONFIG
    single.load_weights(tmp_path / "model.weights.h5")
    _assert_equal(single, held)
    # The other direction, of weights and of a whole model.
    _fill(model, 2)
    model.load_weights(tmp_path / "model.keras")
    _assert_equal(model, held)
    held = _fill(single, 3)
    single.save_weights(tmp_path / "single.weights.h5")
    model.load_weights(tmp_path / "single.weights.h5")
    _assert_equal(model, held)
    assert all(map(partitioner._is_laid_out, _variables(model)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_functional_model_of_layers_loads_where_it_is_split_and_where_not(make_partitioner, layout, tmp_path):
    partitioner = make_partitioner(**LAYOUTS[layout])
    with partitioner.creates_variables():
        inputs = keras.Input((8, 16))
        model = keras.Model(inputs, keras.layers.Dense(2)(inputs + SwitchFeedForward(4, 8)(inputs)))
    optimizer = Adafactor()
    partitioner.build(model, optimizer)
    model.compile(optimizer, "mse")
    held = _fill(model, 1)
    model.save(tmp_path / "model.keras")
    _assert_equal(keras.models.load_model(tmp_path / "model.keras"), held)
    with partitioner.creates_variables():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    _assert_equal(loaded, held)
    assert all(map(partitioner._is_laid_out, _variables(loaded)))
    assert [getattr(variable, "logical_axes", None) for variable in loaded.variables] == [
        getattr(variable, "logical_axes", None) for variable in model.variables]


@pytest.mark.parametrize("layout", ["dtensor", "pjrt"])
def test_what_keras_compiles_is_refused_before_a_file_is_written(make_partitioner, layout, tmp_path):
    model = _build(make_partitioner(**LAYOUTS[layout]))
    callbacks = [keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1),
                 keras.callbacks.ModelCheckpoint(tmp_path / "best.keras")]
    for call in (lambda: model.fit(FEATURES, IDS, verbose=0, callbacks=callbacks),
                 lambda: model.evaluate(FEATURES, IDS, verbose=0), lambda: model.predict(FEATURES, verbose=0),
                 lambda: model.export(tmp_path / "exported", verbose=False)):
        with pytest.raises(ValueError, match="without this partitioner"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["dtensor", "pjrt"])
def test_a_loop_may_call_keras_callbacks(make_partitioner, layout, tmp_path):
    model = _build(make_partitioner(**LAYOUTS[layout]))

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    files = [keras.callbacks.ModelCheckpoint(tmp_path / "last.keras"), keras.callbacks.ModelCheckpoint(
        tmp_path / "best.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True)]
    callbacks = keras.callbacks.CallbackList([backup(), *files], model=model)
    callbacks.on_train_begin()
    held = []
    for epoch, loss in enumerate((1.0, 2.0)):
        callbacks.on_epoch_begin(epoch)
        held.append(_fill(model, epoch))
        callbacks.on_epoch_end(epoch, {"loss": loss})
    _assert_equal(keras.models.load_model(tmp_path / "last.keras"), held[1])
    model.load_weights(tmp_path / "best.weights.h5")
    _assert_equal(model, held[0])
    keras.callbacks.CallbackList([backup()], model=model).on_train_begin()
    _assert_equal(model, held[1])


@pytest.mark.parametrize("layout", ["dtensor", "pjrt"])
def test_eager_code_reads_and_changes_whole_values(make_partitioner, layout):
    model = _build(make_partitioner(**LAYOUTS[layout]))
    single = _build(Partitioner())
    for mine, theirs in zip(model.variables, single.variables, strict=True):
        theirs.assign(mine.numpy())
    np.testing.assert_allclose(model(FEATURES), single(FEATURES), rtol=1e-6)
    for variable in model.variables:  # of every stored form
        value = variable.numpy()
        variable.assign_add(np.ones(value.shape, "float32"))
        variable.assign(variable * 2)
        variable.value.assign_sub(value)
        np.testing.assert_allclose(variable.numpy(), (value + 1) * 2 - value, rtol=1e-6, err_msg=variable.path)
        with pytest.raises(ValueError, match="shape"):
            variable.value.assign(np.zeros((*value.shape, 2), "float32"))


def test_fit_keeps_replicas_equal_in_a_model_built_by_a_partitioner(make_partitioner):
    """The partitioner's step sums gradients itself; those of `fit` are summed by Keras' optimizer."""
    x, found = np.random.default_rng(1).normal(size=(8, 8, 16)).astype("float32"), []
    for partitioner in (Partitioner(), make_partitioner(**LAYOUTS["mirrored"])):
        with partitioner.creates_variables():
            keras.utils.set_random_seed(0)
            inputs = keras.Input((8, 16))
            model = keras.Model(inputs, inputs + SwitchFeedForward(4, 8, jitter_noise=0.0, group_size=8)(inputs))
            optimizer = keras.optimizers.SGD(0.5)
            partitioner.build(model, optimizer)
            model.compile(optimizer, "mse", jit_compile=False)
        found.append(model.fit(x, x[..., ::-1], epochs=3, batch_size=8, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    assert all(len({replica.numpy().tobytes() for replica in variable.value.values}) == 1
               for variable in model.trainable_variables)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_step_has_trained_is_saved_as_a_checkpoint_saves_it(make_partitioner, layout, tmp_path):
    partitioner = make_partitioner(**LAYOUTS[layout])
    model = _build(partitioner)
    step = train_step.compile_steps(model, model.optimizer, 0, StepSettings(), partitioner)
    batch = {"encoder_input_tokens": IDS, "encoder_target_tokens": IDS, "encoder_loss_weights": np.ones_like(IDS)}
    for _ in range(2):
        step(partitioner.place({name: value[None] for name, value in batch.items()}))
        model.save(tmp_path / "model.keras")  # twice: reading a variable must not keep its old numbers
    variables = tensors.state_variables(model, model.optimizer)
    bundles.write(tmp_path / "state", partitioner.pieces({path: stored(each) for path, each in variables.items()}))
    loaded, checkpoint = keras.models.load_model(tmp_path / "model.keras"), tf.train.load_checkpoint(tmp_path / "state")
    assert loaded.optimizer.iterations.numpy() == 2
    for path, found in tensors.state_variables(loaded, loaded.optimizer).items():
        expected = checkpoint.get_tensor(bundles.key_of(path))
        np.testing.assert_array_equal(found, unfolding_of(variables[path]).fold(expected, np), err_msg=path)


def _decide(scores, options):
    return slots.assign(scores, options, slots.top_experts(scores, 1))


@dataclasses.dataclass(frozen=True)
class Counting(policies.Policy):
    """Top-1 with a state, the load of each expert since the beginning."""

    name: str = "counting"
    decide: Callable = _decide
    is_causal: bool = True
    state: tuple[str, ...] = ("loads",)
    update: Callable = lambda policy, state, load: {"loads": state["loads"] + load}


@pytest.fixture
def counting(monkeypatch):
    """The configuration with the policy."""
    monkeypatch.setattr(policies, "_policies", dict(policies._policies))
    policies.register(Counting())
    return dataclasses.replace(CONFIG, routing_policy="counting")


@pytest.mark.slow
@pytest.mark.parametrize("is_mirrored, make_optimizer", [
    (True, Adafactor), (False, _adam), (True, _adam),
    (False, lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)),  # Keras refuses it under a strategy
    (True, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2), initial_scale=4.0))])
def test_callbacks_of_fit_keep_the_best_and_the_last(is_mirrored, make_optimizer, counting, tmp_path):
    reduction = tf.distribute.ReductionToOneDevice()
    scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], reduction).scope if is_mirrored else (
        contextlib.nullcontext)
    with scope():
        model = _build(Partitioner(), make_optimizer, counting)
    kept = {}

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = [2.0, 1.0, 3.0][epoch]
            kept[epoch] = [variable.numpy() for variable in _variables(model)]

    callbacks = [Keep(), keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"), keras.callbacks.ModelCheckpoint(
        tmp_path / "best.weights.h5", monitor="score", mode="min", save_best_only=True, save_weights_only=True),
        keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=3, delete_checkpoint=False)]
    model.fit(FEATURES, IDS, batch_size=2, epochs=3, verbose=0, callbacks=callbacks)
    assert [variable.name for variable in model.non_trainable_variables if variable.numpy().any()] == ["loads"]
    for epoch, values in kept.items():
        _assert_equal(keras.models.load_model(tmp_path / f"{epoch + 1}.keras"), values)
    single = _build(Partitioner(), make_optimizer, counting)
    single.load_weights(tmp_path / "best.weights.h5")
    _assert_equal(single, kept[1])
    single.load_weights(tmp_path / "backup" / "latest.weights.h5")
    _assert_equal(single, kept[2])


# A fit that saves all 3 batches and ends itself at a batch; `saved.npz` has the variables when it last saved.
_FIT = """
import os, signal, sys
import keras, numpy as np
from switch_tf import SwitchConfig, SwitchTransformer

folder, kill_at, config = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
keras.utils.set_random_seed(0)
model = SwitchTransformer(config)
model.compile(keras.optimizers.Adam(1e-2, use_ema=True),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)

class Kill(keras.callbacks.Callback):
    seen = 0

    def values(self):
        return {str(index): variable.numpy() for index, variable in enumerate(
            [*model.variables, *model.optimizer.variables])}

    def on_train_begin(self, logs=None):
        if kill_at == 0:
            np.savez(folder + "/restored.npz", **self.values())
            print("epoch", model._initial_epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen % 3 == 0 and kill_at:
            np.savez(folder + "/saved.npz", **self.values())
        if self.seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

ids = np.random.default_rng(0).integers(2, 32, (8, 8)).astype("int32")
model.fit({"encoder_input_tokens": ids}, ids, batch_size=2, epochs=3, verbose=0, callbacks=[
    keras.callbacks.BackupAndRestore(folder + "/backup", save_freq=3), Kill()])
print("steps", int(model.optimizer.iterations))
"""


@pytest.mark.slow
def test_a_fit_that_was_killed_in_an_epoch_continues_with_what_was_backed_up(tmp_path):
    """Keras repeats the epoch: 6 steps were saved, and two epochs of 4 follow."""
    run = [sys.executable, "-c", _FIT, str(tmp_path)]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    assert subprocess.run([*run, "8", repr(CONFIG)], env=environ).returncode == -signal.SIGKILL
    done = subprocess.run([*run, "0", repr(CONFIG)], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["epoch", "1", "steps", "14"]
    saved, restored = np.load(tmp_path / "saved.npz"), np.load(tmp_path / "restored.npz")
    assert len(saved) == len(restored) > 40
    for name, value in saved.items():
        np.testing.assert_array_equal(restored[name], value)


# One of two processes, with two devices each: the file of each has every value.
_PROCESS = """
import sys
import time
import numpy as np
from switch_tf.hardware import devices, host
from switch_tf.partitioning import Layout, backends

host.skip_tpu_metadata_query()
devices.split_cpu(2)
folder, backend, config = sys.argv[1], sys.argv[2], sys.argv[3]
rules = ("batch", "data"), ("group", "data"), ("expert", "data")
at_rest = ("vocab", ("model", "data")), ("kv", ("data", "model")), ("expert_mlp", "model")
partitioner = backends.create_partitioner(Layout("data=2,model=2", rules, at_rest, backend))

import keras
from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.partitioning.variables import assign

model, optimizer = SwitchTransformer(eval(config)), keras.optimizers.Adam()
partitioner.build(model, optimizer)
model.compile(optimizer, "mse")
variables, random = [*model.variables, *optimizer.variables], np.random.default_rng(0)
values = [random.uniform(1, 100, tuple(variable.shape)).astype(variable.dtype) for variable in variables]
for variable, value in zip(variables, values, strict=True):
    assign(variable, value)
file = f"{folder}/{partitioner.process_index}.keras"
model.save(file)
loaded = keras.models.load_model(file)
for variable, value in zip([*loaded.variables, *loaded.optimizer.variables], values, strict=True):
    np.testing.assert_array_equal(variable.numpy(), value)
for variable in variables:
    assign(variable, np.zeros(variable.shape, variable.dtype))
model.load_weights(file)
for variable, value in zip(variables, values, strict=True):
    np.testing.assert_array_equal(variable.numpy(), value)
partitioner.barrier()
time.sleep(4 * partitioner.process_index)  # no process takes the end of the other one for a loss
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "pjrt"])
def test_each_of_two_processes_saves_whole_values(backend, tmp_path):
    with contextlib.ExitStack() as sockets:
        ports = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
    processes = []
    for index in range(2):
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        cluster.put(environ, [f"127.0.0.1:{port}" for port in ports], index)
        processes.append(subprocess.Popen([sys.executable, "-c", _PROCESS, str(tmp_path), backend, repr(CONFIG)],
                                          env=environ, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
