"""Self-attention with experts for queries, keys and values (Switch in attention)."""

from typing import Any

import keras
from keras import ops

from switch_tf import checks, losses, partitioning
from switch_tf.layers import masks
from switch_tf.layers.attention import (
    VALUE_CACHE_AXES,
    add_output_kernel,
    as_cached_values,
    attention_outputs,
    check_scores,
    drop_keys,
)
from switch_tf.layers.dropout import Dropout
from switch_tf.layers.moe import SwitchFeedForward
from switch_tf.layers.observing import Observed
from switch_tf.metrics import RouterStats
from switch_tf.ops.dot_product_attention import PositionBias
from switch_tf.partitioning.tensors import Shape, Tensor
from switch_tf.refusals import Refusal


@keras.saving.register_keras_serializable("switch_tf")
class SwitchSelfAttention(Observed, keras.layers.Layer):
    """Self-attention with experts as input projections (arXiv 2101.03961, appendix A, figure 10).

    One Switch layer computes the queries. Another one, with a router of its own, computes a single vector per token
    that is both key and value. Dropped tokens get zero vectors: a zero query attends by position bias alone, and a zero
    key still receives attention but its value adds nothing.

    Queries are multiplied by d_kv^-0.5, as in Mesh TensorFlow. `MultiHeadAttention` has that factor in the initializer
    of its query kernel instead.

    The experts have their own dtype. With float32 experts in a bfloat16 model, scores are computed from float32 queries
    and keys, and only values are cast to the dtype of the inputs.

    Args:
        query_experts, key_value_experts: SwitchFeedForward with output_dim = num_heads * d_kv.
        num_heads, d_kv, dropout_rate: See `MultiHeadAttention`.
        init_scale: float. Multiplies the initial variance of the output projection.

    Call arguments:
        inputs: <compute dtype>[batch, length, d_model].
        padding_mask: <bool>[batch, length], True at real tokens, which are routed. None uses Keras' mask, if any. Does
            not mask keys: use `attention_mask` or Keras' mask.
        token_ids: <int32>[batch, length]. Required by the "hash" policy.
        attention_mask, position_bias: See `MultiHeadAttention`.
        return_router_stats: bool. Returns the statistics and adds no losses. Set by `forward`.
        mask, inputs_mask: Keras' mask, passed by Keras and propagated to the outputs.

    Returns: <compute dtype>[batch, length, d_model].
    """

    def __init__(self, query_experts: SwitchFeedForward, key_value_experts: SwitchFeedForward, num_heads: int,
                 d_kv: int, dropout_rate: float = 0.0, init_scale: float = 1.0, **kwargs: Any):
        # The position bias stays float32; the experts cast for themselves.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.num_heads = checks.integer("num_heads", num_heads, at_least=1)
        self.d_kv = checks.integer("d_kv", d_kv, at_least=1)
        self.dropout_rate = checks.number("dropout_rate", dropout_rate, "in [0, 1)")
        self.init_scale = checks.number("init_scale", init_scale, "above 0")
        for name, experts in (("query_experts", query_experts), ("key_value_experts", key_value_experts)):
            if not isinstance(experts, SwitchFeedForward):
                raise Refusal(f"{name} must be a SwitchFeedForward, not {checks.shown(experts)}.")
            if experts.output_dim != num_heads * d_kv:
                raise Refusal(f"{name} must have output_dim={num_heads * d_kv} (num_heads * d_kv), not "
                              f"{experts.output_dim!r}.")
        if query_experts.name == key_value_experts.name:
            raise Refusal(f"query_experts and key_value_experts are both named {query_experts.name!r}; make two "
                          "layers with names of their own.")
        self.query_experts = query_experts
        self.key_value_experts = key_value_experts
        self.dropout = Dropout(dropout_rate, broadcast_axis=2, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape)
        for layer in (self.query_experts, self.key_value_experts, self.dropout):
            layer.build(input_shape)
        self.out = add_output_kernel(self, d_model)

    @property
    def expert_layers(self) -> tuple[SwitchFeedForward, ...]:
        """The two SwitchFeedForward, in the order of their statistics."""
        return self.query_experts, self.key_value_experts

    @property
    def routers(self) -> dict[str, int]:
        """Number of experts by router name, see `Observed`."""
        return {f"{self.name}/{experts.name}": experts.num_experts for experts in self.expert_layers}

    def forward(self, inputs: Tensor, padding_mask: Tensor | None = None, token_ids: Tensor | None = None,
                attention_mask: Tensor | None = None, position_bias: PositionBias | None = None,
                training: bool = False) -> tuple[Tensor, tuple[RouterStats, RouterStats]]:
        """Applies the layer and returns `(outputs, (query_stats, key_value_stats))`. Adds no losses."""
        return self(inputs, padding_mask=padding_mask, token_ids=token_ids, attention_mask=attention_mask,
                    position_bias=position_bias, training=training, return_router_stats=True)

    def call(self, inputs: Tensor, padding_mask: Tensor | None = None, token_ids: Tensor | None = None,
             attention_mask: Tensor | None = None, position_bias: PositionBias | None = None, training: bool = False,
             return_router_stats: bool = False, mask: Tensor | None = None, inputs_mask: Tensor | None = None) -> Any:
        self._check(inputs, attention_mask, position_bias, training, return_router_stats)
        attention_mask = masks.without_keys(attention_mask, masks.padding_mask(inputs, mask, inputs_mask))
        padding_mask = masks.padding_mask(inputs, padding_mask, mask, inputs_mask)
        query, query_stats = self._ask(inputs, padding_mask, token_ids, training)
        key_value, key_value_stats = self._answer(inputs, padding_mask, token_ids, training)
        value = drop_keys(self.dropout, ops.cast(key_value, inputs.dtype), training)
        outputs = attention_outputs(query, key_value, value, self.out, attention_mask, position_bias)
        router_stats = (query_stats, key_value_stats)
        if return_router_stats:
            return outputs, router_stats
        self.observe(router_stats, training)
        for experts, stats in zip(self.expert_layers, router_stats, strict=True):
            if training:
                experts.router.update_state(stats.expert_load)
            self.add_loss(losses.router_loss(stats, experts.load_balancing_loss_weight, experts.router_z_loss_weight))
        return outputs

    @property
    def cache_spec(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """Logical axes and dtype of each cached tensor."""
        return ((VALUE_CACHE_AXES, self.key_value_experts.compute_dtype),)

    def compute_cache(self, inputs: Tensor, padding_mask: Tensor | None = None,
                      token_ids: Tensor | None = None) -> tuple[tuple[Tensor], RouterStats]:
        """Computes the tensor to cache for `inputs`.

        Returns:
            `((key_value,), key_value_stats)`, the former <experts' dtype>[batch, heads, length, d_kv].
        """
        key_value, stats = self._answer(inputs, padding_mask, token_ids, training=False)
        return (as_cached_values(key_value),), stats

    def attend(self, inputs: Tensor, cache: tuple[Tensor], padding_mask: Tensor | None = None,
               token_ids: Tensor | None = None, attention_mask: Tensor | None = None,
               position_bias: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """Attends to the cache while decoding and returns `(outputs, query_stats)`."""
        (key_value,) = cache
        query, stats = self._ask(inputs, padding_mask, token_ids, training=False)
        value = ops.cast(key_value, inputs.dtype)
        return attention_outputs(query, key_value, value, self.out, attention_mask, position_bias, "bhkd"), stats

    def _ask(self, inputs, padding_mask, token_ids, training):
        query, stats = self.query_experts.forward(inputs, padding_mask=padding_mask, token_ids=token_ids,
                                                  training=training)
        return self._split_heads(query) * self.d_kv**-0.5, stats

    def _answer(self, inputs, padding_mask, token_ids, training):
        key_value, stats = self.key_value_experts.forward(inputs, padding_mask=padding_mask, token_ids=token_ids,
                                                          training=training)
        return self._split_heads(key_value), stats

    def _check(self, inputs, attention_mask, position_bias, training, return_router_stats):
        """Checks the call arguments that the experts do not check."""
        checks.flag("training", training)
        checks.flag("return_router_stats", return_router_stats)
        checks.tensor("inputs", inputs, "float", (None, None, self.out.shape[-1]))
        check_scores(self.num_heads, inputs, inputs, attention_mask, position_bias)

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def compute_output_spec(self, inputs: Tensor, attention_mask: Tensor | None = None,
                            position_bias: PositionBias | None = None, training: bool = False,
                            return_router_stats: bool = False, **kwargs: Any) -> Any:
        # Explicit for the same reason as in SwitchFeedForward.
        self._check(inputs, attention_mask, position_bias, training, return_router_stats)
        stats = tuple(experts.compute_output_spec(inputs, return_router_stats=True, **kwargs)[1]
                      for experts in self.expert_layers)
        outputs = keras.KerasTensor(inputs.shape, self.compute_dtype)
        return (outputs, stats) if return_router_stats else outputs

    def _split_heads(self, x):
        # [batch, length, heads * d_kv] -> [batch, length, heads, d_kv]
        x = ops.reshape(x, (*ops.shape(x)[:2], self.num_heads, self.d_kv))
        return partitioning.constrain(x, ("batch", "length", "heads", "kv"))

    def get_config(self) -> dict[str, Any]:
        experts = {name: keras.saving.serialize_keras_object(getattr(self, name))
                   for name in ("query_experts", "key_value_experts")}
        for serialized in experts.values():
            serialized.pop("build_config", None)  # this layer builds them
        return {**super().get_config(), **experts, "num_heads": self.num_heads, "d_kv": self.d_kv,
                "dropout_rate": self.dropout_rate, "init_scale": self.init_scale}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SwitchSelfAttention":
        experts = {name: keras.saving.deserialize_keras_object(config[name])
                   for name in ("query_experts", "key_value_experts")}
        return cls(**{**config, **experts})
