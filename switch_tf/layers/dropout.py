"""Dropout with masks that do not depend on layout, microbatches or restarts."""

from typing import Any

import keras
from keras import ops

from switch_tf import checks
from switch_tf.layers.shapes import KeepsShape
from switch_tf.ops import dtypes, random
from switch_tf.partitioning.tensors import Shape, Tensor
from switch_tf.refusals import Refusal


def mask(draws: Tensor, rate: float, dtype: str) -> Tensor:
    """Returns the factors of dropout, 0 or 1 / (1 - rate), in the wide dtype of `dtype`.

    Args:
        draws: <float>[...], uniform in [0, 1).
        rate: float in [0, 1).
        dtype: str. The dtype of the values to multiply.
    """
    return ops.cast(draws >= rate, dtypes.wide_dtype(dtype)) * (1 / (1 - rate))


def masked(x: Tensor, factors: Tensor) -> Tensor:
    """Multiplies `x`, <any float>[...], by factors from `mask` and rounds once, to the dtype of `x`.

    A bfloat16 factor for rate 0.1 would make every output 0.16 % too small.
    """
    return ops.cast(dtypes.widen(x) * factors, x.dtype)


@keras.saving.register_keras_serializable("switch_tf")
class Dropout(KeepsShape, keras.layers.Layer):
    """Zeroes elements with probability `rate` in training and scales the others by 1 / (1 - rate).

    Args:
        rate: float in [0, 1).
        broadcast_axis: int, 0 or above, or None. Positions along this axis share one mask. T5 drops a feature for the
            whole length of a sequence.
    """

    def __init__(self, rate: float, broadcast_axis: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.rate = checks.number("A dropout rate", rate, "in [0, 1)")
        self.broadcast_axis = checks.optional("broadcast_axis", broadcast_axis, checks.integer, 0)
        self.supports_masking = True

    def build(self, input_shape: Shape | None = None) -> None:
        """Creates no weights. Building sets the layer's path, which seeds its random stream."""

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        checks.tensor("inputs", inputs, "float", [None] * len(inputs.shape))
        if not checks.flag("training", training) or not self.rate:
            return inputs
        shape = list(ops.shape(inputs))
        if self.broadcast_axis is not None:
            if self.broadcast_axis >= len(shape):
                raise Refusal(f"broadcast_axis must be below {len(shape)}, the number of dimensions of the "
                              f"inputs, not {self.broadcast_axis}.")
            shape[self.broadcast_axis] = 1
        seed = random.layer_seed(self, "dropout")
        return masked(inputs, mask(random.uniform(seed, tuple(shape)), self.rate, inputs.dtype))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rate": self.rate, "broadcast_axis": self.broadcast_axis}
