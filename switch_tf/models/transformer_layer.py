"""One pre-norm layer of T5's encoder or decoder."""

from typing import Any, TypeAlias

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import (
    Dropout,
    FeedForward,
    MultiHeadAttention,
    RelativePositionBias,
    RMSNorm,
    Router,
    SwitchFeedForward,
    SwitchSelfAttention,
)
from switch_tf.layers.shapes import KeepsShape
from switch_tf.metrics import RouterStats
from switch_tf.models.joining import JoinedRouter
from switch_tf.ops import dtypes, indexing
from switch_tf.ops.dot_product_attention import PositionBias
from switch_tf.partitioning.tensors import Shape, Tensor


def switch_feed_forward(config: SwitchConfig, is_decoder: bool, dtype: Any, **kwargs: Any) -> SwitchFeedForward:
    """Returns the Switch layer described by a SwitchConfig."""
    policy, num_selected_experts = config.routing(is_decoder)
    has_second_place = config.num_choices(is_decoder) > 1
    router = (JoinedRouter if config.rules.joins_layers else Router)(
        config.num_experts, num_selected_experts, policy, dtype=dtype, name="router",
        second_place_loss_weight=config.second_place_loss_weight if has_second_place else 0.0, **_fields(
            config, "exploration", "jitter_noise", "second_expert_policy", "second_expert_threshold", "router_dtype",
            "init_scale", "semantics"))
    return SwitchFeedForward(config.num_experts, config.expert_width, router=router, dtype=dtype, **kwargs, **_fields(
        config, "activation", "group_size", "num_groups_multiple", "train_capacity_factor", "eval_capacity_factor",
        "min_expert_capacity", "expert_dropout_rate", "load_balancing_loss_weight", "router_z_loss_weight",
        "init_scale", "semantics", "expert_capacity", "dispatch"))


def switch_self_attention(config: SwitchConfig, is_decoder: bool, dtype: Any, **kwargs: Any) -> SwitchSelfAttention:
    """Returns the self-attention with experts described by a SwitchConfig."""
    expert_dtype = dtype if config.attention_expert_dtype == "auto" else dtypes.wide_dtype(
        keras.dtype_policies.get(dtype).compute_dtype, config.attention_expert_dtype)
    query_experts, key_value_experts = (
        switch_feed_forward(config, is_decoder, expert_dtype, output_dim=config.num_heads * config.d_kv, name=name)
        for name in ("query_experts", "key_value_experts"))
    return SwitchSelfAttention(query_experts, key_value_experts, config.num_heads, config.d_kv, config.dropout_rate,
                               config.attention_init_scale, dtype=dtype, **kwargs)


def relative_position_bias(config: SwitchConfig, is_decoder: bool, dtype: Any) -> RelativePositionBias:
    """Returns the relative position bias described by a SwitchConfig, for one layer or all of a stack."""
    return RelativePositionBias(
        config.num_heads, config.relative_attention_num_buckets, config.relative_attention_max_distance,
        is_bidirectional=not is_decoder, dtype=dtype, name="relpos_bias")


def _fields(config, *names):
    return {name: getattr(config, name) for name in names}


LayerCache: TypeAlias = tuple[Tensor, ...]


