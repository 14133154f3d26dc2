"""The router: scores every expert for every token, lets a policy decide, and measures what came out."""

import keras
from keras import ops

from switch_tf import losses, partitioning
from switch_tf.choices import ROUTER_DTYPES, ROUTING_POLICIES, SEMANTICS, check_choice, check_routing, num_choices
from switch_tf.layers import policies
from switch_tf.layers.feed_forward import kernel_initializer
from switch_tf.layers.policies import ExpertChoices
from switch_tf.metrics import Mean, RouterStats

INPUT_DROPOUT_RATE = 0.1
# What a token that is not a number prefers: no expert in particular, and never a NaN in a sort.
NO_PREFERENCE = -1e9


@keras.saving.register_keras_serializable("switch_tf")
class Router(keras.layers.Layer):
    """Decides which experts each token goes to, into which slots, and with which gates.

    Everything is computed in `router_dtype` from the float32 kernel on: jitter, logits, softmax, choice, losses
    (selective precision, section 2.4). Padding is never routed, takes no slot and is not counted.

    Args:
        num_experts: int.
        num_selected_experts: int or None, experts per token; None for the policy's own number.
        policy: "switch" (section 2.1), "ntlb" (appendix B), "batch_prioritized", "top2" (GShard), "top_n",
            "expert_choice", "hash" or "sinkhorn": the functions of `policies`.
        exploration: what training does to find out about other experts (appendix C). "input_jitter" multiplies the
            router's copy of the inputs by uniform numbers in [1 - jitter_noise, 1 + jitter_noise]; "input_dropout"
            drops a tenth of it; "sample" draws the experts from the router's probabilities; "argmax" does nothing.
        jitter_noise: float in [0, 1).
        second_expert_policy: "random", "all", "none" or "threshold": which choices after the first "top2" and "top_n"
            carry out. "random" keeps one with probability gate / threshold in training and all at inference.
        second_expert_threshold: float in (0, 1).
        second_place_loss_weight: float. Adds so much of the second choices' balance loss to the first ones' (0.5 in
            Mesh TensorFlow), for policies that choose two.
        router_dtype: "float32", or "bfloat16" to see what selective precision prevents.
        init_scale: float, times 1 / d_model is the initial variance of the kernel.
        semantics: whose load-balancing loss, see `losses.load_balancing_loss`; "t5x" does not renormalise the gates of
            several choices.

    Call arguments:
        inputs: <any float>[group, tokens, d_model].
        padding_mask: <bool>[group, tokens], True where the token is real, or None.
        expert_capacity: int or int32 scalar tensor, slots of each expert for each group.
        token_ids: <int32>[group, tokens], for the hash policy.

    Returns: `(decisions, RouterStats)`; the former `policies.Decisions`, from expert choice `policies.ExpertChoices`.
    """

    def __init__(self, num_experts, num_selected_experts=None, policy="switch", exploration="input_jitter",
                 jitter_noise=0.01, second_expert_policy="random", second_expert_threshold=0.2,
                 second_place_loss_weight=0.0, router_dtype="float32", init_scale=0.1, semantics="switch_tf", **kwargs):
        super().__init__(**kwargs)
        check_choice("policy", policy, ROUTING_POLICIES)
        check_routing(policy, num_selected_experts, num_experts, exploration, second_expert_policy,
                      second_expert_threshold)
        check_choice("router_dtype", router_dtype, ROUTER_DTYPES)
        check_choice("semantics", semantics, SEMANTICS)
        if not 0 <= jitter_noise < 1:
            raise ValueError(f"jitter_noise must be in [0, 1), not {jitter_noise!r}.")
        if second_place_loss_weight and num_choices(policy, num_selected_experts) < 2:
            raise ValueError(f"second_place_loss_weight={second_place_loss_weight!r} needs a policy with second "
                             f"choices, such as 'top2', not {policy!r}.")
        self.num_experts = num_experts
        self.num_selected_experts = num_selected_experts
        self.policy = policy
        self.exploration = exploration
        self.jitter_noise = jitter_noise
        self.second_expert_policy = second_expert_policy
        self.second_expert_threshold = second_expert_threshold
        self.second_place_loss_weight = second_place_loss_weight
        self.router_dtype = router_dtype
        self.init_scale = init_scale
        self.semantics = semantics

    def build(self, input_shape):
        if self.policy == "hash":
            return  # nothing to learn
        d_model = input_shape[-1]
        self.kernel = partitioning.add_weight(
            self, "kernel", (d_model, self.num_experts), ("embed", "router_expert"),
            kernel_initializer(self.init_scale, d_model), dtype="float32")

    def call(self, inputs, padding_mask=None, expert_capacity=None, token_ids=None, training=False):
        padding_mask = None if padding_mask is None else ops.cast(padding_mask, "bool")
        if self.policy == "hash":
            return self._hash(token_ids, padding_mask, expert_capacity)
        logits = self._logits(inputs, training)
        probs = ops.softmax(logits, axis=-1)
        selection = ops.stop_gradient(ops.cast(logits, "float32"))
        selection = ops.clip(ops.where(ops.isnan(selection), NO_PREFERENCE, selection), NO_PREFERENCE, -NO_PREFERENCE)
        if training and self.exploration == "sample":
            selection = selection + _gumbel(partitioning.layer_seed(self, "sample"), ops.shape(selection))
        scores = policies.Scores(selection, probs, padding_mask)
        decisions = self._decide(scores, expert_capacity, training)
        return decisions, self._stats(scores, logits, decisions, expert_capacity)

    def _logits(self, inputs, training):
        x = ops.cast(inputs, self.router_dtype)
        if training and self.exploration == "input_jitter" and self.jitter_noise:
            noise = partitioning.uniform(partitioning.layer_seed(self, "jitter"), ops.shape(inputs))
            x = x * ops.cast(1 - self.jitter_noise + 2 * self.jitter_noise * noise, self.router_dtype)
        elif training and self.exploration == "input_dropout":
            noise = partitioning.uniform(partitioning.layer_seed(self, "input_dropout"), ops.shape(inputs))
            x = x * ops.cast(noise >= INPUT_DROPOUT_RATE, self.router_dtype) / (1 - INPUT_DROPOUT_RATE)
        logits = partitioning.product("gsm,me->gse", x, self.kernel)
        return partitioning.constrain(logits, ("group", None, "router_expert"))

    def _decide(self, scores, capacity, training):
        count = num_choices(self.policy, self.num_selected_experts)
        if self.policy == "switch":
            return policies.switch(scores, capacity)
        if self.policy == "ntlb":
            return policies.ntlb(scores, capacity)
        if self.policy == "sinkhorn":
            return policies.sinkhorn(scores, capacity, training)
        if self.policy == "expert_choice":
            return policies.expert_choice(scores, capacity)
        is_normalized = self.semantics != "t5x"
        if self.policy == "batch_prioritized":
            return policies.batch_prioritized(scores, count, capacity, is_normalized)

        def uniform(shape):
            return partitioning.uniform(partitioning.layer_seed(self, "second_expert"), shape)

        is_wanted = policies.second_choices(self.second_expert_policy, self.second_expert_threshold,
                                            uniform if training else None)
        return policies.top_n(scores, count, capacity, is_wanted, is_normalized)

    def _hash(self, token_ids, padding_mask, capacity):
        if token_ids is None:
            raise ValueError("The hash policy needs token_ids (<int32>, one for each token); pass them to the layer.")
        decisions = policies.hashed(token_ids, self.num_experts, padding_mask, capacity)
        one_expert = ops.one_hot(decisions.expert_index[..., 0], self.num_experts, dtype="float32")
        return decisions, self._stats(policies.Scores(one_expert, one_expert, padding_mask), None, decisions, capacity)

    def _stats(self, scores, logits, decisions, capacity):
        probs = ops.cast(scores.probs, "float32")
        real = ops.ones_like(probs[..., 0]) if scores.is_real is None else ops.cast(scores.is_real, "float32")
        num_real = ops.sum(real)
        entropy = -ops.sum(probs * ops.log(ops.maximum(probs, 1e-30)), axis=-1)
        load, num_filled, num_served = _counts(self.policy, scores, decisions, capacity)
        num_slots = ops.cast(ops.shape(probs)[0] * capacity * self.num_experts, "float32")
        no_loss = Mean(ops.zeros_like(num_real), num_real)
        return RouterStats(
            expert_load=load,
            fraction_tokens_dropped=Mean(num_real - num_served, num_real),
            router_entropy=Mean(ops.sum(entropy * real), num_real),
            router_confidence=Mean(ops.sum(ops.max(probs, axis=-1) * real), num_real),
            expert_usage=Mean(num_filled, num_slots),
            load_balancing_loss=self._balance(scores, decisions, no_loss),
            router_z_loss=no_loss if logits is None else losses.router_z_mean(logits, scores.is_real))

    def _balance(self, scores, decisions, no_loss):
        if self.policy in ("expert_choice", "hash", "sinkhorn"):
            return no_loss  # balanced by themselves
        # A token that was left to its second best expert still counts for the one it preferred.
        chosen = policies.first_choice(scores) if self.policy == "ntlb" else decisions.expert_index
        first = losses.load_balancing_mean(scores.probs, chosen, scores.is_real, self.semantics)
        if not self.second_place_loss_weight:
            return first
        second = losses.second_place_mean(scores.probs, chosen, scores.is_real, self.semantics)
        return Mean(first.total + self.second_place_loss_weight * second.total, first.weight)

    def get_config(self):
        names = ("num_experts", "num_selected_experts", "policy", "exploration", "jitter_noise", "second_expert_policy",
                 "second_expert_threshold", "second_place_loss_weight", "router_dtype", "init_scale", "semantics")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def _gumbel(seed, shape):
    """Gumbel noise: the argmax of logits plus it is a draw from their softmax, the top k a draw without replacement."""
    # Half of the generator's step instead of 0, so that both logarithms are finite; the largest draw is 1 - 2^-24.
    return -ops.log(-ops.log(ops.maximum(partitioning.uniform(seed, shape), 2.0**-25)))


