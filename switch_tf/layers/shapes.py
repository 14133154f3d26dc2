"""Output shapes that `summary` shows for layers that have not been called."""

import keras


class KeepsShape:
    """A layer whose outputs have the shape of its inputs; a base class before keras.layers.Layer."""

    def compute_output_shape(self, input_shape):
        """Returns the shape of the outputs, a tuple of int or None."""
        return tuple(input_shape)

    def compute_output_spec(self, *args, **kwargs):
        """Returns symbolic outputs, by tracing `call`: a shape alone would pass its checks by."""
        return keras.Operation.compute_output_spec(self, *args, **kwargs)
