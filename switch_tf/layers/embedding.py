"""The token embedding and the logits, tied to it or with weights of their own."""

import keras
from keras import ops

from switch_tf import checks, partitioning


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
        self.vocab_size = checks.integer("vocab_size", vocab_size, at_least=1)
        self.d_model = checks.integer("d_model", d_model, at_least=1)

    def build(self, input_shape=None):
        self.embedding = partitioning.add_weight(
            self, "embedding", (self.vocab_size, self.d_model), ("vocab", "embed"),
            keras.initializers.RandomNormal(stddev=1.0))

    def call(self, token_ids):
        embedded = _look_up(self.embedding, token_ids, self.compute_dtype)
        return partitioning.constrain(embedded, ("batch", "length", "embed"))

    def attend(self, hidden):
        """Logits of the tied softmax: <compute dtype>[batch, length, d_model] -> <float32>[batch, length, vocab]."""
        return _logits(hidden, self.embedding, is_table=True)

    def get_config(self):
        return {**super().get_config(), "vocab_size": self.vocab_size, "d_model": self.d_model}


def _look_up(variable, token_ids, dtype):
    """Rows of a table, with a dense gradient: sparse slices would make every optimizer slot a scatter.

    Where tokens lie on many devices the gradient is a product, because a sum over segments would bring all of them
    together; where the vocabulary does, looking up is one, too.
    """
    vocab_size = variable.shape[0]

    def is_token(dtype):
        is_equal = ops.equal(ops.expand_dims(ops.cast(token_ids, "int32"), -1), partitioning.arange(vocab_size))
        return partitioning.constrain(ops.cast(is_equal, dtype), ("batch", "length", "vocab"))

    if partitioning.is_split("vocab"):
        return partitioning.product("blv,vm->blm", is_token(dtype), variable)

    @ops.custom_gradient
    def look_up(table):
        def gradient(*args, upstream=None):
            (upstream,) = args if upstream is None else (upstream,)
            upstream = ops.cast(upstream, "float32")
            if partitioning.is_partitioned():
                dense = ops.einsum("blv,blm->vm", is_token("float32"), upstream)
                dense = partitioning.scatter(dense, variable.logical_axes)
            else:
                dense = ops.segment_sum(ops.reshape(upstream, (-1, upstream.shape[-1])),
                                        ops.reshape(token_ids, (-1,)), num_segments=vocab_size)
            return ops.cast(dense, table.dtype)

        return ops.take(partitioning.gather(ops.cast(table, dtype), variable.logical_axes), token_ids, axis=0), gradient

    return look_up(ops.cast(variable, variable.dtype))


def _logits(hidden, variable, is_table):
    """Products with every row of a table [vocab, d_model], or with every column of a kernel [d_model, vocab]."""
    logits = partitioning.product("blm,vm->blv" if is_table else "blm,mv->blv", hidden, variable)
    return ops.cast(partitioning.constrain(logits, ("batch", "length", "vocab")), "float32")


@keras.saving.register_keras_serializable("switch_tf")
class LogitsDense(keras.layers.Layer):
    """Logits with weights of their own (T5 1.1): <compute dtype>[batch, length, d_model] -> <float32>[.., vocab]."""

    def __init__(self, vocab_size, init_scale=1.0, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = checks.integer("vocab_size", vocab_size, at_least=1)
        self.init_scale = checks.number("init_scale", init_scale, "above 0")

    def build(self, input_shape):
        d_model = input_shape[-1]
        self.kernel = partitioning.add_weight(
            self, "kernel", (d_model, self.vocab_size), ("embed", "vocab"),
            keras.initializers.TruncatedNormal(stddev=(self.init_scale / d_model) ** 0.5))

    def call(self, inputs):
        return _logits(inputs, self.kernel, is_table=False)

    def get_config(self):
        return {**super().get_config(), "vocab_size": self.vocab_size, "init_scale": self.init_scale}
