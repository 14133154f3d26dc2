"""T5's encoder and decoder stacks, and their layers."""

import functools
import inspect
from collections.abc import Iterable
from typing import Any, TypeAlias

import keras
from keras import ops

from switch_tf import losses, partitioning
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
from switch_tf.layers.basic import KeepsShape
from switch_tf.metrics import Mean, RouterStats
from switch_tf.ops import dtypes, forms, indexing
from switch_tf.ops.dot_product_attention import PositionBias, cut
from switch_tf.partitioning.tensors import Mask, Tensor

Cache: TypeAlias = tuple[tuple[Tensor, ...], ...]


def switch_feed_forward(config: SwitchConfig, is_decoder: bool, dtype: Any, **kwargs: Any) -> SwitchFeedForward:
    """Creates the Switch layer of a SwitchConfig."""

    def make(layer, **changes):
        """Passes fields of `config` as the arguments of the same names."""
        fields = filter(config.__dataclass_fields__.get, inspect.signature(layer.__init__).parameters)
        return layer(**{**{name: getattr(config, name) for name in fields}, "dtype": dtype, **changes})

    policy, num_selected_experts = config.routing(is_decoder)
    changes = {} if config.num_choices(is_decoder) > 1 else {"second_place_loss_weight": 0.0}
    router = make(Router, num_selected_experts=num_selected_experts, policy=policy, name="router", **changes)
    router.reports_balance = config.rules.joins_layers
    return make(SwitchFeedForward, d_ff=config.expert_width, router=router, **kwargs)


def _relative_position_bias(config, is_decoder, dtype):
    return RelativePositionBias(
        config.num_heads, config.relative_attention_num_buckets, config.relative_attention_max_distance,
        is_bidirectional=not is_decoder, dtype=dtype, name="relpos_bias")


class _Parts(KeepsShape):
    """Builds its layers in the order of assignment."""

    get_config = keras.layers.Layer.get_config  # raises: the model's configuration describes its parts

    def build(self, input_shape):
        for layer in self._flatten_layers(include_self=False, recursive=False):
            layer.build(input_shape)


