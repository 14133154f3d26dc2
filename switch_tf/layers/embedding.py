"""The token embedding and the logits, tied to it or with weights of their own."""

import keras
from keras import ops

from switch_tf import partitioning


@keras.saving.register_keras_serializable("switch_tf")
class TokenEmbedding(keras.layers.Layer):
    """Looks token ids up in a table that starts with standard deviation 1, unscaled, as T5 does.

    Args:
        vocab_size, d_model: int.

    Call arguments:
        token_ids: <int32>[batch, length], each in [0, vocab_size).

    Returns: <compute dtype>[batch, length, d_model].
    """

    def __init__(self, vocab_size, d_model, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.d_model = d_model

    def build(self, input_shape=None):
        self.embedding = partitioning.add_weight(
            self, "embedding", (self.vocab_size, self.d_model), ("vocab", "embed"),
            keras.initializers.RandomNormal(stddev=1.0))

    def call(self, token_ids):
        embedded = _look_up(partitioning.use(self.embedding, self.compute_dtype), token_ids)
        return partitioning.constrain(embedded, ("batch", "length", "embed"))

    def attend(self, hidden):
        """Logits of the tied softmax: <compute dtype>[batch, length, d_model] -> <float32>[batch, length, vocab]."""
        table = partitioning.use(self.embedding, hidden.dtype)
        # Not an einsum: TensorFlow would transpose the whole table in the backward pass.
        logits = ops.matmul(hidden, ops.transpose(table))
        return ops.cast(partitioning.constrain(logits, ("batch", "length", "vocab")), "float32")

    def get_config(self):
        return {**super().get_config(), "vocab_size": self.vocab_size, "d_model": self.d_model}


def _look_up(table, token_ids):
    """Rows of `table`, with a dense gradient: sparse slices would make every optimizer slot a scatter.

    Where tokens lie on many devices the gradient is a product, because a sum over segments would bring all of them
    together; where the vocabulary does, looking up is one, too.
    """
    vocab_size = table.shape[0]

    def is_token(dtype):
        is_equal = ops.equal(ops.expand_dims(token_ids, -1), ops.arange(vocab_size, dtype=token_ids.dtype))
        return partitioning.constrain(ops.cast(is_equal, dtype), ("batch", "length", "vocab"))

    if partitioning.is_split("vocab"):
        return ops.matmul(is_token(table.dtype), table)

    @ops.custom_gradient
    def look_up(table):
        def gradient(*args, upstream=None):
            (upstream,) = args if upstream is None else (upstream,)
            if partitioning.is_partitioned():
                return ops.einsum("blv,blm->vm", is_token(upstream.dtype), upstream)
            rows = ops.cast(ops.reshape(upstream, (-1, upstream.shape[-1])), "float32")
            dense = ops.segment_sum(rows, ops.reshape(token_ids, (-1,)), num_segments=vocab_size)
            return ops.cast(dense, table.dtype)

        return ops.take(table, token_ids, axis=0), gradient

    return look_up(table)


@keras.saving.register_keras_serializable("switch_tf")
class LogitsDense(keras.layers.Layer):
    """Logits with weights of their own (T5 1.1): <compute dtype>[batch, length, d_model] -> <float32>[.., vocab]."""

    def __init__(self, vocab_size, init_scale=1.0, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.init_scale = init_scale

    def build(self, input_shape):
        d_model = input_shape[-1]
        self.kernel = partitioning.add_weight(
            self, "kernel", (d_model, self.vocab_size), ("embed", "vocab"),
            keras.initializers.TruncatedNormal(stddev=(self.init_scale / d_model) ** 0.5))

    def call(self, inputs):
        logits = ops.matmul(inputs, partitioning.use(self.kernel, inputs.dtype))
        return ops.cast(partitioning.constrain(logits, ("batch", "length", "vocab")), "float32")

    def get_config(self):
        return {**super().get_config(), "vocab_size": self.vocab_size, "init_scale": self.init_scale}
