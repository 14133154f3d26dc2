"""Dropout whose masks do not depend on layout, microbatches or the moment of a restart."""

import keras
from keras import ops

from switch_tf import checks
from switch_tf.layers.shapes import KeepsShape
from switch_tf.ops import dtypes, random
from switch_tf.refusals import Refusal


def mask(draws, rate, dtype):
    """0 or 1 / (1 - rate) of uniform numbers in [0, 1), for `masked` values of a dtype: <wide dtype>, their shape."""
    return ops.cast(draws >= rate, dtypes.wide_dtype(dtype)) * (1 / (1 - rate))


def masked(x, factors):
    """<any float>x times factors of `mask`, rounded to the dtype of `x` once.

    In bfloat16 the factor of rate 0.1 would be 0.16 % too small, and with it every output.
    """
    return ops.cast(dtypes.widen(x) * factors, x.dtype)


@keras.saving.register_keras_serializable("switch_tf")
class Dropout(KeepsShape, keras.layers.Layer):
    """Zeroes elements with probability `rate` in training and scales the others by 1 / (1 - rate).

    Args:
        rate: float in [0, 1).
        broadcast_axis: int, counted from 0, or None. Positions along this axis share one mask: T5 drops a feature for
            the whole length of a sequence.
    """

    def __init__(self, rate, broadcast_axis=None, **kwargs):
        super().__init__(**kwargs)
        self.rate = checks.number("A dropout rate", rate, "in [0, 1)")
        self.broadcast_axis = checks.optional("broadcast_axis", broadcast_axis, checks.integer, 0)
        self.supports_masking = True

    def build(self, input_shape=None):
        """Creates nothing; being built is what gives the layer its path, and the path its random stream."""

    def call(self, inputs, training=False):
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

    def get_config(self):
        return {**super().get_config(), "rate": self.rate, "broadcast_axis": self.broadcast_axis}
