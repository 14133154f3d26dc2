"""The experts: one feed-forward layer each, as stacked products."""

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.config import ACTIVATIONS, check_choice
from switch_tf.layers.dropout import Dropout
from switch_tf.layers.feed_forward import activate, add_input_kernels, kernel_initializer


@keras.saving.register_keras_serializable("switch_tf")
class ExpertFeedForward(keras.layers.Layer):
    """Applies expert `e` to the tokens waiting in buffer `e`.

    Args:
        num_experts: int. Number of experts.
        d_ff: int. Hidden width of each expert.
        activation: "relu" or "geglu".
        dropout_rate: float, on the hidden units, elementwise (expert dropout, section 4 of the paper).
        init_scale: float, times 1 / fan_in is each expert's initial variance.

    Call arguments:
        inputs: <compute dtype>[num_experts, num_groups, expert_capacity, d_model]. Empty slots are zeros.

    Returns: <compute dtype>, same shape as `inputs`. Empty slots stay zeros.
    """

    def __init__(self, num_experts, d_ff, activation="relu", dropout_rate=0.0, init_scale=0.1, **kwargs):
        super().__init__(**kwargs)
        check_choice("activation", activation, ACTIVATIONS)
        self.num_experts = num_experts
        self.d_ff = d_ff
        self.activation = activation
        self.dropout_rate = dropout_rate
        self.init_scale = init_scale
        self.dropout = Dropout(dropout_rate, batch_axis=1, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape):
        d_model = input_shape[-1]
        self.dropout.build()
        self.input_kernels = add_input_kernels(
            self, self.activation, (self.num_experts, d_model, self.d_ff), ("expert", "embed", "expert_mlp"),
            kernel_initializer(self.init_scale, d_model))
        self.wo = partitioning.add_weight(
            self, "wo", (self.num_experts, self.d_ff, d_model), ("expert", "expert_mlp", "embed"),
            kernel_initializer(self.init_scale, self.d_ff))

    def call(self, inputs, training=False):
        hidden = activate([ops.einsum("egcm,emf->egcf", inputs, wi) for wi in self.input_kernels])
        hidden = partitioning.constrain(hidden, ("expert", None, "capacity", "expert_mlp"))
        hidden = self.dropout(hidden, training=training)
        return ops.einsum("egcf,efm->egcm", hidden, self.wo)

    def get_config(self):
        return {**super().get_config(), "num_experts": self.num_experts, "d_ff": self.d_ff,
                "activation": self.activation, "dropout_rate": self.dropout_rate, "init_scale": self.init_scale}
