"""Routers: which expert each token goes to, into which slot, and with what gate."""

from typing import Any, NamedTuple

import keras
from keras import ops

from switch_tf import losses, partitioning
from switch_tf.config import ROUTER_DTYPES, SEMANTICS, check_choice
from switch_tf.layers.feed_forward import kernel_initializer
from switch_tf.metrics import Mean, RouterStats

POLICIES = ("switch",)


class Decisions(NamedTuple):
    """What the router decided, for `dispatch` to carry out.

    `expert_index`: <int32>[group, tokens, choice], the chosen expert.
    `slot`: <int32>[group, tokens, choice], the token's place in its expert's buffer, in [0, capacity); `capacity` where
        the token was dropped or is padding.
    `gate`: <float32>[group, tokens, choice], what the expert's output is multiplied by.
    """

    expert_index: Any
    slot: Any
    gate: Any


@keras.saving.register_keras_serializable("switch_tf")
class Router(keras.layers.Layer):
    """The Switch router (section 2.1): each token to its most probable expert, first come first served.

    Everything is computed in `router_dtype` from the float32 kernel on: jitter, logits, softmax, argmax, losses
    (selective precision, section 2.4). Padding is never routed, takes no slot and is not counted.

    Args:
        num_experts: int.
        num_selected_experts: int, experts per token. 1 for the switch policy.
        policy: "switch".
        jitter_noise: float in [0, 1). In training the router's copy of the inputs is multiplied by uniform numbers in
            [1 - noise, 1 + noise].
        router_dtype: "float32", or "bfloat16" to see what selective precision prevents.
        init_scale: float, times 1 / d_model is the initial variance of the kernel.
        semantics: whose load-balancing loss, see `losses.load_balancing_loss`.

    Call arguments:
        inputs: <any float>[group, tokens, d_model].
        padding_mask: <bool>[group, tokens], True where the token is real, or None.
        expert_capacity: int or int32 scalar tensor, slots of each expert for each group.

    Returns: `(Decisions, RouterStats)`.
    """

    def __init__(self, num_experts, num_selected_experts=1, policy="switch", jitter_noise=0.01,
                 router_dtype="float32", init_scale=0.1, semantics="switch_tf", **kwargs):
        super().__init__(**kwargs)
        check_choice("policy", policy, POLICIES)
        check_choice("router_dtype", router_dtype, ROUTER_DTYPES)
        check_choice("semantics", semantics, SEMANTICS)
        if num_selected_experts != 1:
            raise ValueError(f"The switch policy selects 1 expert for each token, not {num_selected_experts!r}.")
        if not 0 <= jitter_noise < 1:
            raise ValueError(f"jitter_noise must be in [0, 1), not {jitter_noise!r}.")
        self.num_experts = num_experts
        self.num_selected_experts = num_selected_experts
        self.policy = policy
        self.jitter_noise = jitter_noise
        self.router_dtype = router_dtype
        self.init_scale = init_scale
        self.semantics = semantics

    def build(self, input_shape):
        d_model = input_shape[-1]
        self.kernel = partitioning.add_weight(
            self, "kernel", (d_model, self.num_experts), ("embed", "router_expert"),
            kernel_initializer(self.init_scale, d_model), dtype="float32", autocast=False)

    def call(self, inputs, padding_mask=None, expert_capacity=None, training=False):
        x = ops.cast(inputs, self.router_dtype)
        if training and self.jitter_noise:
            noise = partitioning.uniform(partitioning.layer_seed(self, "jitter"), ops.shape(inputs))
            x = x * ops.cast(1 - self.jitter_noise + 2 * self.jitter_noise * noise, self.router_dtype)
        router_logits = ops.einsum("gsm,me->gse", x, ops.cast(self.kernel, self.router_dtype))
        router_logits = partitioning.constrain(router_logits, ("group", None, "router_expert"))
        router_probs = ops.softmax(router_logits, axis=-1)
        expert_index = ops.cast(ops.argmax(router_logits, axis=-1), "int32")

        # [group, tokens, expert], 1 where a real token chose the expert
        first_choice = ops.one_hot(expert_index, self.num_experts, dtype="int32")
        routed = first_choice if padding_mask is None else first_choice * ops.cast(
            ops.expand_dims(padding_mask, -1), "int32")
        # A token's place is the number of earlier tokens of its group that chose the same expert.
        place = ops.sum(ops.cumsum(routed, axis=1) * routed, axis=-1) - 1
        is_kept = ops.logical_and(place >= 0, place < expert_capacity)
        slot = ops.where(is_kept, place, expert_capacity)
        top_prob = ops.cast(ops.sum(router_probs * ops.cast(first_choice, router_probs.dtype), axis=-1), "float32")
        gate = ops.where(is_kept, top_prob, 0.0)

        decisions = Decisions(*(ops.expand_dims(x, -1) for x in (expert_index, slot, gate)))
        return decisions, self._stats(router_logits, router_probs, routed, is_kept, top_prob, expert_index,
                                      padding_mask, expert_capacity)

    def _stats(self, logits, probs, routed, is_kept, top_prob, expert_index, padding_mask, expert_capacity):
        real = ops.ones_like(top_prob) if padding_mask is None else ops.cast(padding_mask, "float32")
        num_real = ops.sum(real)
        num_kept = ops.sum(ops.cast(is_kept, "float32"))
        probs32 = ops.cast(probs, "float32")
        entropy = -ops.sum(probs32 * ops.log(ops.maximum(probs32, 1e-30)), axis=-1)
        num_slots = ops.cast(ops.shape(probs)[0] * expert_capacity * self.num_experts, "float32")
        return RouterStats(
            expert_load=Mean(ops.cast(ops.sum(routed, axis=(0, 1)), "float32"), num_real),
            fraction_tokens_dropped=Mean(num_real - num_kept, num_real),
            router_entropy=Mean(ops.sum(entropy * real), num_real),
            router_confidence=Mean(ops.sum(top_prob * real), num_real),
            expert_usage=Mean(num_kept, num_slots),
            load_balancing_loss=losses.load_balancing_mean(probs, expert_index, padding_mask, self.semantics),
            router_z_loss=losses.router_z_mean(logits, padding_mask))

    def get_config(self):
        return {**super().get_config(), "num_experts": self.num_experts,
                "num_selected_experts": self.num_selected_experts, "policy": self.policy,
                "jitter_noise": self.jitter_noise, "router_dtype": self.router_dtype, "init_scale": self.init_scale,
                "semantics": self.semantics}
