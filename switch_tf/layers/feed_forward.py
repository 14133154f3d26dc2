"""T5's dense feed-forward layer."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.configs.choices import ACTIVATIONS, GATED_ACTIVATIONS, check_choice
from switch_tf.layers.dropout import Dropout
from switch_tf.layers.shapes import KeepsShape
from switch_tf.ops import products
from switch_tf.partitioning.tensors import Shape, Tensor

_GELU, _GELU_TANH = (functools.partial(ops.gelu, approximate=approximate) for approximate in (False, True))
_FUNCTIONS = {"relu": ops.relu, "gelu": _GELU, "gelu_tanh": _GELU_TANH, "silu": ops.silu, "reglu": ops.relu,
              "geglu": _GELU_TANH, "geglu_exact": _GELU, "swiglu": ops.silu}


def add_input_kernels(layer: keras.layers.Layer, activation: str, shape: Sequence[int], axes: Sequence[str | None],
                      initializer: keras.initializers.Initializer) -> list[keras.Variable]:
    """Creates `wi`, or `wi_0` and `wi_1` for a gated activation, and returns them in a list."""
    names = ("wi_0", "wi_1") if activation in GATED_ACTIVATIONS else ("wi",)
    return [partitioning.add_weight(layer, name, shape, axes, initializer) for name in names]


def activate(products: Sequence[Tensor], activation: str) -> Tensor:
    """Returns act(x wi), or act(x wi_0) * (x wi_1) for a gated activation, from a list of the products."""
    hidden = _FUNCTIONS[activation](products[0])
    return hidden if len(products) == 1 else hidden * products[1]


def kernel_initializer(init_scale: float, fan_in: int) -> keras.initializers.Initializer:
    """Returns a truncated normal with standard deviation sqrt(init_scale / fan_in) before truncation (section 2.4)."""
    return keras.initializers.TruncatedNormal(stddev=(init_scale / fan_in) ** 0.5)


@keras.saving.register_keras_serializable("switch_tf")
class FeedForward(KeepsShape, keras.layers.Layer):
    """Feed-forward layer without biases: act(x wi) wo, or (act(x wi_0) * (x wi_1)) wo.

    Args:
        d_ff: int. Hidden width.
        activation: "relu", "gelu" (exact, by erf), "gelu_tanh" or "silu"; gated "reglu", "geglu" (gelu by tanh, as in
            T5 1.1), "geglu_exact" (gelu by erf) or "swiglu".
        dropout_rate: float in [0, 1). Dropout of the hidden units, with one mask for all positions.
        init_scale: float. The initial variance is init_scale / fan_in.

    Call arguments:
        inputs: <compute dtype>[batch, length, d_model].

    Returns: <compute dtype>, same shape as `inputs`.
    """

    def __init__(self, d_ff: int, activation: str = "relu", dropout_rate: float = 0.0, init_scale: float = 1.0,
                 **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True
        check_choice("activation", activation, ACTIVATIONS)
        self.d_ff = checks.integer("d_ff", d_ff, at_least=1)
        self.activation = activation
        self.dropout_rate = checks.number("dropout_rate", dropout_rate, "in [0, 1)")
        self.init_scale = checks.number("init_scale", init_scale, "above 0")
        self.dropout = Dropout(dropout_rate, broadcast_axis=1, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape)
        self.dropout.build()
        self.input_kernels = add_input_kernels(
            self, self.activation, (d_model, self.d_ff), ("embed", "mlp"), kernel_initializer(self.init_scale, d_model))
        self.wo = partitioning.add_weight(
            self, "wo", (self.d_ff, d_model), ("mlp", "embed"), kernel_initializer(self.init_scale, self.d_ff))

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        checks.tensor("inputs", inputs, "float", (None, None, self.wo.shape[-1]))
        training = checks.flag("training", training)
        hidden = activate([products.product("blm,mf->blf", inputs, wi) for wi in self.input_kernels],
                          self.activation)
        hidden = partitioning.constrain(hidden, ("batch", "length", "mlp"))
        hidden = self.dropout(hidden, training=training)
        outputs = products.product("blf,fm->blm", hidden, self.wo)
        return partitioning.constrain(outputs, ("batch", "length", "embed"))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "d_ff": self.d_ff, "activation": self.activation,
                "dropout_rate": self.dropout_rate, "init_scale": self.init_scale}
