"""Parameter and FLOP counts of a `SwitchConfig`, without building a model."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from switch_tf.configs import policies
from switch_tf.configs.choices import GATED_ACTIVATIONS


class Weight(NamedTuple):
    """`count` weights of one shape."""

    part: str
    count: int  # type: ignore[assignment]  # hides `tuple.count`
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    @property
    def size(self) -> int:
        return self.count * math.prod(self.shape)


def weights(config: Any) -> Iterator[Weight]:
    """Yields the weights of the model by kind."""
    d, heads, kv, f, e = config.d_model, config.num_heads, config.d_kv, config.d_ff, config.num_experts
    expert_f = config.expert_width
    stacks = [(config.num_encoder_layers, len(config.encoder_sparse_layers), 1, config.routing_policy)]
    if not config.is_encoder_only:
        stacks.append((config.num_decoder_layers, len(config.decoder_sparse_layers), 2, config.decoder_policy))
    yield Weight("embedding", 1, (config.vocab_size, d), ("vocab", "embed"))
    if not config.logits_via_embedding:
        yield Weight("logits", 1, (d, config.vocab_size), ("embed", "vocab"))
    num_wi = 2 if config.activation in GATED_ACTIVATIONS else 1
    for num_layers, num_sparse, num_attentions, policy in stacks:
        num_sparse_mlps = num_sparse if config.has_feed_forward_experts else 0
        num_sparse_attentions = num_sparse if config.has_attention_experts else 0
        num_expert_layers = num_sparse_mlps + 2 * num_sparse_attentions
        num_dense = num_layers - num_sparse_mlps
        yield Weight("attention", 3 * (num_attentions * num_layers - num_sparse_attentions), (d, heads, kv),
                     ("embed", "heads", "kv"))
        yield Weight("attention", num_attentions * num_layers, (heads, kv, d), ("heads", "kv", "embed"))
        yield Weight("position_bias", num_layers if config.relative_attention_per_layer else 1,
                     (heads, config.relative_attention_num_buckets), ("heads", "relpos_buckets"))
        num_extra = num_sparse if config.extra_mlp else 0
        yield Weight("norm", (num_attentions + 1) * num_layers + num_extra + 1, (d,), ("embed",))
        yield Weight("feed_forward", num_wi * (num_dense + num_extra), (d, f), ("embed", "mlp"))
        yield Weight("feed_forward", num_dense + num_extra, (f, d), ("mlp", "embed"))
        if num_expert_layers:
            for weight in policies.get(policy).router_weights(d, e).values():
                yield Weight("router", num_expert_layers, weight.shape, weight.axes)
        yield Weight("experts", num_wi * num_expert_layers, (e, d, expert_f), ("expert", "embed", "expert_mlp"))
        yield Weight("experts", num_sparse_mlps, (e, expert_f, d), ("expert", "expert_mlp", "embed"))
        yield Weight("experts", 2 * num_sparse_attentions, (e, expert_f, heads * kv), ("expert", "expert_mlp", "embed"))


def flops_by_part(config: Any, inputs_length: int, targets_length: int) -> dict[str, int]:
    """Counts the FLOPs of one sequence's forward pass by part, two per multiply-add.

    The first four parts are the products of Table 9 (footnote 7). `attention_scores` are queries by keys and
    probabilities by values. `capacity_padding` counts empty slots at `train_capacity_factor`.
    """
    d, inner = config.d_model, config.num_heads * config.d_kv
    feed_forward = _feed_forward_products(config, config.d_ff, d)
    # Output widths of a sparse layer's expert layers.
    expert_widths = [d] * config.has_feed_forward_experts + [inner, inner] * config.has_attention_experts
    experts = sum(_feed_forward_products(config, config.expert_width, width) for width in expert_widths)
    encoder_tokens, decoder_tokens = inputs_length, 0 if config.is_encoder_only else targets_length
    num_enc, num_dec = config.num_encoder_layers, config.num_decoder_layers
    layer_tokens = num_enc * encoder_tokens + num_dec * decoder_tokens
    sparse_tokens = {False: len(config.encoder_sparse_layers) * encoder_tokens,
                     True: len(config.decoder_sparse_layers) * decoder_tokens}
    num_sparse_tokens = sum(sparse_tokens.values())
    has_dense_mlp = config.extra_mlp or not config.has_feed_forward_experts
    dense_tokens = layer_tokens - (0 if has_dense_mlp else num_sparse_tokens)
    expert_rows = router_products = 0
    for is_decoder, tokens in sparse_tokens.items():
        policy = policies.get(config.routing(is_decoder)[0])
        # On average the capacity factor if experts choose.
        expert_rows += tokens * (config.train_capacity_factor if policy.experts_choose else
                                 config.num_choices(is_decoder))
        if tokens:
            router_products += tokens * sum(math.prod(shape) for shape, _, _ in policy.router_weights(
                d, config.num_experts).values() if len(shape) > 1)  # a matrix takes a product with each token
    attention = 4 * d * inner * layer_tokens + num_dec * 2 * d * inner * (encoder_tokens + decoder_tokens)
    if config.has_attention_experts:
        attention -= 3 * d * inner * num_sparse_tokens
    scores = inner * (num_enc * encoder_tokens**2 + num_dec * decoder_tokens * (decoder_tokens + encoder_tokens))
    return {
        "attention": 2 * attention,
        "feed_forward": 2 * feed_forward * dense_tokens,
        "experts": round(2 * experts * expert_rows),
        "router": 2 * len(expert_widths) * router_products,
        "attention_scores": 2 * 2 * scores,
        "logits": 2 * d * config.vocab_size * (encoder_tokens if config.is_encoder_only else decoder_tokens),
        "capacity_padding": round(2 * experts * max(
            0.0, config.train_capacity_factor * num_sparse_tokens - expert_rows)),
    }


def _feed_forward_products(config, hidden_width, output_width):
    """Counts multiply-adds per token."""
    return ((2 if config.activation in GATED_ACTIVATIONS else 1) * config.d_model + output_width) * hidden_width


def flops_per_step(config: Any, batch_size: int, inputs_length: int, targets_length: int) -> int:
    """Counts the FLOPs of a training step. The backward pass costs twice the forward pass.

    Excludes capacity padding and recomputation.
    """
    parts = flops_by_part(config, inputs_length, targets_length)
    return 3 * batch_size * sum(size for part, size in parts.items() if part != "capacity_padding")
