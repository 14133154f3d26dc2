"""Weights are created with logical axes; constraining an activation changes nothing and checks its axes."""

import keras
import numpy as np
import pytest

from switch_tf import partitioning
from switch_tf.partitioning import axes


class Scale(keras.layers.Layer):
    """Multiplies by a weight, to see in which dtype the weight arrives."""

    def build(self, input_shape):
        self.scale = partitioning.add_weight(self, "scale", (2,), ("embed",), "ones")

    def call(self, inputs):
        assert keras.ops.convert_to_tensor(self.scale).dtype == "float32"
        return inputs * partitioning.use(self.scale, inputs.dtype)


def test_a_weight_carries_its_axes_and_belongs_to_its_layer():
    layer = keras.layers.Layer(name="owner")
    weight = partitioning.add_weight(layer, "wi", (2, 3), ["embed", "mlp"], "zeros")
    assert weight.logical_axes == ("embed", "mlp")
    assert weight.shape == (2, 3)
    assert [variable.path for variable in layer.trainable_variables] == [weight.path]
    assert weight.name == "wi"


def test_constrain_without_a_layout_is_the_identity():
    x = keras.ops.ones((2, 3))
    assert partitioning.constrain(x, ("batch", None)) is x


def test_a_weight_is_float32_and_is_used_in_the_dtype_of_what_it_meets():
    layer = Scale(dtype="mixed_bfloat16")
    outputs = layer(np.ones((1, 2), "float32"))
    assert layer.scale.dtype == "float32"
    assert outputs.dtype.name == "bfloat16"


def test_a_weight_may_have_a_dtype_of_its_own():
    layer = keras.layers.Layer(dtype="bfloat16")
    assert partitioning.add_weight(layer, "a", (1,), ("embed",), "zeros").dtype == "bfloat16"
    assert partitioning.add_weight(layer, "b", (1,), ("embed",), "zeros", dtype="float32").dtype == "float32"


def test_an_unknown_axis_is_refused_by_name():
    layer = keras.layers.Layer(name="owner")
    with pytest.raises(ValueError, match=r"Weight 'wi' of layer 'owner' has the unknown logical axis 'width';"):
        partitioning.add_weight(layer, "wi", (2, 3), ("embed", "width"), "zeros")
    with pytest.raises(ValueError, match="An activation has the unknown logical axis 'model'"):
        partitioning.constrain(keras.ops.ones((2,)), ("model",))


def test_every_dimension_needs_an_axis():
    with pytest.raises(ValueError, match=r"'wi' of layer 'owner' has 2 dimensions but 1 logical axes \('embed',\)"):
        partitioning.add_weight(keras.layers.Layer(name="owner"), "wi", (2, 3), ("embed",), "zeros")
    with pytest.raises(ValueError, match="An activation has 1 dimensions but 2 logical axes"):
        partitioning.constrain(keras.ops.ones((2,)), ("batch", None))


def test_a_variable_has_the_axes_it_was_made_with_and_else_none():
    seen = []

    def create(shape):
        seen.append(axes.axes_of_new_variable(len(shape)))
        return keras.Variable(np.zeros(shape))

    variable = partitioning.with_axes(["embed", None], create, (2, 3))
    assert seen == [("embed", None)]
    assert partitioning.axes_of(variable) == ("embed", None)
    assert axes.axes_of_new_variable(1) == partitioning.axes_of(keras.Variable(np.zeros(2))) == (None,)
