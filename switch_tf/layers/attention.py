"""T5's multi-head attention: no bias terms, no 1/sqrt(d_kv) at run time, softmax in float32."""

from typing import Any

import keras
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.layers import masks
from switch_tf.layers.dropout import Dropout
from switch_tf.layers.shapes import KeepsShape
from switch_tf.ops import products
from switch_tf.ops.dot_product_attention import PositionBias, dot_product_attention, probabilities
from switch_tf.partitioning.tensors import Shape, Tensor

# Logical axes of the decoding cache.
KEY_CACHE_AXES = ("batch", "heads", "kv", "length")
VALUE_CACHE_AXES = ("batch", "heads", "length", "kv")


def add_output_kernel(layer: keras.layers.Layer, d_model: int) -> keras.Variable:
    """Creates and returns `out`, the kernel from the heads of `layer` back to d_model."""
    return partitioning.add_weight(
        layer, "out", (layer.num_heads, layer.d_kv, d_model), ("heads", "kv", "embed"),
        _normal(layer.init_scale, layer.num_heads * layer.d_kv))


def _normal(init_scale, fan_in):
    return keras.initializers.RandomNormal(stddev=(init_scale / fan_in) ** 0.5)


def check_scores(num_heads: int, inputs: Tensor, inputs_kv: Tensor, attention_mask: Tensor | None,
                 position_bias: PositionBias | None) -> None:
    """Checks the attention mask and position bias against inputs <any>[batch, length, d_model].

    Raises:
        Refusal: a mask or bias with the wrong dtype or shape.
    """
    (batch, query_length), key_length = inputs.shape[:2], inputs_kv.shape[1]
    if attention_mask is not None:
        checks.tensor("attention_mask", attention_mask, "bool", (batch, 1, query_length, key_length), True)
    if position_bias is not None and not isinstance(position_bias, tuple):
        checks.tensor("position_bias", position_bias, "float", (1, num_heads, query_length, key_length), True)


def as_cached_keys(x: Tensor) -> Tensor:
    """Transposes keys for the cache: [batch, key, heads, d_kv] -> [batch, heads, d_kv, key].

    The product with the query needs this order. Without it every decoding step would transpose the whole cache: with
    256 keys that took longer than the rest of the step, and swapping only the last two axes still took a tenth of it.
    """
    return ops.transpose(x, (0, 2, 3, 1))


def as_cached_values(x: Tensor) -> Tensor:
    """Transposes values for the cache: [batch, key, heads, d_kv] -> [batch, heads, key, d_kv]."""
    return ops.transpose(x, (0, 2, 1, 3))


def drop_keys(dropout: Dropout, value: Tensor, training: bool) -> Tensor:
    """Applies attention dropout to values, [batch, key, heads, d_kv], by dropping whole keys of a head.

    Dropping a key's value for all queries equals T5's dropout of probabilities, which shares one mask between queries.
    """
    if not training or not dropout.rate:
        return value
    batch, length, heads, _ = ops.shape(value)
    mask = dropout(ops.ones((batch, heads, 1, length), value.dtype), training=True)
    return value * ops.transpose(mask, (0, 3, 1, 2))


def attention_outputs(query: Tensor, key: Tensor, value: Tensor, out: keras.Variable, attention_mask: Tensor | None,
                      position_bias: PositionBias | None, keys: str = "bkhd") -> Tensor:
    """Attends from projected queries to keys, mixes values, and projects the heads back to d_model.

    Args:
        query: <any float>[batch, query, heads, d_kv].
        key: <any float>[batch, key, heads, d_kv].
        value: <compute dtype>[batch, key, heads, d_kv].
        out: variable from `add_output_kernel`.
        attention_mask, position_bias: see `MultiHeadAttention`.
        keys: Axes of `key`, in order: "bkhd", or while decoding "bhdk" (`as_cached_keys`) or "bhkd"
            (`as_cached_values`). Cached values always have the axes "bhkd".

    Returns:
        <compute dtype>[batch, query, d_model]
    """
    if keys == "bkhd":
        mixed = dot_product_attention(query, key, value, attention_mask, position_bias, out)
    else:
        probs = probabilities(query, key, attention_mask, position_bias, value.dtype, keys)
        mixed = ops.einsum("bhqk,bhkd->bqhd", probs, value)
    mixed = partitioning.constrain(mixed, ("batch", "length", "heads", "kv"))
    outputs = products.product("bqhd,hdm->bqm", mixed, out)
    return partitioning.constrain(outputs, ("batch", "length", "embed"))


