"""Output shapes for layers that have not been called, as `summary` shows them."""

from typing import Any

import keras

from switch_tf.partitioning.tensors import Shape


class KeepsShape:
    """Base class of layers that keep their input's shape. Precedes keras.layers.Layer."""

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        """Returns the shape of the outputs, a tuple of int or None."""
        return tuple(input_shape)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Returns symbolic outputs by tracing `call`, because inferring a shape alone would skip its checks."""
        return keras.Operation.compute_output_spec(self, *args, **kwargs)
