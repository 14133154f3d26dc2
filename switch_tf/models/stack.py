"""T5's encoder and decoder stacks."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import Dropout, RMSNorm, Router
from switch_tf.layers.attention import VALUE_CACHE_AXES
from switch_tf.layers.shapes import KeepsShape
from switch_tf.metrics import RouterStats
from switch_tf.models.joining import join
from switch_tf.models.transformer_layer import LayerCache, TransformerLayer, relative_position_bias
from switch_tf.ops import forms
from switch_tf.ops.dot_product_attention import cut
from switch_tf.partitioning.tensors import Shape, Tensor

Cache: TypeAlias = tuple[LayerCache, ...]


class Stack(KeepsShape, keras.layers.Layer):
    """The layers of an encoder or decoder between embedding and logits, with one shared position bias or one a layer.

    Args:
        config: SwitchConfig.
        is_decoder: bool.

    Call arguments:
        embedded: <compute dtype>[batch, length, d_model].
        is_real, attention_mask, encoded, encoder_decoder_mask, token_ids: See `TransformerLayer`.

    Returns: `(hidden, router_stats)`: <compute dtype>[batch, length, d_model], zero at padding, and a tuple with the
        RouterStats of each router.
    """

    def __init__(self, config: SwitchConfig, is_decoder: bool, **kwargs: Any):
        super().__init__(**kwargs)
        policy = self.dtype_policy
        self.remat = config.remat
        self.rules = config.rules
        num_layers = config.num_decoder_layers if is_decoder else config.num_encoder_layers
        sparse_layers = config.decoder_sparse_layers if is_decoder else config.encoder_sparse_layers
        self.is_all_sparse = len(sparse_layers) == num_layers
        self.relpos_bias = (None if config.relative_attention_per_layer
                            else relative_position_bias(config, is_decoder, policy))
        self.embedding_dropout = Dropout(config.dropout_rate, broadcast_axis=1, dtype=policy, name="embedding_dropout")
        self.layers: list[keras.layers.Layer] = [
            TransformerLayer(config, is_decoder, index in sparse_layers, dtype=policy, name=f"layers_{index}")
            for index in range(num_layers)]
        self.final_norm = RMSNorm(config.layer_norm_epsilon, dtype=policy,
                                  name="decoder_norm" if is_decoder else "encoder_norm")
        self.final_dropout = Dropout(config.dropout_rate, broadcast_axis=1, dtype=policy, name="final_dropout")

    @property
    def router_layers(self) -> tuple[Router, ...]:
        """The Routers, in the order of their statistics."""
        return tuple(router for layer in self.layers for router in layer.router_layers)

    def build(self, input_shape: Shape) -> None:
        if self.relpos_bias is not None:
            self.relpos_bias.build(input_shape)
        for layer in (self.embedding_dropout, *self.layers, self.final_norm, self.final_dropout):
            layer.build(input_shape)

    def call(self, embedded: Tensor, is_real: Tensor, attention_mask: Tensor, encoded: Tensor | None = None,
             encoder_decoder_mask: Tensor | None = None, token_ids: Tensor | None = None,
             training: bool = False) -> tuple[Tensor, tuple[RouterStats, ...]]:
        hidden = self.embedding_dropout(embedded, training=training)
        length = ops.shape(hidden)[1]
        position_biases = self._position_biases(cut, query_length=length, key_length=length)
        cross = () if encoded is None else (encoded, encoder_decoder_mask)
        router_stats = ()
        for layer, position_bias in zip(self.layers, position_biases, strict=True):
            run = functools.partial(layer, token_ids=token_ids, training=training)
            if self.remat and training:
                run = functools.partial(forms.rematerialize, run)
            hidden, stats = run(hidden, is_real, attention_mask, position_bias, *cross)
            router_stats += stats
        if self.rules.joins_layers:
            router_stats = join(router_stats, self.rules.omits_full_stacks and self.is_all_sparse)
        return self._end(hidden, is_real, training), router_stats

    def _position_biases(self, finish: Callable, **positions: Any) -> Iterable:
        """Returns the position bias of each layer after a function `finish`."""
        if self.relpos_bias is None:
            return (finish(layer.relpos_bias(**positions)) for layer in self.layers)
        return [finish(self.relpos_bias(**positions))] * len(self.layers)

    def _end(self, hidden, is_real, training):
        hidden = self.final_dropout(self.final_norm(hidden), training=training)
        if self.rules.zeroes_stack_padding:
            hidden = hidden * ops.cast(ops.expand_dims(is_real, -1), hidden.dtype)
        return hidden

    # Incremental decoding.

    def compute_cross_cache(self, encoded: Tensor) -> Cache:
        """Caches each layer's cross-attention to <compute dtype>[batch, encoder length, d_model]."""
        return tuple(layer.cross_attention.compute_cache(encoded) for layer in self.layers)

    def init_cache(self, batch: int | Tensor, max_length: int) -> Cache:
        """Returns an empty self-attention cache for each layer, with room for `max_length` tokens."""
        return tuple(layer.init_cache(batch, max_length) for layer in self.layers)

    def decode_step(self, embedded: Tensor, is_real: Tensor, cache: Cache, position: Tensor,
                    cross_cache: Cache, encoder_decoder_mask: Tensor,
                    token_ids: Tensor) -> tuple[Tensor, Cache]:
        """Runs the layers on the next token of each sequence.

        Args:
            embedded: <compute dtype>[batch, 1, d_model].
            is_real: <bool>[batch, 1], False where a sequence has ended.
            cache: Self-attention cache from `init_cache` or the previous step.
            position: <int32> scalar. Position of the token.
            cross_cache: Cross-attention cache from `compute_cross_cache`.
            encoder_decoder_mask: <bool>[batch, 1, 1, encoder length].
            token_ids: <int32>[batch, 1].

        Returns:
            `(hidden, cache)`: <compute dtype>[batch, 1, d_model] and the updated cache.
        """
        max_length = cache[0][-1].shape[VALUE_CACHE_AXES.index("length")]
        position_biases = self._position_biases(lambda bias: bias, query_length=1, key_length=max_length,
                                                first_query=position)
        attention_mask = (partitioning.arange(max_length) <= position)[None, None, None, :]
        hidden, new_cache = embedded, []
        for layer, layer_cache, layer_cross_cache, position_bias in zip(
                self.layers, cache, cross_cache, position_biases, strict=True):
            hidden, layer_cache = layer.decode_step(hidden, is_real, layer_cache, position, layer_cross_cache,
                                                    attention_mask, encoder_decoder_mask, position_bias, token_ids)
            new_cache.append(layer_cache)
        return self._end(hidden, is_real, training=False), tuple(new_cache)
