"""T5's layer norm: an RMS norm without mean or bias."""

from typing import Any

import keras
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.layers.shapes import KeepsShape
from switch_tf.ops import dtypes
from switch_tf.partitioning.tensors import Shape, Tensor


@keras.saving.register_keras_serializable("switch_tf")
class RMSNorm(KeepsShape, keras.layers.Layer):
    """RMS norm over the last dimension with a learned scale, in float32.

    Args:
        epsilon: float. Added to the mean square.

    Call arguments:
        inputs: <compute dtype>[..., d_model].

    Returns: <compute dtype>, same shape as `inputs`.
    """

    def __init__(self, epsilon: float = 1e-6, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.epsilon = checks.number("epsilon", epsilon, "above 0")

    def build(self, input_shape: Shape) -> None:
        self.scale = partitioning.add_weight(self, "scale", (checks.width(input_shape, rank=None),), ("embed",), "ones")

    def call(self, inputs: Tensor) -> Tensor:
        checks.tensor("inputs", inputs, "float", (*[None] * (len(inputs.shape) - 1), self.scale.shape[0]))
        x = dtypes.widen(inputs)
        inverse_rms = ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + self.epsilon)
        return ops.cast(x * inverse_rms * partitioning.use(self.scale, x.dtype), inputs.dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "epsilon": self.epsilon}
