"""T5's Adafactor (Shazeer and Stern, arXiv 1804.04235), factored by logical axes and per expert."""

from typing import Any

import keras
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.ops import dtypes
from switch_tf.optim.factoring import factor_dimensions, slot_dimensions
from switch_tf.partitioning.tensors import Tensor


@keras.saving.register_keras_serializable("switch_tf")
class Adafactor(keras.optimizers.Optimizer):
    """Adafactor, with gradients scaled by a factored second moment and updates by the weight's size.

    Keras' Adafactor also keeps a full-size slot. This one keeps rows and columns, and factors, clips and scales
    each expert of a stacked weight separately (T5X).

    Args:
        learning_rate: 0 or above, or a schedule. A relative step size if `scales_by_parameter`.
        decay_exponent: 0 or above. beta2 of step t (from 0) is 1 - (t + 1)^-decay_exponent.
        epsilon: Above 0. Added to squared gradients.
        clip_threshold: Above 0. Updates with a larger root mean square are scaled down to it.
        scales_by_parameter: Whether updates are multiplied by max(minimum_scale, root mean square of the weight).
        minimum_scale: 0 or above.
    """

    def __init__(self, learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1e-3,
                 decay_exponent: float = 0.8, epsilon: float = 1e-30, clip_threshold: float = 1.0,
                 scales_by_parameter: bool = True, minimum_scale: float = 1e-3, name: str = "adafactor", **kwargs: Any):
        if not callable(learning_rate):
            learning_rate = float(checks.number("learning_rate", learning_rate, "0 or above"))
        with checks.arguments_of_keras():
            super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.decay_exponent = checks.number("decay_exponent", decay_exponent, "0 or above")
        self.epsilon = checks.number("epsilon", epsilon, "above 0")
        self.clip_threshold = checks.number("clip_threshold", clip_threshold, "above 0")
        self.scales_by_parameter = checks.flag("scales_by_parameter", scales_by_parameter)
        self.minimum_scale = checks.number("minimum_scale", minimum_scale, "0 or above")

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self._factors = []
        self._slots = []
        for variable in variables:
            axes, dtype = partitioning.axes_of(variable), dtypes.wide_dtype(variable.dtype)
            factors = factor_dimensions(variable.shape, axes)
            slots = {}
            for name, dims in slot_dimensions(variable.shape, factors).items():
                slots[name] = partitioning.with_axes(
                    [axes[dim] for dim in dims], self.add_variable, [variable.shape[dim] for dim in dims],
                    initializer="zeros", dtype=dtype, name=f"{variable.path}_{name}".replace("/", "_"))
            self._factors.append(factors)
            self._slots.append(slots)

    def slots_of(self, variable: keras.Variable) -> dict[str, keras.Variable]:
        """Returns the slots of a weight: `v_row` and `v_col`, or `v` (`factoring.slot_dimensions`)."""
        return dict(self._slots[self._get_variable_index(variable)])

    def update_step(self, gradient: Tensor, variable: keras.Variable, learning_rate: Tensor) -> None:
        index = self._get_variable_index(variable)
        factors, slots = self._factors[index], self._slots[index]
        weight = dtypes.widen(variable)
        gradient = ops.cast(gradient, weight.dtype)
        beta2 = 1 - (ops.cast(self.iterations, weight.dtype) + 1) ** -self.decay_exponent
        # Scalars and small tensors first: every pass over a weight takes time.
        squared = ops.square(gradient)
        if factors is None:
            second_moment = self._average(slots["v"], squared + self.epsilon, beta2)
            update = gradient * ops.rsqrt(second_moment)
        else:
            row_mean = self._average(slots["v_row"], ops.mean(squared, axis=factors.columns) + self.epsilon, beta2)
            column_mean = self._average(slots["v_col"], ops.mean(squared, axis=factors.rows) + self.epsilon, beta2)
            # To broadcast against the gradient.
            row_mean = ops.expand_dims(row_mean, factors.columns)
            column_mean = ops.expand_dims(column_mean, factors.rows)
            row_mean = row_mean / ops.mean(row_mean, axis=factors.rows, keepdims=True)
            update = gradient * ops.rsqrt(row_mean) * ops.rsqrt(column_mean)

        stacked = factors.stacked if factors else ()
        within = tuple(dim for dim in range(len(variable.shape)) if dim not in stacked)
        step_size = ops.cast(learning_rate, weight.dtype)
        if self.scales_by_parameter:
            step_size = step_size * ops.maximum(self.minimum_scale, _root_mean_square(weight, within))
        step_size = step_size / ops.maximum(1.0, _root_mean_square(update, within) / self.clip_threshold)
        self.assign(variable, ops.cast(weight - step_size * update, variable.dtype))

    def _average(self, slot, value, beta2):
        average = beta2 * ops.cast(slot, value.dtype) + (1 - beta2) * value
        self.assign(slot, average)
        return average

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "decay_exponent": self.decay_exponent, "epsilon": self.epsilon,
                "clip_threshold": self.clip_threshold, "scales_by_parameter": self.scales_by_parameter,
                "minimum_scale": self.minimum_scale}


def _root_mean_square(x, axes):
    return ops.sqrt(ops.mean(ops.square(x), axis=axes, keepdims=True))
