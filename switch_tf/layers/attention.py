"""T5's attention, dense or with experts as projections, and relative position biases."""

from typing import Any

import keras
import numpy as np
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.layers import masks
from switch_tf.layers.basic import Dropout, KeepsShape, Layer, serializable
from switch_tf.layers.moe import Routed, SwitchFeedForward
from switch_tf.ops import dtypes, products, random
from switch_tf.ops.dot_product_attention import PositionBias, dot_product_attention, probabilities
from switch_tf.partitioning.tensors import Mask, Shape, Tensor
from switch_tf.refusals import Refusal

VALUE_CACHE_AXES = ("batch", "heads", "length", "kv")


class _Attention(KeepsShape):
    # `cache_axes` has the axes of each cached tensor in the order of its products. With 256 keys, transposing took over
    # half of each step, or a tenth for only the last two axes of the keys.
    _cached_keys = "bhkd"

    def __init__(self, num_heads: int, d_kv: int, dropout_rate: float = 0.0, init_scale: float = 1.0, **kwargs: Any):
        # Keras' autocast would round the position bias to bfloat16.
        super().__init__(autocast=False, **kwargs)
        self.cache_dtype = self.compute_dtype
        self._keep(num_heads=num_heads, d_kv=d_kv, dropout_rate=dropout_rate, init_scale=init_scale)
        self.dropout = Dropout(dropout_rate, broadcast_axis=2, dtype=self.dtype_policy, name="dropout")

    def _add_kernel(self, name, shape, axes, fan_in):
        return partitioning.add_weight(
            self, name, shape, axes, random.RandomByPosition("normal", (self.init_scale / fan_in) ** 0.5))

    def build(self, input_shape):
        d_model = checks.width(input_shape)
        self.dropout.build()
        self._build_projections(input_shape)
        self.out = self._add_kernel("out", (self.num_heads, self.d_kv, d_model), ("heads", "kv", "embed"),
                                    self.num_heads * self.d_kv)

    def _check(self, inputs, inputs_kv, attention_mask, position_bias, training, return_router_stats=False):
        checks.flag("training", training)
        checks.flag("return_router_stats", return_router_stats)
        checks.tensor("inputs", inputs, "float", (None, None, self.out.shape[-1]))
        checks.tensor("inputs_kv", inputs_kv, "float", (inputs.shape[0], None, self.out.shape[-1]))
        (batch, query_length), key_length = inputs.shape[:2], inputs_kv.shape[1]
        if attention_mask is not None:
            checks.tensor("attention_mask", attention_mask, "bool", (batch, 1, query_length, key_length), True)
        if position_bias is not None and not isinstance(position_bias, tuple):
            checks.tensor("position_bias", position_bias, "float", (1, self.num_heads, query_length, key_length), True)

    def _drop_keys(self, value, training):
        """Drops keys of a head, as T5's dropout of probabilities with one mask for all queries."""
        if not training or not self.dropout.rate:
            return value
        batch, length, heads, _ = ops.shape(value)
        mask = self.dropout(ops.ones((batch, heads, 1, length), value.dtype), training=True)
        return value * ops.transpose(mask, (0, 3, 1, 2))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask,
            position_bias: PositionBias | None, keys: str = "bkhd") -> Tensor:
        """Attends, mixes values and projects them back to d_model.

        Args:
            query, key, value: <float>[batch, length, heads, d_kv].
            keys: Axes of `key`: "bkhd", or for cached keys "bhdk" or "bhkd". Cached values have "bhkd".
        """
        if keys == "bkhd":
            mixed = dot_product_attention(query, key, value, attention_mask, position_bias, self.out)
        else:
            probs = probabilities(query, key, attention_mask, position_bias, value.dtype, keys)
            mixed = ops.einsum("bhqk,bhkd->bqhd", probs, value)
        mixed = partitioning.constrain(mixed, ("batch", "length", "heads", "kv"))
        outputs = products.product("bqhd,hdm->bqm", mixed, self.out)
        return partitioning.constrain(outputs, ("batch", "length", "embed"))

    def attend(self, inputs: Tensor, cache: tuple[Tensor, ...], attention_mask: Mask = None,
               position_bias: Tensor | None = None, **of_tokens: Any) -> Tensor:
        """Attends to the cache while decoding. Arguments are as for `call`, unchecked."""
        query, _ = self._queries(inputs, **of_tokens)
        return self.mix(query, cache[0], ops.cast(cache[-1], inputs.dtype), attention_mask, position_bias,
                        self._cached_keys)


