"""The strategies of tf.distribute, of which a TPU runs one, on CPU devices: several steps a call and bad steps."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.backends.strategies import StrategyPartitioner
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training.train_step import compile_steps

DATA = (("batch", "data"), ("group", "data"))


def _run(partitioner, config, batch, steps_per_call):
    keras.utils.set_random_seed(1)
    model, optimizer = SwitchTransformer(config), Adafactor(0.01)
    partitioner.build(model, optimizer)
    step = compile_steps(model, optimizer, 3, StepSettings(steps_per_call=steps_per_call), partitioner)
    features = {name: tf.stack([value] * steps_per_call) for name, value in batch.items()}
    means, bad_step = step(partitioner.place(features))
    assert int(bad_step) == -1
    cross_entropy = means.batch.loss_terms["cross_entropy"]
    return float(cross_entropy.value), [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.slow
def test_several_steps_a_call_under_a_strategy_are_those_of_one_device(shallow_config, batch):
    expected, expected_weights = _run(Partitioner(), shallow_config, batch, 2)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    loss, weights = _run(StrategyPartitioner(Layout("data=1", DATA), strategy), shallow_config, batch, 2)
    assert loss == pytest.approx(expected, rel=1e-6)
    for one, other in zip(expected_weights, weights, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing(shallow_config, batch):
    partitioner = StrategyPartitioner(Layout("data=1", DATA), tf.distribute.OneDeviceStrategy("CPU:0"))
    model, optimizer = SwitchTransformer(shallow_config), Adafactor(0.01)
    partitioner.build(model, optimizer)
    model.decoder.layers[0].mlp.experts.wo.assign(np.full((4, 32, 16), np.inf))
    before = [variable.numpy() for variable in optimizer.variables]
    step = compile_steps(model, optimizer, 3, StepSettings(), partitioner)
    _, bad_step = step(partitioner.place({name: value[None] for name, value in batch.items()}))
    assert int(bad_step) == 0
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.slow
def test_several_steps_a_call_on_two_replicas_are_those_of_one_device_and_traced_once(shallow_config, batch):
    config = dataclasses.replace(shallow_config, num_encoder_layers=1, num_decoder_layers=1)
    expected, expected_weights = _run(Partitioner(), config, batch, 2)
    # Collectives have room for one group of devices in a process, and a test process has several.
    partitioner = StrategyPartitioner(Layout("data=2", DATA), tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()))
    traced = []
    original = partitioner.compile
    partitioner.compile = lambda *arguments: traced.append(original(*arguments)) or _TracedFirst(partitioner, traced[0])
    loss, weights = _run(partitioner, config, batch, 2)
    assert traced[0].experimental_get_tracing_count() == 1
    assert loss == pytest.approx(expected, rel=1e-5)
    for one, other in zip(expected_weights, weights, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


class _TracedFirst:
    """A step that is traced as the loop does it, before its first call."""

    def __init__(self, partitioner, function):
        self._partitioner, self._function = partitioner, function

    def __call__(self, placed):
        self._partitioner.trace(self._function, {
            name: tf.TensorSpec(value.shape, value.dtype) for name, value in placed.items()})
        return self._function(placed)
