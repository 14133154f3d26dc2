"""Variables and batches in pieces: where they lie, how much each device holds, and what is refused."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from switch_tf import SwitchConfig, SwitchTransformer, partitioning
from switch_tf.ops import random
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.factoring import bytes_per_device
from switch_tf.partitioning import backends
from switch_tf.partitioning.backends.dtensor import DTensorPartitioner
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.variables import Unfolding, pack, stored, unfolding

EXPERT = (("batch", "data"), ("group", "data"), ("expert", "data"))
MODEL = (("heads", "model"), ("mlp", "model"), ("expert_mlp", "model"), ("vocab", "model"))

TINY = dataclasses.replace(SwitchConfig.from_preset("switch_tiny"), num_encoder_layers=1, num_decoder_layers=1,
                           encoder_sparse_step=1, decoder_sparse_step=1)


def _partitioner(mesh_shape, rules, at_rest_rules=()):
    layout = Layout(mesh_shape, rules, at_rest_rules)
    names = [f"CPU:{index}" for index in range(layout.num_devices)]
    return DTensorPartitioner(layout, dtensor.create_mesh(list(layout.mesh.items()), devices=names))


def _bytes_of_first_device(variables):
    return sum(dtensor.unpack(stored(variable).read_value())[0].numpy().nbytes for variable in variables)


@pytest.mark.parametrize("mesh_shape, rules, at_rest_rules", [
    pytest.param("data=8", EXPERT, (), marks=pytest.mark.slow), ("data=4", EXPERT, (("embed", "data"),)),
    pytest.param("data=4,model=2", (*EXPERT, *MODEL), (), marks=pytest.mark.slow)])
def test_each_device_holds_what_inspect_computes(mesh_shape, rules, at_rest_rules):
    partitioner = _partitioner(mesh_shape, rules, at_rest_rules)
    model, optimizer = SwitchTransformer(TINY), Adafactor()
    partitioner.build(model, optimizer)
    computed = bytes_per_device(TINY, partitioner.layout)
    assert _bytes_of_first_device(model.variables) == computed["weights"]
    slots = [variable for variable in optimizer.variables if hasattr(variable, "logical_axes")]
    assert _bytes_of_first_device(slots) == computed["optimizer_slots"]


def test_over_several_axes_each_device_holds_what_inspect_and_the_layout_compute():
    rules = (("batch", "a"), ("group", "a"), ("expert", "a"))
    at_rest = ("vocab", ("b", "a")), ("expert_mlp", "b"), ("kv", ("a", "b")), ("mlp", ("b", "a"))
    layout = Layout("a=2,b=2", rules, at_rest)
    mesh = dtensor.create_mesh([*layout.mesh.items()], devices=[f"CPU:{index}" for index in range(4)])
    optimizer = Adafactor()
    model = SwitchTransformer(TINY)
    DTensorPartitioner(layout, mesh).build(model, optimizer)
    computed = bytes_per_device(TINY, layout)
    assert _bytes_of_first_device(model.variables) == computed["weights"]
    slots = [variable for variable in optimizer.variables if hasattr(variable, "logical_axes")]
    assert _bytes_of_first_device(slots) == computed["optimizer_slots"]
    assert layout.stored_bytes(TINY.weights()) == 2 * computed["weights"]
    whole = 4 * TINY.num_parameters
    assert computed["weights"] < 0.27 * whole  # four devices; norms and biases are whole


@pytest.mark.parametrize("make", [Adafactor, lambda: keras.optimizers.AdamW(1e-3, use_ema=True)])
def test_every_variable_is_laid_out_and_slots_lie_like_their_weights(make):
    partitioner, model, optimizer = _partitioner("data=4", EXPERT), SwitchTransformer(TINY), make()
    partitioner.build(model, optimizer)
    assert all(isinstance(variable.value, dtensor.DVariable) for variable in model.variables + optimizer.variables)
    assert "learning_rate" in {variable.name for variable in optimizer.variables}  # made before there was a layout
    split = [variable for variable in optimizer.variables if "data" in variable.value.layout.sharding_specs]
    assert split and all("experts" in variable.path for variable in split)


def test_weights_are_the_ones_of_one_device():
    values = []
    for build in (lambda model: model.build(), _partitioner("data=4,model=2", (*EXPERT, *MODEL)).build):
        keras.utils.set_random_seed(3)
        model = SwitchTransformer(TINY)
        build(model)
        values.append([_whole(variable.value) for variable in model.trainable_variables])
    for one, pieces in zip(*values, strict=True):
        np.testing.assert_array_equal(one, pieces)


def _whole(variable):
    if not isinstance(variable, dtensor.DVariable):
        return variable.numpy()
    replicated = dtensor.Layout.replicated(variable.layout.mesh, variable.shape.rank)
    return dtensor.unpack(dtensor.relayout(variable.read_value(), replicated))[0].numpy()


def test_pieces_of_an_unfolded_weight_are_those_of_a_split_over_both_axes():
    """As XLA's tiles are: of two columns each, the device at (a, b) has those from 2 * (2a + b)."""
    mesh = _partitioner("a=2,b=2", (("batch", "a"), ("expert", "b"))).mesh
    weight = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    for spec, columns in ((("a", "b"), (0, 2, 4, 6)), (("b", "a"), (0, 4, 2, 6))):
        how, axes = unfolding((6, 8), [(), spec], {"a": 2, "b": 2})
        assert (how.first, how.stored_shape, axes) == (((1, 2),), (2, 6, 4), (spec[0], None, spec[1]))
        np.testing.assert_array_equal(how.fold(how.unfold(weight, np), np), weight)
        np.testing.assert_array_equal(how.fold(how.unfold(tf.constant(weight))), weight)
        layout = dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], mesh)
        for piece, first in zip(dtensor.unpack(pack(how.unfold(weight, np), layout)), columns, strict=True):
            np.testing.assert_array_equal(piece.numpy()[0], weight[:, first:first + 2])