@serializable
class MultiHeadAttention(_Attention):
    """Multi-head attention from `inputs` to themselves or to `inputs_kv`.

    The initial query kernel, N(0, init_scale / (d_model d_kv)), contains the usual 1/sqrt(d_kv).

    Args:
        d_kv: Width of a head.
        dropout_rate: In [0, 1). Drops attention probabilities, with one mask for all queries.
        init_scale: Factor of every initial variance.

    Call arguments:
        inputs: <compute dtype>[batch, query, d_model].
        inputs_kv: <compute dtype>[batch, key, d_model]. None for self-attention.
        attention_mask: <bool>[batch, 1, query or 1, key], True where a query may attend to a key.
        position_bias: <float32>[1, heads, query, key], or its blocks by `cut`. Added to the scores.
        mask, inputs_mask, inputs_kv_mask: Passed by Keras. Masked keys get no attention.

    Returns: <compute dtype>[batch, query, d_model].
    """

    cache_axes = ("batch", "heads", "kv", "length"), VALUE_CACHE_AXES
    _cached_keys = "bhdk"

    def _build_projections(self, input_shape):
        d_model = input_shape[-1]
        for name, fan_in in (("query", d_model * self.d_kv), ("key", d_model), ("value", d_model)):
            setattr(self, name, self._add_kernel(
                name, (d_model, self.num_heads, self.d_kv), ("embed", "heads", "kv"), fan_in))

    def call(self, inputs: Tensor, inputs_kv: Tensor | None = None, attention_mask: Mask = None,
             position_bias: PositionBias | None = None, training: bool = False, mask: Mask = None,
             inputs_mask: Mask = None, inputs_kv_mask: Mask = None) -> Tensor:
        if inputs_kv is None:
            inputs_kv, inputs_kv_mask = inputs, masks.padding_mask(inputs, mask, inputs_mask)
        self._check(inputs, inputs_kv, attention_mask, position_bias, training)
        attention_mask = masks.mask_keys(attention_mask, masks.padding_mask(inputs_kv, inputs_kv_mask))
        query, key, value = (self._project(x, kernel) for x, kernel in (
            (inputs, self.query), (inputs_kv, self.key), (inputs_kv, self.value)))
        return self.mix(query, key, self._drop_keys(value, training), attention_mask, position_bias)

    def compute_cache(self, inputs_kv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of <compute dtype>[batch, key, d_model] for the cache."""
        key, value = self._project(inputs_kv, self.key), self._project(inputs_kv, self.value)
        return ops.transpose(key, (0, 2, 3, 1)), ops.transpose(value, (0, 2, 1, 3))

    def _queries(self, inputs):
        return self._project(inputs, self.query), None

    def _project(self, x, kernel):
        projected = products.product("blm,mhd->blhd", x, kernel)
        return partitioning.constrain(projected, ("batch", "length", "heads", "kv"))


@serializable
class SwitchSelfAttention(Routed, _Attention):
    """Self-attention with experts as input projections (arXiv 2101.03961, appendix A, figure 10).

    One Switch layer computes the queries. A second, with its own router, computes one vector per token, both key and
    value. A dropped query attends by position bias only. A dropped key receives attention, but adds zero.

    Queries are multiplied by d_kv^-0.5 (Mesh TensorFlow), unlike in `MultiHeadAttention`. With float32 experts in a
    bfloat16 model, scores come from float32 queries and keys.

    Args:
        query_experts, key_value_experts: Layers with output_dim = num_heads * d_kv.
        d_kv, dropout_rate: See `MultiHeadAttention`.
        init_scale: Factor of the output projection's initial variance.

    Call arguments:
        inputs: <compute dtype>[batch, length, d_model].
        padding_mask: <bool>[batch, length], True at tokens to route. Defaults to Keras' mask. Masks no keys.
        token_ids, return_router_stats, mask, inputs_mask: See `SwitchFeedForward`.
        attention_mask, position_bias: See `MultiHeadAttention`.

    Returns: <compute dtype>[batch, length, d_model].
    """

    cache_axes = (VALUE_CACHE_AXES,)

    def __init__(self, query_experts: SwitchFeedForward, key_value_experts: SwitchFeedForward, num_heads: int,
                 d_kv: int, dropout_rate: float = 0.0, init_scale: float = 1.0, **kwargs: Any):
        super().__init__(num_heads, d_kv, dropout_rate, init_scale, **kwargs)
        for name, experts in (("query_experts", query_experts), ("key_value_experts", key_value_experts)):
            if not isinstance(experts, SwitchFeedForward):
                raise Refusal(f"{name} must be a SwitchFeedForward, not {checks.shown(experts)}.")
            if experts.output_dim != num_heads * d_kv:
                raise Refusal(f"{name} must have output_dim={num_heads * d_kv} (num_heads * d_kv), not "
                              f"{experts.output_dim!r}.")
            setattr(self, name, experts)
        self.cache_dtype = key_value_experts.compute_dtype
        if query_experts.name == key_value_experts.name:
            raise Refusal(f"query_experts and key_value_experts are both named {query_experts.name!r}; make two "
                          "layers with names of their own.")

    def _build_projections(self, input_shape):
        for experts in self.expert_layers:
            experts.build(input_shape)

    @property
    def expert_layers(self) -> tuple[SwitchFeedForward, ...]:
        """The two layers of experts, in the order of their statistics."""
        return self.query_experts, self.key_value_experts

    @property
    def routers(self) -> dict[str, int]:
        """Number of experts by router name."""
        return {f"{self.name}/{experts.name}": experts.num_experts for experts in self.expert_layers}

    def call(self, inputs: Tensor, padding_mask: Mask = None, token_ids: Tensor | None = None,
             attention_mask: Mask = None, position_bias: PositionBias | None = None, training: bool = False,
             return_router_stats: bool = False, mask: Mask = None, inputs_mask: Mask = None) -> Any:
        self._check(inputs, inputs, attention_mask, position_bias, training, return_router_stats)
        attention_mask = masks.mask_keys(attention_mask, masks.padding_mask(inputs, mask, inputs_mask))
        padding_mask = masks.padding_mask(inputs, padding_mask, mask, inputs_mask)
        query, query_stats = self._queries(inputs, padding_mask, token_ids, training)
        key_value, key_value_stats = self._project(self.key_value_experts, inputs, padding_mask, token_ids, training)
        value = self._drop_keys(ops.cast(key_value, inputs.dtype), training)
        outputs = self.mix(query, key_value, value, attention_mask, position_bias)
        router_stats = (query_stats, key_value_stats)
        if return_router_stats:
            return outputs, router_stats
        self.add_router_losses(self.expert_layers, router_stats, training)
        return outputs

    def compute_cache(self, inputs: Tensor, **of_tokens: Any) -> tuple[Tensor]:
        """Returns the keys, also used as values, for the cache. Arguments are as for `call`."""
        key_value, _ = self._project(self.key_value_experts, inputs, **of_tokens)
        return (ops.transpose(key_value, (0, 2, 1, 3)),)

    def _queries(self, *arguments, **of_tokens):
        query, stats = self._project(self.query_experts, *arguments, **of_tokens)
        return query * self.d_kv**-0.5, stats

    def _project(self, experts, inputs, padding_mask, token_ids, training=False):
        x, stats = experts.forward(inputs, padding_mask=padding_mask, token_ids=token_ids, training=training)
        # [batch, length, heads * d_kv] -> [batch, length, heads, d_kv]
        x = ops.reshape(x, (*ops.shape(x)[:2], self.num_heads, self.d_kv))
        return partitioning.constrain(x, ("batch", "length", "heads", "kv")), stats

    def compute_output_spec(self, inputs: Tensor, attention_mask: Mask = None,
                            position_bias: PositionBias | None = None, training: bool = False,
                            return_router_stats: bool = False, **kwargs: Any) -> Any:
        # See SwitchFeedForward.
        self._check(inputs, inputs, attention_mask, position_bias, training, return_router_stats)
        stats = tuple(experts.compute_output_spec(inputs, return_router_stats=True, **kwargs)[1]
                      for experts in self.expert_layers)
        outputs = keras.KerasTensor(inputs.shape, self.compute_dtype)
        return (outputs, stats) if return_router_stats else outputs


def relative_position_bucket(distance: np.ndarray, is_bidirectional: bool, num_buckets: int = 32,
                             max_distance: int = 128) -> np.ndarray:
    """Assigns relative positions to buckets, exact when near, logarithmic up to `max_distance`, then the last.

    Uses NumPy: accelerators round logarithms differently at bucket edges.

    Args:
        distance: <int>[...]. Key position minus query position.
        is_bidirectional: Whether half of the buckets are for keys after the query. If not, these have bucket 0.

    Returns: <int32>, same shape as `distance`, in [0, num_buckets).
    """
    distance = np.asarray(distance)
    offset = 0
    if is_bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    max_exact = num_buckets // 2
    logarithmic = max_exact + (
        np.log(np.maximum(distance, 1) / max_exact) / np.log(max_distance / max_exact) * (num_buckets - max_exact)
    ).astype(np.int32)
    bucket = np.where(distance < max_exact, distance, np.minimum(logarithmic, num_buckets - 1))
    return (bucket + offset).astype(np.int32)


@serializable
class RelativePositionBias(Layer):
    """Learned bias for each head and relative position.

    Args:
        num_buckets, max_distance: See `relative_position_bucket`.
        is_bidirectional: True in encoders, False in decoders.

    Call arguments:
        query_length, key_length: int, or <int32> scalar if unknown while tracing.
        first_query: Position of the first query. Keys start at position 0.

    Returns: <float32>[1, heads, query, key].
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, is_bidirectional: bool = True,
                 **kwargs: Any):
        super().__init__(**kwargs)
        self._keep(num_heads=num_heads, is_bidirectional=is_bidirectional)
        # The logarithmic half of a direction's buckets must reach further than the exact half.
        per_exact = 4 if is_bidirectional else 2
        self.num_buckets = checks.integer("num_buckets", num_buckets, per_exact)
        self.max_distance = checks.integer("max_distance", max_distance, self.num_buckets // per_exact + 1)

    def build(self, input_shape: Shape | None = None) -> None:
        # Glorot uniform, as in Mesh TensorFlow.
        limit = (6 / (self.num_heads + self.num_buckets)) ** 0.5
        self.rel_embedding = partitioning.add_weight(
            self, "rel_embedding", (self.num_heads, self.num_buckets), ("heads", "relpos_buckets"),
            random.RandomByPosition("uniform", limit))

    def call(self, query_length: int | Tensor, key_length: int | Tensor, first_query: int | Tensor = 0) -> Tensor:
        query_length = checks.size("query_length", query_length, at_least=1)
        key_length = checks.size("key_length", key_length, at_least=1)
        # One lookup by key - query, then a shifted row for each query, keeps [query, key] constants and scatters out.
        furthest = self.max_distance
        table = relative_position_bucket(np.arange(-furthest, furthest + 1), self.is_bidirectional, self.num_buckets,
                                         self.max_distance)
        distances = partitioning.arange(query_length + key_length) + 1 - query_length - first_query
        distances = ops.clip(distances, -furthest, furthest)
        buckets = ops.take(ops.convert_to_tensor(table), distances + furthest)
        dtype = dtypes.wide_dtype(self.compute_dtype)
        one_hot = ops.one_hot(buckets, self.num_buckets, dtype=dtype)
        by_distance = ops.einsum("hn,dn->hd", partitioning.use(self.rel_embedding, dtype), one_hot)
        # Entry [i, query_length - 1 + j] of `shifted` is distance j - i.
        width = query_length + key_length
        repeated = ops.tile(by_distance, (1, query_length))[:, :query_length * (width - 1)]
        shifted = ops.reshape(repeated, (self.num_heads, query_length, width - 1))
        bias = ops.expand_dims(shifted[:, :, query_length - 1:query_length - 1 + key_length], 0)
        return partitioning.constrain(bias, (None, "heads", None, None))
