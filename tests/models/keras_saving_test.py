"""Keras' ways to save and load, under every back end: whole values in the files, or a refusal before there is one."""


import keras
import numpy as np
import pytest

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.layers import SwitchFeedForward
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.unfolded import assign

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
