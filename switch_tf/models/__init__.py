"""The Switch Transformer as a Keras model."""

from switch_tf.models.switch_transformer import SwitchTransformer

__all__ = ["SwitchTransformer"]