class TransformerLayer(_Parts):
    """One pre-norm layer: self-attention, cross-attention in decoders, and feed-forward or experts.

    The stack calls `relpos_bias`, the layer's own position bias. It is None if layers share one.

    Args:
        is_sparse: Whether the sublayers in `config.expert_sublayers` have experts.

    Call arguments:
        hidden: <compute dtype>[batch, length, d_model].
        is_real: <bool>[batch, length], False at padding.
        attention_mask: <bool>[batch, 1, length or 1, length], for self-attention.
        position_bias: <float32>[1, heads, length, length], or its blocks by `cut`.
        encoded: <compute dtype>[batch, encoder length, d_model], for decoders.
        encoder_decoder_mask: <bool>[batch, 1, length or 1, encoder length], for cross-attention.
        token_ids: <int32>[batch, length], for hash routing.

    Returns: `(hidden, router_stats)`, with RouterStats for experts of queries, keys and values, and feed-forward.
    """

    def __init__(self, config: SwitchConfig, is_decoder: bool, is_sparse: bool, **kwargs: Any):
        # Keras' autocast would round the float32 position bias.
        super().__init__(autocast=False, **kwargs)
        self.is_decoder = is_decoder
        self.zeroes_padding = is_decoder and config.rules.masks_decoder_inputs
        self.has_attention_experts = is_sparse and config.has_attention_experts
        self.has_feed_forward_experts = is_sparse and config.has_feed_forward_experts
        self.has_extra_mlp = is_sparse and config.extra_mlp
        policy = self.dtype_policy
        norm = functools.partial(RMSNorm, config.layer_norm_epsilon, dtype=policy)
        attention = functools.partial(MultiHeadAttention, config.num_heads, config.d_kv, config.dropout_rate,
                                      config.attention_init_scale, dtype=policy)
        dense = functools.partial(FeedForward, config.d_ff, config.activation, config.dropout_rate, config.init_scale,
                                  dtype=policy)
        experts = functools.partial(switch_feed_forward, config, is_decoder)
        dropout = functools.partial(Dropout, config.dropout_rate, broadcast_axis=1, dtype=policy)

        self.relpos_bias = (_relative_position_bias(config, is_decoder, policy) if config.relative_attention_per_layer
                            else None)
        self.pre_attention_layer_norm = norm(
            name="pre_self_attention_layer_norm" if is_decoder else "pre_attention_layer_norm")
        name = "self_attention" if is_decoder else "attention"
        if self.has_attention_experts:
            expert_dtype = policy if config.attention_expert_dtype == "auto" else dtypes.wide_dtype(
                policy.compute_dtype, config.attention_expert_dtype)
            projection = functools.partial(experts, expert_dtype, output_dim=config.num_heads * config.d_kv)
            self.attention = SwitchSelfAttention(
                projection(name="query_experts"), projection(name="key_value_experts"), config.num_heads, config.d_kv,
                config.dropout_rate, config.attention_init_scale, dtype=policy, name=name)
        else:
            self.attention = attention(name=name)
        self.attention_dropout = dropout(name="post_attention_dropout")
        if is_decoder:
            self.pre_cross_attention_layer_norm = norm(name="pre_cross_attention_layer_norm")
            self.cross_attention = attention(name="encoder_decoder_attention")
            self.cross_attention_dropout = dropout(name="post_cross_attention_dropout")
        self.pre_mlp_layer_norm = norm(name="pre_mlp_layer_norm")
        self.mlp = experts(policy, name="mlp") if self.has_feed_forward_experts else dense(name="mlp")
        self.mlp_dropout = dropout(name="post_mlp_dropout")
        if self.has_extra_mlp:
            self.pre_extra_mlp_layer_norm = norm(name="pre_extra_mlp_layer_norm")
            self.extra_mlp = dense(name="extra_mlp")
            self.extra_mlp_dropout = dropout(name="post_extra_mlp_dropout")

    # Not a property: Keras would name weights in a file after it.
    def list_expert_layers(self) -> tuple[SwitchFeedForward, ...]:
        """Returns the layers of experts, in the order of their statistics."""
        attention = self.attention.expert_layers if self.has_attention_experts else ()
        return attention + ((self.mlp,) if self.has_feed_forward_experts else ())

    def call(self, hidden: Tensor, is_real: Tensor, attention_mask: Tensor, position_bias: PositionBias,
             encoded: Tensor | None = None, encoder_decoder_mask: Mask = None, token_ids: Tensor | None = None,
             training: bool = False) -> tuple[Tensor, tuple[RouterStats, ...]]:
        x = self.pre_attention_layer_norm(hidden)
        if self.zeroes_padding:  # a query without a target attends to it
            x = x * ops.cast(is_real, x.dtype)[..., None]
        options = {"attention_mask": attention_mask, "position_bias": position_bias, "training": training}
        if self.has_attention_experts:
            x, router_stats = self.attention.forward(x, padding_mask=is_real, token_ids=token_ids, **options)
        else:
            x, router_stats = self.attention(x, **options), ()
        hidden = hidden + self.attention_dropout(x, training=training)
        if self.is_decoder:
            x = self.pre_cross_attention_layer_norm(hidden)
            x = self.cross_attention(x, inputs_kv=encoded, attention_mask=encoder_decoder_mask, training=training)
            hidden = hidden + self.cross_attention_dropout(x, training=training)
        hidden, mlp_stats = self._feed_forward(hidden, is_real, token_ids, training)
        return hidden, router_stats + mlp_stats

    def _feed_forward(self, hidden, is_real, token_ids, training):
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

    def decode_step(self, hidden: Tensor, is_real: Tensor, cache: tuple[Tensor, ...], position: Tensor,
                    cross_cache: tuple[Tensor, ...], attention_mask: Tensor, encoder_decoder_mask: Tensor,
                    position_bias: Tensor, token_ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs the layer on the next token of each sequence. Returns `(hidden, cache)`.

        Args:
            hidden: <compute dtype>[batch, 1, d_model].
            is_real: <bool>[batch, 1], False after the end of a sequence.
            cache: From `SwitchTransformer.prefill` or the previous step.
            position: <int32> scalar.
            attention_mask, encoder_decoder_mask, position_bias, token_ids: As for the class, for one query.
        """
        x = self.pre_attention_layer_norm(hidden)
        of_tokens = {"padding_mask": is_real, "token_ids": token_ids} if self.has_attention_experts else {}
        new = self.attention.compute_cache(x, **of_tokens)
        cache = tuple(partitioning.constrain(indexing.write(cached, entry, position, axes.index("length")), axes)
                      for axes, cached, entry in zip(self.attention.cache_axes, cache, new, strict=True))
        hidden = hidden + self.attention.attend(x, cache, attention_mask, position_bias, **of_tokens)
        x = self.pre_cross_attention_layer_norm(hidden)
        hidden = hidden + self.cross_attention.attend(x, cross_cache, encoder_decoder_mask)
        hidden, _ = self._feed_forward(hidden, is_real, token_ids, training=False)
        return hidden, cache


def join(router_stats: tuple[RouterStats, ...], is_omitted: bool) -> tuple[RouterStats, ...]:
    """Computes the router losses of a whole stack and splits them evenly between its routers (Hugging Face).

    The fraction of tokens per expert is averaged over layers before its product with probabilities, so layers can
    balance one another.

    Both losses are 0 if `is_omitted`. Requires `Router.reports_balance`.
    """
    balances: list[Any] = [stats.load_balancing_loss for stats in router_stats]
    # Policies that balance themselves report no Balance.
    if balances and all(isinstance(balance, losses.Balance) for balance in balances):
        fraction = sum(balance.fraction for balance in balances) / len(balances)
        balances = [balance._replace(fraction=fraction).mean for balance in balances]

    def share(mean):
        return Mean(ops.zeros_like(mean.total) if is_omitted else mean.total / len(router_stats), mean.weight)

    return tuple(stats._replace(load_balancing_loss=share(balance), router_z_loss=share(stats.router_z_loss))
                 for stats, balance in zip(router_stats, balances, strict=True))


class Stack(_Parts):
    """The layers of an encoder or decoder, with shared or separate position biases.

    Call arguments:
        embedded: <compute dtype>[batch, length, d_model].
        is_real, attention_mask, encoded, encoder_decoder_mask, token_ids: See `TransformerLayer`.

    Returns: `(hidden, router_stats)`: <compute dtype>[batch, length, d_model], zero at padding, and the RouterStats of
        each router.
    """

    def __init__(self, config: SwitchConfig, is_decoder: bool, **kwargs: Any):
        super().__init__(**kwargs)
        policy = self.dtype_policy
        self.config = config
        num_layers = config.num_decoder_layers if is_decoder else config.num_encoder_layers
        sparse_layers = config.decoder_sparse_layers if is_decoder else config.encoder_sparse_layers
        self.relpos_bias = (None if config.relative_attention_per_layer
                            else _relative_position_bias(config, is_decoder, policy))
        self.embedding_dropout = Dropout(config.dropout_rate, broadcast_axis=1, dtype=policy, name="embedding_dropout")
        self.layers: list[keras.layers.Layer] = [
            TransformerLayer(config, is_decoder, index in sparse_layers, dtype=policy, name=f"layers_{index}")
            for index in range(num_layers)]
        self.final_norm = RMSNorm(config.layer_norm_epsilon, dtype=policy,
                                  name="decoder_norm" if is_decoder else "encoder_norm")
        self.final_dropout = Dropout(config.dropout_rate, broadcast_axis=1, dtype=policy, name="final_dropout")

    def call(self, embedded: Tensor, is_real: Tensor, attention_mask: Tensor, encoded: Tensor | None = None,
             encoder_decoder_mask: Mask = None, token_ids: Tensor | None = None,
             training: bool = False) -> tuple[Tensor, tuple[RouterStats, ...]]:
        hidden = self.embedding_dropout(embedded, training=training)
        length = ops.shape(hidden)[1]
        position_biases = self.position_biases(query_length=length, key_length=length)
        cross = () if encoded is None else (encoded, encoder_decoder_mask)
        router_stats = ()
        for layer, position_bias in zip(self.layers, position_biases, strict=True):
            run = functools.partial(layer, token_ids=token_ids, training=training)
            if self.config.remat and training:
                run = functools.partial(forms.rematerialize, run)
            hidden, stats = run(hidden, is_real, attention_mask, position_bias, *cross)
            router_stats += stats
        if self.config.rules.joins_layers:
            router_stats = join(router_stats, self.config.rules.omits_full_stacks and all(
                layer.list_expert_layers() for layer in self.layers))
        return self.finish(hidden, is_real, training), router_stats

    def position_biases(self, **positions: Any) -> Iterable[PositionBias]:
        """Returns the position bias of each layer. Arguments are as for `RelativePositionBias`."""
        if self.relpos_bias is None:
            return (cut(layer.relpos_bias(**positions)) for layer in self.layers)
        return [cut(self.relpos_bias(**positions))] * len(self.layers)

    def finish(self, hidden: Tensor, is_real: Tensor, training: bool = False) -> Tensor:
        """Normalizes the outputs of the last layer."""
        hidden = self.final_dropout(self.final_norm(hidden), training=training)
        if self.config.rules.zeroes_stack_padding:
            hidden = hidden * ops.cast(ops.expand_dims(is_real, -1), hidden.dtype)
        return hidden
