"""Parameter and FLOP counts of a `SwitchConfig`, without building a model."""

import collections
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from switch_tf.configs import policies
from switch_tf.configs.choices import GATED_ACTIVATIONS


class Weight(NamedTuple):
    """`count` weights of one shape.

    Attributes:
        rows: Rows of one sequence that each is multiplied with. An expert has an even share of the tokens.
        choices: Experts per token.
    """

    part: str
    count: int  # type: ignore[assignment]  # hides `tuple.count`
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    rows: float = 0
    choices: float = 1

    @property
    def size(self) -> int:
        return self.count * math.prod(self.shape)


def weights(config: Any, inputs_length: int = 0, targets_length: int = 0) -> Iterator[Weight]:
    """Yields the weights of the model by kind."""
    d, heads, kv, f, e = config.d_model, config.num_heads, config.d_kv, config.d_ff, config.num_experts
    expert_f = config.expert_width
    stacks = [(config.num_encoder_layers, len(config.encoder_sparse_layers), inputs_length)]
    if not config.is_encoder_only:
        stacks.append((config.num_decoder_layers, len(config.decoder_sparse_layers), targets_length))
    yield Weight("embedding", 1, (config.vocab_size, d), ("vocab", "embed"))
    if not config.logits_via_embedding:
        yield Weight("logits", 1, (d, config.vocab_size), ("embed", "vocab"))
    num_wi = 2 if config.activation in GATED_ACTIVATIONS else 1
    for is_decoder, (num_layers, num_sparse, tokens) in enumerate(stacks):
        num_sparse_mlps = num_sparse if config.has_feed_forward_experts else 0
        num_sparse_attentions = num_sparse if config.has_attention_experts else 0
        num_expert_layers = num_sparse_mlps + 2 * num_sparse_attentions
        num_attentions = (1 + is_decoder) * num_layers
        num_crossed = 2 * is_decoder * num_layers
        projection = (d, heads, kv), ("embed", "heads", "kv")
        yield Weight("attention", 3 * (num_attentions - num_sparse_attentions) - num_crossed, *projection, tokens)
        yield Weight("attention", num_crossed, *projection, inputs_length)  # keys and values of cross-attention
        yield Weight("attention", num_attentions, (heads, kv, d), ("heads", "kv", "embed"), tokens)
        yield Weight("position_bias", num_layers if config.relative_attention_per_layer else 1,
                     (heads, config.relative_attention_num_buckets), ("heads", "relpos_buckets"))
        num_extra = num_sparse if config.extra_mlp else 0
        yield Weight("norm", num_attentions + num_layers + num_extra + 1, (d,), ("embed",))
        num_dense = num_layers - num_sparse_mlps + num_extra
        yield Weight("feed_forward", num_wi * num_dense, (d, f), ("embed", "mlp"), tokens)
        yield Weight("feed_forward", num_dense, (f, d), ("mlp", "embed"), tokens)
        if not num_expert_layers:
            continue
        policy = policies.get(config.routing(is_decoder)[0])
        for shape, axes, _ in policy.router_weights(d, e).values():
            # A matrix takes a product with each token.
            yield Weight("router", num_expert_layers, shape, axes, tokens if len(shape) > 1 else 0)
        # On average the capacity factor if experts choose.
        uses = tokens / e, config.train_capacity_factor if policy.experts_choose else config.num_choices(is_decoder)
        yield Weight("experts", num_wi * num_expert_layers, (e, d, expert_f), ("expert", "embed", "expert_mlp"), *uses)
        for count, width in ((num_sparse_mlps, d), (2 * num_sparse_attentions, heads * kv)):
            yield Weight("experts", count, (e, expert_f, width), ("expert", "expert_mlp", "embed"), *uses)


def flops_by_part(config: Any, inputs_length: int, targets_length: int) -> dict[str, int]:
    """Counts the FLOPs of one sequence's forward pass by part, two per multiply-add.

    The first four parts are the products of Table 9 (footnote 7). `attention_scores` are queries by keys and
    probabilities by values. `capacity_padding` counts empty slots at `train_capacity_factor`.
    """
    d, inner, num_dec = config.d_model, config.num_heads * config.d_kv, config.num_decoder_layers
    flops: Any = collections.Counter()
    once = 0.0
    for weight in weights(config, inputs_length, targets_length):
        flops[weight.part] += 2 * weight.size * weight.rows * weight.choices
        once += 2 * weight.size * weight.rows * (weight.part == "experts")
    scores = inner * (config.num_encoder_layers * inputs_length**2
                      + num_dec * targets_length * (targets_length + inputs_length))
    return {
        **{part: round(flops[part]) for part in ("attention", "feed_forward", "experts", "router")},
        "attention_scores": 2 * 2 * scores,
        "logits": 2 * d * config.vocab_size * (inputs_length if config.is_encoder_only else targets_length),
        "capacity_padding": round(max(0.0, config.train_capacity_factor * once - flops["experts"])),
    }


def flops_per_step(config: Any, batch_size: int, inputs_length: int, targets_length: int) -> int:
    """Counts the FLOPs of a training step. The backward pass costs twice the forward pass.

    Excludes capacity padding and recomputation.
    """
    parts = flops_by_part(config, inputs_length, targets_length)
    return 3 * batch_size * sum(size for part, size in parts.items() if part != "capacity_padding")