def test_each_dimension_of_a_weight_may_be_unfolded():
    mesh = {"a": 2, "b": 3, "c": 2, "d": 2, "one": 1}
    how, axes = unfolding((12, 5, 8), [("a", "one", "b", "c"), (), ("d", "one")], mesh)
    assert (how.first, how.stored_shape) == (((0, 2), (0, 3)), (2, 3, 2, 5, 8)) and axes == ("a", "b", "c", None, "d")
    how, axes = unfolding((12, 5, 8), [("a", "b"), (), ("d", "c")], mesh)
    assert (how.first, how.stored_shape) == (((0, 2), (2, 2)), (2, 2, 6, 5, 4)) and axes == ("a", "d", "b", None, "c")
    weight = np.random.RandomState(0).randn(12, 5, 8)
    unfolded = how.unfold(weight, np)
    np.testing.assert_array_equal(unfolded[1, 0], weight[6:, :, :4])
    np.testing.assert_array_equal(how.fold(unfolded, np), weight)
    assert unfolding((3, 4), [(), ("one",)], mesh) == (Unfolding((3, 4)), (None, None))


def test_a_variable_made_elsewhere_is_refused():
    class Counting(SwitchTransformer):
        def build(self, input_shape=None):
            super().build(input_shape)
            with tf.init_scope():
                self.counter = keras.Variable(0, trainable=False)
                self.counter._value = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[])

    with pytest.raises(ValueError, match="was created outside of the layout, so not all devices would update it"):
        _partitioner("data=2", EXPERT).build(Counting(TINY))


def test_each_device_gets_its_rows_of_the_batch():
    tokens = tf.reshape(tf.range(8 * 3), (1, 8, 3))
    placed = _partitioner("data=2,model=2", (*EXPERT, *MODEL)).place({"tokens": tokens})["tokens"]
    pieces = [piece.numpy() for piece in dtensor.unpack(placed)]
    for piece, rows in zip(pieces, (slice(0, 4), slice(0, 4), slice(4, 8), slice(4, 8)), strict=True):
        np.testing.assert_array_equal(piece, tokens[0, rows])


def test_random_numbers_do_not_depend_on_the_mesh():
    drawn = random.uniform(tf.constant(5, tf.uint32), (8, 3, 4)).numpy()
    for mesh_shape in ("data=2", "data=4,model=2"):
        partitioner = _partitioner(mesh_shape, (*EXPERT, *(MODEL if "model" in mesh_shape else ())))

        def draw(features, partitioner=partitioner):
            noise = random.uniform(tf.cast(features["x"][0, 0], tf.uint32), (8, 3, 4))
            return partitioning.constrain(noise, ("batch", None, "heads"))

        placed = partitioner.place({"x": tf.fill((1, 8, 3), 5)})
        np.testing.assert_array_equal(partitioner.results(draw)(placed).numpy(), drawn)


def test_what_dtensor_cannot_do_is_refused():
    partitioner = _partitioner("data=2", EXPERT)
    with pytest.raises(ValueError, match="steps_per_call is 4, but under DTensor a step is two functions"):
        partitioner.check(TINY, 4, False)
    with pytest.raises(ValueError, match="use_xla=True compiles the step of one device"):
        partitioner.check(TINY, 1, True)


OVER_BOTH = (("batch", ("data", "expert")), ("expert", "expert"))


def test_an_axis_over_several_mesh_axes_is_refused_unless_one_of_them_alone_cuts():
    with pytest.raises(ValueError, match="The layout splits batch over several mesh axes at once, and DTensor .* "
                       "gin/layouts/expert.gin or fully_sharded.gin, or leave all of these mesh axes but one at"):
        backends.create_partitioner(Layout("data=2,expert=4", OVER_BOTH, backend="dtensor"))
    tokens = tf.reshape(tf.range(8 * 3), (1, 8, 3))
    placed = _partitioner("data=1,expert=4", OVER_BOTH).place({"tokens": tokens})["tokens"]
    pieces = [piece.numpy() for piece in dtensor.unpack(placed)]
    np.testing.assert_array_equal(pieces, np.reshape(tokens, (4, 2, 3)))