@keras.saving.register_keras_serializable("switch_tf")
class MultiHeadAttention(KeepsShape, keras.layers.Layer):
    """Multi-head attention from `inputs` to themselves or to `inputs_kv`.

    The usual 1/sqrt(d_kv) is folded into the initial query kernel: N(0, init_scale / (d_model d_kv)).

    Args:
        num_heads: int. Number of heads.
        d_kv: int. Width of a head.
        dropout_rate: float in [0, 1). Dropout of the attention probabilities, with one mask for all queries.
        init_scale: float. Factor of every initial variance.

    Call arguments:
        inputs: <compute dtype>[batch, query, d_model].
        inputs_kv: <compute dtype>[batch, key, d_model], or None for self-attention.
        attention_mask: <bool>[batch, 1, query or 1, key] or None. True where a query may attend to a key.
        position_bias: <float32>[1, heads, query, key], or its blocks by `cut`, or None. Added to the scores.
        mask, inputs_mask, inputs_kv_mask: <bool>[batch, length], set by Keras from the masks of its tensors. Masked
            keys are not attended to.

    Returns: <compute dtype>[batch, query, d_model].
    """

    def __init__(self, num_heads: int, d_kv: int, dropout_rate: float = 0.0, init_scale: float = 1.0, **kwargs: Any):
        # Keras' autocast would round the position bias to bfloat16; the kernels are cast below instead.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.num_heads = checks.integer("num_heads", num_heads, at_least=1)
        self.d_kv = checks.integer("d_kv", d_kv, at_least=1)
        self.dropout_rate = checks.number("dropout_rate", dropout_rate, "in [0, 1)")
        self.init_scale = checks.number("init_scale", init_scale, "above 0")
        self.dropout = Dropout(dropout_rate, broadcast_axis=2, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape)
        self.dropout.build()
        for name, fan_in in (("query", d_model * self.d_kv), ("key", d_model), ("value", d_model)):
            setattr(self, name, partitioning.add_weight(
                self, name, (d_model, self.num_heads, self.d_kv), ("embed", "heads", "kv"),
                _normal(self.init_scale, fan_in)))
        self.out = add_output_kernel(self, d_model)

    def call(self, inputs: Tensor, inputs_kv: Tensor | None = None, attention_mask: Tensor | None = None,
             position_bias: PositionBias | None = None, training: bool = False, mask: Tensor | None = None,
             inputs_mask: Tensor | None = None, inputs_kv_mask: Tensor | None = None) -> Tensor:
        if inputs_kv is None:
            inputs_kv, inputs_kv_mask = inputs, masks.padding_mask(inputs, mask, inputs_mask)
        checks.tensor("inputs", inputs, "float", (None, None, self.query.shape[0]))
        checks.tensor("inputs_kv", inputs_kv, "float", (inputs.shape[0], None, self.key.shape[0]))
        check_scores(self.num_heads, inputs, inputs_kv, attention_mask, position_bias)
        attention_mask = masks.without_keys(attention_mask, masks.padding_mask(inputs_kv, inputs_kv_mask))
        training = checks.flag("training", training)
        query, key, value = (self._project(x, kernel) for x, kernel in (
            (inputs, self.query), (inputs_kv, self.key), (inputs_kv, self.value)))
        value = drop_keys(self.dropout, value, training)
        return attention_outputs(query, key, value, self.out, attention_mask, position_bias)

    @property
    def cache_spec(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """Logical axes and dtype of each cached tensor."""
        return (KEY_CACHE_AXES, self.compute_dtype), (VALUE_CACHE_AXES, self.compute_dtype)

    def compute_cache(self, inputs_kv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of <compute dtype>[batch, key, d_model] in the layout of the cache."""
        key, value = self._project(inputs_kv, self.key), self._project(inputs_kv, self.value)
        return as_cached_keys(key), as_cached_values(value)

    def attend(self, inputs: Tensor, cache: tuple[Tensor, Tensor], attention_mask: Tensor | None = None,
               position_bias: Tensor | None = None) -> Tensor:
        """Attends to cached keys and values while decoding. Arguments are those of the layer and are not checked."""
        query = self._project(inputs, self.query)
        key, value = cache
        return attention_outputs(query, key, value, self.out, attention_mask, position_bias, "bhdk")

    def _project(self, x, kernel):
        # [batch, length, d_model] -> [batch, length, heads, d_kv]
        projected = products.product("blm,mhd->blhd", x, kernel)
        return partitioning.constrain(projected, ("batch", "length", "heads", "kv"))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_heads": self.num_heads, "d_kv": self.d_kv,
                "dropout_rate": self.dropout_rate, "init_scale": self.init_scale}
