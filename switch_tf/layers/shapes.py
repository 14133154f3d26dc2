"""Output shapes for layers that have not been called, as `summary` shows them."""

import keras


class KeepsShape:
    """Base class of layers that keep their input's shape. Precedes keras.layers.Layer."""

    def compute_output_shape(self, input_shape):
        """Returns the shape of the outputs, a tuple of int or None."""
        return tuple(input_shape)

    def compute_output_spec(self, *args, **kwargs):
        """Returns symbolic outputs by tracing `call`, because inferring a shape alone would skip its checks."""
        return keras.Operation.compute_output_spec(self, *args, **kwargs)
