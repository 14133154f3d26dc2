"""Expert feed-forward layers with stacked kernels."""

from typing import Any

import keras
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.configs.choices import ACTIVATIONS, check_choice
from switch_tf.layers import dropout
from switch_tf.layers.feed_forward import activate, add_input_kernels, kernel_initializer
from switch_tf.ops import products, random
from switch_tf.partitioning.tensors import Shape, Tensor


@keras.saving.register_keras_serializable("switch_tf")
class ExpertFeedForward(keras.layers.Layer):
    """Feed-forward experts, one per row of the expert dimension.

    Args:
        num_experts: int. Number of experts.
        d_ff: int. Hidden width of each expert.
        activation: one of ACTIVATIONS, see `FeedForward`.
        dropout_rate: float in [0, 1). Elementwise dropout of hidden units (expert dropout, section 4 of the paper).
        init_scale: float. Each kernel's initial variance is init_scale / fan_in.
        output_dim: int or None. Width of the outputs, by default that of the inputs.

    Call arguments:
        inputs: <compute dtype>[num_experts, num_groups, expert_capacity, d_model]. Empty slots are zeros.

    Returns: <compute dtype>, the shape of `inputs` with last dimension `output_dim`. Empty slots stay zeros.
    """

    def __init__(self, num_experts: int, d_ff: int, activation: str = "relu", dropout_rate: float = 0.0,
                 init_scale: float = 0.1, output_dim: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        check_choice("activation", activation, ACTIVATIONS)
        self.num_experts = checks.integer("num_experts", num_experts, at_least=1)
        self.d_ff = checks.integer("d_ff", d_ff, at_least=1)
        self.activation = activation
        self.dropout_rate = checks.number("A dropout rate", dropout_rate, "in [0, 1)")
        self.init_scale = checks.number("init_scale", init_scale, "above 0")
        self.output_dim = checks.optional("output_dim", output_dim, checks.integer, 1)

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape, rank=4)
        self.input_kernels = add_input_kernels(
            self, self.activation, (self.num_experts, d_model, self.d_ff), ("expert", "embed", "expert_mlp"),
            kernel_initializer(self.init_scale, d_model))
        self.wo = partitioning.add_weight(
            self, "wo", (self.num_experts, self.d_ff, self.output_dim or d_model), ("expert", "expert_mlp", "embed"),
            kernel_initializer(self.init_scale, self.d_ff))

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        training = checks.flag("training", training)
        checks.tensor("inputs", inputs, "float", (self.num_experts, None, None, self.input_kernels[0].shape[1]))
        hidden = activate([_products(inputs, wi) for wi in self.input_kernels], self.activation)
        hidden = partitioning.constrain(hidden, ("expert", "group", "capacity", "expert_mlp"))
        if training and self.dropout_rate:
            group, place = _padded_places(*ops.shape(hidden)[:3])
            hidden = dropout.masked(hidden, self.dropout_mask(group, place, hidden.dtype))
        return _products(hidden, self.wo)

    def dropout_mask(self, group: Tensor, place: Tensor, dtype: str) -> Tensor:
        """Draws a `dropout.mask` of hidden units.

        Args:
            group: <int32>[..., 1]. Group of the global batch.
            place: <int32>[..., 1]. slot * num_experts + expert.
            dtype: Dtype of the hidden units.

        Returns:
            <wide dtype>[..., d_ff], the same for every dispatch.
        """
        unit = place * self.d_ff + partitioning.arange(self.d_ff)
        draws = random.uniform_at(random.layer_seed(self, "dropout"), group, unit)
        return dropout.mask(draws, self.dropout_rate, dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_experts": self.num_experts, "d_ff": self.d_ff,
                "activation": self.activation, "dropout_rate": self.dropout_rate, "init_scale": self.init_scale,
                "output_dim": self.output_dim}


def _products(buffers, kernels):
    """Computes egcm,emf->egcf with one product per expert. A four-dimensional einsum would transpose the kernels."""
    num_experts, num_groups, expert_capacity, width = ops.shape(buffers)
    rows = ops.reshape(buffers, (num_experts, num_groups * expert_capacity, width))
    outputs = products.product("erm,emf->erf", rows, kernels)
    return ops.reshape(outputs, (num_experts, num_groups, expert_capacity, kernels.shape[-1]))


def _padded_places(num_experts, num_groups, expert_capacity):
    """Returns group and place of the slots of buffers: <int32>[1, group, 1, 1] and [expert, 1, capacity, 1]."""
    group = random.batch_positions(num_groups)[None, :, None, None]
    expert = partitioning.arange(num_experts)[:, None, None, None]
    slot = partitioning.arange(expert_capacity)[None, None, :, None]
    return group, slot * num_experts + expert