class TransformerLayer(KeepsShape, keras.layers.Layer):
    """One encoder or decoder layer: self-attention, cross-attention in decoders, and feed-forward or experts.

    `relpos_bias` is the layer's own RelativePositionBias, which the stack calls, or None if layers share one.

    Args:
        config: SwitchConfig.
        is_decoder: bool. Whether the layer has cross-attention.
        is_sparse: bool. Whether the sublayers in `config.expert_sublayers` have experts.

    Call arguments:
        hidden: <compute dtype>[batch, length, d_model].
        is_real: <bool>[batch, length], False at padding.
        attention_mask: <bool>[batch, 1, length or 1, length], for self-attention.
        position_bias: <float32>[1, heads, length, length], or its blocks by `cut`.
        encoded: <compute dtype>[batch, encoder length, d_model]. The encoder's outputs, for decoders.
        encoder_decoder_mask: <bool>[batch, 1, length or 1, encoder length], for cross-attention.
        token_ids: <int32>[batch, length], for hash routing.

    Returns: `(hidden, router_stats)`, the latter a tuple with the RouterStats of the layer's routers in the order
        queries, keys and values, feed-forward.
    """

    def __init__(self, config: SwitchConfig, is_decoder: bool, is_sparse: bool, **kwargs: Any):
        # Keras' autocast would round the float32 position bias. This layer has no weights of its own to cast.
        super().__init__(autocast=False, **kwargs)
        self.is_decoder = is_decoder
        self.zeroes_padding = is_decoder and config.rules.masks_decoder_inputs
        self.is_sparse = is_sparse
        self.has_attention_experts = is_sparse and config.has_attention_experts
        self.has_feed_forward_experts = is_sparse and config.has_feed_forward_experts
        policy = self.dtype_policy
        self.relpos_bias = (relative_position_bias(config, is_decoder, policy) if config.relative_attention_per_layer
                            else None)

        def norm(name):
            return RMSNorm(config.layer_norm_epsilon, dtype=policy, name=name)

        def attention(name):
            return MultiHeadAttention(config.num_heads, config.d_kv, config.dropout_rate, config.attention_init_scale,
                                      dtype=policy, name=name)

        def self_attention(name):
            if self.has_attention_experts:
                return switch_self_attention(config, is_decoder, policy, name=name)
            return attention(name)

        def dense(name):
            return FeedForward(config.d_ff, config.activation, config.dropout_rate, config.init_scale, dtype=policy,
                               name=name)

        def dropout(name):
            return Dropout(config.dropout_rate, broadcast_axis=1, dtype=policy, name=name)

        if is_decoder:
            self.pre_attention_layer_norm = norm("pre_self_attention_layer_norm")
            self.attention = self_attention("self_attention")
            self.pre_cross_attention_layer_norm = norm("pre_cross_attention_layer_norm")
            self.cross_attention = attention("encoder_decoder_attention")
            self.cross_attention_dropout = dropout("post_cross_attention_dropout")
        else:
            self.pre_attention_layer_norm = norm("pre_attention_layer_norm")
            self.attention = self_attention("attention")
        self.attention_dropout = dropout("post_attention_dropout")
        self.pre_mlp_layer_norm = norm("pre_mlp_layer_norm")
        self.mlp = (switch_feed_forward(config, is_decoder, policy, name="mlp") if self.has_feed_forward_experts
                    else dense("mlp"))
        self.mlp_dropout = dropout("post_mlp_dropout")
        self.has_extra_mlp = is_sparse and config.extra_mlp
        if self.has_extra_mlp:
            self.pre_extra_mlp_layer_norm = norm("pre_extra_mlp_layer_norm")
            self.extra_mlp = dense("extra_mlp")
            self.extra_mlp_dropout = dropout("post_extra_mlp_dropout")

    @property
    def router_layers(self) -> tuple[Router, ...]:
        """The Routers, in the order of their statistics."""
        attention = self.attention.expert_layers if self.has_attention_experts else ()
        feed_forward = (self.mlp,) if self.has_feed_forward_experts else ()
        return tuple(experts.router for experts in attention + feed_forward)

    def build(self, input_shape: Shape) -> None:
        if self.relpos_bias is not None:
            self.relpos_bias.build(input_shape)
        for layer in (self.pre_attention_layer_norm, self.attention, self.attention_dropout):
            layer.build(input_shape)
        if self.is_decoder:
            for layer in (self.pre_cross_attention_layer_norm, self.cross_attention, self.cross_attention_dropout):
                layer.build(input_shape)
        for layer in (self.pre_mlp_layer_norm, self.mlp, self.mlp_dropout):
            layer.build(input_shape)
        if self.has_extra_mlp:
            for layer in (self.pre_extra_mlp_layer_norm, self.extra_mlp, self.extra_mlp_dropout):
                layer.build(input_shape)

    def call(self, hidden: Tensor, is_real: Tensor, attention_mask: Tensor, position_bias: PositionBias,
             encoded: Tensor | None = None, encoder_decoder_mask: Tensor | None = None, token_ids: Tensor | None = None,
             training: bool = False) -> tuple[Tensor, tuple[RouterStats, ...]]:
        x = self.pre_attention_layer_norm(hidden)
        if self.zeroes_padding:  # which a query without a target attends to
            x = x * ops.cast(is_real, x.dtype)[..., None]
        router_stats = ()
        if self.has_attention_experts:
            x, router_stats = self.attention.forward(
                x, padding_mask=is_real, token_ids=token_ids, attention_mask=attention_mask,
                position_bias=position_bias, training=training)
        else:
            x = self.attention(x, attention_mask=attention_mask, position_bias=position_bias, training=training)
        hidden = hidden + self.attention_dropout(x, training=training)
        if self.is_decoder:
            x = self.pre_cross_attention_layer_norm(hidden)
            x = self.cross_attention(x, inputs_kv=encoded, attention_mask=encoder_decoder_mask, training=training)
            hidden = hidden + self.cross_attention_dropout(x, training=training)
        hidden, mlp_stats = self._feed_forward(hidden, is_real, token_ids, training)
        return hidden, router_stats + mlp_stats

    def _feed_forward(self, hidden, is_real, token_ids, training):
        """Applies the feed-forward sublayers and returns the hidden states and a tuple of RouterStats."""
        router_stats = ()
        x = self.pre_mlp_layer_norm(hidden)
        if self.has_feed_forward_experts:
            x, stats = self.mlp.forward(x, padding_mask=is_real, token_ids=token_ids, training=training)
            router_stats = (stats,)
        else:
            x = self.mlp(x, training=training)
        hidden = hidden + self.mlp_dropout(x, training=training)
        if self.has_extra_mlp:
            x = self.extra_mlp(self.pre_extra_mlp_layer_norm(hidden), training=training)
            hidden = hidden + self.extra_mlp_dropout(x, training=training)
        return partitioning.constrain(hidden, ("batch", "length", "embed")), router_stats

    # Incremental decoding.

    def init_cache(self, batch: int | Tensor, max_length: int) -> LayerCache:
        """Returns an empty self-attention cache, zeros with room for `max_length` tokens."""
        sizes = {"batch": batch, "heads": self.attention.num_heads, "length": max_length, "kv": self.attention.d_kv}
        return tuple(partitioning.constrain(ops.zeros([sizes[axis] for axis in axes], dtype), axes)
                     for axes, dtype in self.attention.cache_spec)

    def decode_step(self, hidden: Tensor, is_real: Tensor, cache: LayerCache, position: Tensor,
                    cross_cache: LayerCache, attention_mask: Tensor, encoder_decoder_mask: Tensor,
                    position_bias: Tensor, token_ids: Tensor) -> tuple[Tensor, LayerCache]:
        """Runs the layer on the next token of each sequence.

        Args:
            hidden: <compute dtype>[batch, 1, d_model].
            is_real: <bool>[batch, 1], False where a sequence has ended.
            cache: Self-attention cache from `init_cache` or the previous step.
            position: <int32> scalar. Position of the token.
            cross_cache: Cross-attention cache of the encoder's outputs.
            attention_mask, encoder_decoder_mask, position_bias, token_ids: See the class, for one query.

        Returns:
            `(hidden, cache)`: <compute dtype>[batch, 1, d_model] and the updated cache.
        """
        x = self.pre_attention_layer_norm(hidden)
        if self.has_attention_experts:
            new, _ = self.attention.compute_cache(x, is_real, token_ids)
            cache = self._write(cache, new, position)
            x, _ = self.attention.attend(x, cache, is_real, token_ids, attention_mask, position_bias)
        else:
            cache = self._write(cache, self.attention.compute_cache(x), position)
            x = self.attention.attend(x, cache, attention_mask, position_bias)
        hidden = hidden + x
        x = self.pre_cross_attention_layer_norm(hidden)
        hidden = hidden + self.cross_attention.attend(x, cross_cache, encoder_decoder_mask)
        hidden, _ = self._feed_forward(hidden, is_real, token_ids, training=False)
        return hidden, cache

    def _write(self, cache, new, position):
        """Writes one token's entries into the cache."""
        return tuple(partitioning.constrain(indexing.write(cached, entry, position, axes.index("length")), axes)
                     for (axes, _), cached, entry in zip(self.attention.cache_spec, cache, new, strict=True))