def _counts(policy, scores, decisions, capacity):
    """`(expert_load, num_filled, num_served)`: a Mean over experts, filled slots, and tokens that an expert took."""
    num_groups, num_tokens, num_experts = ops.shape(scores.probs)
    if isinstance(decisions, ExpertChoices):
        is_filled = ops.cast(decisions.token_index < num_tokens, "int32")
        load = ops.cast(ops.sum(is_filled, axis=(0, 2)), "float32")
        num_filled = ops.sum(load)
        group = partitioning.arange(num_groups)[:, None, None]
        token = ops.reshape(decisions.token_index + group * (num_tokens + 1), (-1,))
        times_taken = ops.segment_sum(ops.reshape(is_filled, (-1,)), token, num_segments=num_groups * (num_tokens + 1))
        return Mean(load, num_filled), num_filled, ops.sum(ops.cast(times_taken > 0, "float32"))
    is_filled = decisions.slot < capacity
    first = policies.first_choice(scores) if policy == "ntlb" else decisions.expert_index[..., 0]
    wants = ops.one_hot(first, num_experts, dtype="int32")
    if scores.is_real is not None:
        wants = wants * ops.cast(scores.is_real[..., None], "int32")
    load = ops.cast(ops.sum(wants, axis=(0, 1)), "float32")
    return (Mean(load, ops.sum(load)), ops.sum(ops.cast(is_filled, "float32")),
            ops.sum(ops.cast(ops.any(is_filled, axis=-1), "float32")))
