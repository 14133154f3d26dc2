"""T5's dense feed-forward layer, and experts with stacked kernels."""

import functools
from typing import Any

from keras import ops

from switch_tf import checks, partitioning
from switch_tf.configs.choices import GATED_ACTIVATIONS, by_name
from switch_tf.layers.basic import Dropout, KeepsShape, Layer, drop, kernel_initializer, serializable
from switch_tf.ops import products, random
from switch_tf.partitioning.tensors import Shape, Tensor

_GELU, _GELU_TANH = (functools.partial(ops.gelu, approximate=approximate) for approximate in (False, True))
_FUNCTIONS = by_name({ops.relu: "relu reglu", _GELU: "gelu geglu_exact", _GELU_TANH: "gelu_tanh geglu",
                      ops.silu: "silu swiglu"})


class _Kernels(Layer):
    def __init__(self, d_ff, activation, dropout_rate, init_scale, **kwargs):
        super().__init__(**kwargs)
        self._keep(activation=activation, d_ff=d_ff, dropout_rate=dropout_rate, init_scale=init_scale)

    def _add_kernels(self, d_model, output_dim, width, stacked=(), stacked_axes=()):
        """`width`: Logical axis of d_ff."""

        def add(name, shape, axes, initializer):
            return partitioning.add_weight(self, name, (*stacked, *shape), (*stacked_axes, *axes), initializer)

        names = ("wi_0", "wi_1") if self.activation in GATED_ACTIVATIONS else ("wi",)
        # Shared: `add_weight` clones it, and a second one would shift the seeds of all later weights.
        initializer = kernel_initializer(self.init_scale, d_model)
        self.input_kernels = [add(name, (d_model, self.d_ff), ("embed", width), initializer) for name in names]
        self.wo = add("wo", (self.d_ff, output_dim), (width, "embed"), kernel_initializer(self.init_scale, self.d_ff))

    def activate(self, products):
        """Returns act(x wi), or act(x wi_0) * (x wi_1) for a gated activation."""
        hidden = _FUNCTIONS[self.activation](products[0])
        return hidden if len(products) == 1 else hidden * products[1]


@serializable
class FeedForward(KeepsShape, _Kernels):
    """Feed-forward layer without biases: act(x wi) wo, or (act(x wi_0) * (x wi_1)) wo.

    Args:
        d_ff: Hidden width.
        activation: "relu", "gelu" (exact, by erf), "gelu_tanh" or "silu"; gated "reglu", "geglu" (gelu by tanh, as in
            T5 1.1), "geglu_exact" (gelu by erf) or "swiglu".
        dropout_rate: In [0, 1). Dropout of the hidden units, with one mask for all positions.
        init_scale: The initial variance is init_scale / fan_in.

    Call arguments:
        inputs: <compute dtype>[batch, length, d_model].

    Returns: <compute dtype>, same shape as `inputs`.
    """

    def __init__(self, d_ff: int, activation: str = "relu", dropout_rate: float = 0.0, init_scale: float = 1.0,
                 **kwargs: Any):
        super().__init__(d_ff, activation, dropout_rate, init_scale, **kwargs)
        self.dropout = Dropout(dropout_rate, broadcast_axis=1, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape)
        self.dropout.build()
        self._add_kernels(d_model, d_model, "mlp")

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        checks.tensor("inputs", inputs, "float", (None, None, self.wo.shape[-1]))
        hidden = self.activate([products.product("blm,mf->blf", inputs, wi) for wi in self.input_kernels])
        hidden = partitioning.constrain(hidden, ("batch", "length", "mlp"))
        hidden = self.dropout(hidden, training=training)
        outputs = products.product("blf,fm->blm", hidden, self.wo)
        return partitioning.constrain(outputs, ("batch", "length", "embed"))


@serializable
class ExpertFeedForward(_Kernels):
    """Feed-forward experts, one per row of the expert dimension.

    Args:
        d_ff: Hidden width of each expert.
        activation, init_scale: See `FeedForward`.
        dropout_rate: In [0, 1). Elementwise expert dropout of hidden units (section 4).
        output_dim: Width of the outputs. None for the width of the inputs.

    Call arguments:
        inputs: <compute dtype>[num_experts, num_groups, expert_capacity, d_model]. Empty slots are zeros.

    Returns: <compute dtype>, the shape of `inputs` with last dimension `output_dim`. Empty slots stay zeros.
    """

    def __init__(self, num_experts: int, d_ff: int, activation: str = "relu", dropout_rate: float = 0.0,
                 init_scale: float = 0.1, output_dim: int | None = None, **kwargs: Any):
        super().__init__(d_ff, activation, dropout_rate, init_scale, **kwargs)
        self._keep(num_experts=num_experts)
        self.output_dim = checks.optional("output_dim", output_dim, checks.integer, 1)

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape, rank=4)
        self._add_kernels(d_model, self.output_dim or d_model, "expert_mlp", (self.num_experts,), ("expert",))

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        training = checks.flag("training", training)
        checks.tensor("inputs", inputs, "float", (self.num_experts, None, None, self.input_kernels[0].shape[1]))
        hidden = self.activate([_products(inputs, wi) for wi in self.input_kernels])
        hidden = partitioning.constrain(hidden, ("expert", "group", "capacity", "expert_mlp"))
        if training and self.dropout_rate:
            num_experts, num_groups, expert_capacity, _ = ops.shape(hidden)
            group = random.batch_positions(num_groups)[None, :, None, None]
            expert = partitioning.arange(num_experts)[:, None, None, None]
            slot = partitioning.arange(expert_capacity)[None, None, :, None]
            hidden = drop(hidden, self.dropout_draws(group, slot * num_experts + expert), self.dropout_rate)
        return _products(hidden, self.wo)

    def dropout_draws(self, group: Tensor, place: Tensor) -> Tensor:
        """Draws uniform numbers for dropout of hidden units, equal for every dispatch, <float32>[..., d_ff].

        Args:
            group: <int32>[..., 1]. Group of the global batch.
            place: <int32>[..., 1]. slot * num_experts + expert.
        """
        unit = place * self.d_ff + partitioning.arange(self.d_ff)
        return random.uniform_at(random.layer_seed(self, "dropout"), group, unit)


def _products(buffers, kernels):
    """Computes egcm,emf->egcf. A four-dimensional einsum would transpose the kernels."""
    num_experts, num_groups, expert_capacity, width = ops.shape(buffers)
    rows = ops.reshape(buffers, (num_experts, num_groups * expert_capacity, width))
    outputs = products.product("erm,emf->erf", rows, kernels)
    return ops.reshape(outputs, (num_experts, num_groups, expert_capacity, kernels.shape[-1]))
