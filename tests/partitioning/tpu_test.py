"""What surrounds a TPU, on a CPU: the step with its condition inside, the refusals, the annotations."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.backends.strategies import CoreAnnotator, StrategyPartitioner, TPUPartitioner, sharding
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
    for kind in (StrategyPartitioner, TPUPartitioner):
        loss, weights = _run(kind(Layout("data=1", DATA), strategy), shallow_config, batch, 2)
        assert loss == pytest.approx(expected, rel=1e-6)
        for one, other in zip(expected_weights, weights, strict=True):
            np.testing.assert_allclose(other, one, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StrategyPartitioner, TPUPartitioner])
def test_a_step_that_is_not_finite_changes_nothing(kind, shallow_config, batch):
    partitioner = kind(Layout("data=1", DATA), tf.distribute.OneDeviceStrategy("CPU:0"))
    model, optimizer = SwitchTransformer(shallow_config), Adafactor(0.01)
    partitioner.build(model, optimizer)
    model.decoder.layers[0].mlp.experts.wo.assign(np.full((4, 32, 16), np.inf))
    before = [variable.numpy() for variable in optimizer.variables]
    step = compile_steps(model, optimizer, 3, StepSettings(), partitioner)
    _, bad_step = step(partitioner.place({name: value[None] for name, value in batch.items()}))
    assert int(bad_step) == 0
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


class _TurnsTaken(TPUPartitioner):
    """TPUPartitioner over MirroredStrategy, whose updates may not stand in a condition, as those of TPUStrategy may."""

    def step(self, compute, apply, use_xla=False):
        def one_step(features, index):
            gradients, norm, measured, is_finite = compute({name: value[index] for name, value in features.items()})
            apply(gradients, norm)
            return measured, is_finite

        return lambda features, index: self._first(self.strategy.run(one_step, args=(features, index)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StrategyPartitioner, _TurnsTaken])
def test_several_steps_a_call_on_two_replicas_are_those_of_one_device_and_traced_once(kind, shallow_config, batch):
    config = dataclasses.replace(shallow_config, num_encoder_layers=1, num_decoder_layers=1)
    expected, expected_weights = _run(Partitioner(), config, batch, 2)
    # Collectives have room for one group of devices in a process, and a test process has several.
    partitioner = kind(Layout("data=2", DATA), tf.distribute.MirroredStrategy(
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
        rows = {name: self._partitioner.strategy.experimental_local_results(value) for name, value in placed.items()}
        specs = {}
        for name, parts in rows.items():
            steps, batch_size, length = parts[0].shape
            specs[name] = tf.TensorSpec((steps, batch_size * len(parts), length), parts[0].dtype)
        self._partitioner.trace(self._function, specs)
        return self._function(placed)


def test_annotations_name_the_axes_of_the_layout():
    layout = Layout("data=4,model=2", (*DATA, ("expert", "data"), ("mlp", "model")))
    assert _read(sharding(layout.spec(("batch", "length", "mlp")), layout.mesh)._proto) == ((4, 1, 2), False)
    # Replicated over what the spec leaves out: the last tile dimension.
    assert _read(sharding(layout.spec(("expert", "group", None)), layout.mesh)._proto) == ((4, 1, 1, 2), True)
    within = CoreAnnotator(layout)  # the axes of one replica

    graph = tf.function(lambda x: within.constrain(x, ("batch", "length", "mlp"))).get_concrete_function(
        tf.TensorSpec((8, 3, 6))).graph
    attributes = [op.get_attr("_XlaSharding") for op in graph.get_operations() if op.type == "XlaSharding"]
    assert [_describe(attribute) for attribute in attributes] == [((1, 1, 2), False)]


def test_a_dimension_is_cut_over_several_axes_the_outermost_first():
    mesh = {"expert": 2, "data": 3, "model": 2}
    found = _read(sharding((("data", "expert"), ()), mesh)._proto)
    # Piece by piece, each on two devices of the model axis; device = (expert * 3 + data) * 2 + model.
    assert found == ((6, 1, 2), True)
    devices = list(sharding((("data", "expert"), ()), mesh)._proto.tile_assignment_devices)
    assert devices == [6 * expert + 2 * data + model for data in range(3) for expert in (0, 1) for model in (0, 1)]
    # Axes of other programs are left out.
    assert _read(sharding((("data", "expert"), ("model",)), {"expert": 2, "model": 2})._proto) == ((2, 2), False)


def _describe(attribute):
    from tensorflow.compiler.xla import xla_data_pb2
    sharding = xla_data_pb2.OpSharding()
    sharding.ParseFromString(attribute)
    return _read(sharding)


def _read(sharding):
    return tuple(sharding.tile_assignment_dimensions), sharding.replicate_on_last_tile_dim
