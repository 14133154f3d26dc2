"""Token embedding, and logits that share its weights or have their own."""

from typing import Any

import keras

from switch_tf import checks, partitioning
from switch_tf.layers.feed_forward import kernel_initializer
from switch_tf.layers.shapes import KeepsShape
from switch_tf.ops import dtypes, forms, indexing, products
from switch_tf.partitioning.tensors import Shape, Tensor


@keras.saving.register_keras_serializable("switch_tf")
class TokenEmbedding(KeepsShape, keras.layers.Layer):
    """Embedding table with initial standard deviation 1 and unscaled outputs, as in T5.

    Args:
        vocab_size: int. Number of tokens.
        d_model: int. Width of an embedding.

    Call arguments:
        token_ids: <int32>[batch, length], each in [0, vocab_size).

    Returns: <compute dtype>[batch, length, d_model].
    """

    def __init__(self, vocab_size: int, d_model: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.vocab_size = checks.integer("vocab_size", vocab_size, at_least=1)
        self.d_model = checks.integer("d_model", d_model, at_least=1)

    def build(self, input_shape: Shape | None = None) -> None:
        self.embedding = partitioning.add_weight(
            self, "embedding", (self.vocab_size, self.d_model), ("vocab", "embed"),
            keras.initializers.RandomNormal(stddev=1.0))

    def call(self, token_ids: Tensor) -> Tensor:
        token_ids = indexing.as_ids(token_ids)
        checks.tensor("token_ids", token_ids, "int", (None, None))
        checks.indices("token_ids", forms.known_values(token_ids), self.vocab_size)
        embedded = indexing.look_up(self.embedding, token_ids, self.compute_dtype)
        return partitioning.constrain(embedded, ("batch", "length", "embed"))

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        return (*input_shape[:2], self.d_model)

    def attend(self, hidden: Tensor) -> Tensor:
        """Returns tied logits: <compute dtype>[batch, length, d_model] -> <float32>[batch, length, vocab]."""
        return _logits(hidden, self.embedding, is_table=True)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "vocab_size": self.vocab_size, "d_model": self.d_model}


def _logits(hidden, variable, is_table):
    """Multiplies by the rows of a table [vocab, d_model] or the columns of a kernel [d_model, vocab]."""
    # In bfloat16, logits near 32 would be multiples of 1/4, and several would tie for the largest.
    logits = products.product("blm,vm->blv" if is_table else "blm,mv->blv", hidden, variable,
                              dtypes.wide_dtype(hidden.dtype))
    return partitioning.constrain(logits, ("batch", "length", "vocab"))


@keras.saving.register_keras_serializable("switch_tf")
class LogitsDense(KeepsShape, keras.layers.Layer):
    """Projection to logits with its own weights, as in T5 1.1.

    Args:
        vocab_size: int. Number of tokens.
        init_scale: float. The initial variance is init_scale / d_model.

    Call arguments:
        inputs: <compute dtype>[batch, length, d_model].

    Returns: <float32>[batch, length, vocab_size].
    """

    def __init__(self, vocab_size: int, init_scale: float = 1.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.vocab_size = checks.integer("vocab_size", vocab_size, at_least=1)
        self.init_scale = checks.number("init_scale", init_scale, "above 0")

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape)
        self.kernel = partitioning.add_weight(
            self, "kernel", (d_model, self.vocab_size), ("embed", "vocab"),
            kernel_initializer(self.init_scale, d_model))

    def call(self, inputs: Tensor) -> Tensor:
        checks.tensor("inputs", inputs, "float", (None, None, self.kernel.shape[0]))
        return _logits(inputs, self.kernel, is_table=False)

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.vocab_size)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "vocab_size": self.vocab_size, "init_scale": self.init_scale}
