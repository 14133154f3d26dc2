"""The router: scores, a policy and statistics."""

import dataclasses
import functools
from typing import Any

import keras
from keras import ops

from switch_tf import checks, losses, partitioning
from switch_tf.configs import policies
from switch_tf.configs.semantics import rules_of
from switch_tf.layers import masks, slots
from switch_tf.layers.basic import Layer, drop, kernel_initializer, serializable
from switch_tf.layers.decisions import ExpertChoices, Options, Scores, TokenChoices
from switch_tf.metrics import Mean, RouterStats
from switch_tf.ops import dtypes, indexing, products
from switch_tf.partitioning.tensors import Mask, Shape, Tensor
from switch_tf.refusals import Refusal

INPUT_DROPOUT_RATE = 0.1
# Score of NaN tokens, so that sorting never sees a NaN.
NO_PREFERENCE = -1e9


@serializable
class Router(Layer):
    """Assigns experts, slots and gates to tokens.

    Computes in `router_dtype` from a float32 kernel (selective precision, section 2.4). Padding takes no slot and is
    not counted.

    Args:
        num_selected_experts: Experts per token. None for the policy's default.
        policy: "switch" (section 2.1), "ntlb" (appendix B), "batch_prioritized", "top2" (GShard), "top_n",
            "expert_choice", "hash", "sinkhorn", or a registered name, see `policies.register`. Or a record such as
            `policies.Top2(threshold=0.5)`.
        exploration: In training (appendix C). "input_jitter" multiplies the router's copy of the inputs by
            uniform numbers in [1 - jitter_noise, 1 + jitter_noise]. "input_dropout" drops a tenth of it. "sample" draws
            experts from the router's probabilities. "argmax" does not explore.
        jitter_noise: In [0, 1).
        second_expert_policy, second_expert_threshold: Parameters of "top2" and "top_n" if `policy` is a name, see
            `policies.TopN`.
        second_place_loss_weight: Relative weight of the second choices' balance loss (0.5 in Mesh TensorFlow). Requires
            at least two choices.
        router_dtype: "float32", or "bfloat16" to measure the effect of selective precision.
        init_scale: The kernel's initial variance is init_scale / d_model.
        semantics: See `losses.load_balancing_loss`. "t5x" also leaves the gates of several choices unnormalized.

    Call arguments:
        inputs: <any float>[group, tokens, d_model].
        padding_mask: <bool>[group, tokens], True at real tokens. Defaults to Keras' mask. Ignored by semantics that
            route padding.
        expert_capacity: int or integer scalar tensor. Slots per expert and group.
        token_ids: <int32>[group, tokens]. Required by "hash".
        is_present: <bool>[group, tokens], False at the padding of an incomplete group. None if all are present.
        mask, inputs_mask: Passed by Keras.

    Returns: `(decisions, RouterStats)`: `decisions.TokenChoices`, or `decisions.ExpertChoices` if experts choose.
    """

    def __init__(self, num_experts: int, num_selected_experts: int | None = None,
                 policy: str | policies.Policy = "switch", exploration: str = "input_jitter",
                 jitter_noise: float = 0.01, second_expert_policy: str = "random",
                 second_expert_threshold: float = 0.2, second_place_loss_weight: float = 0.0,
                 router_dtype: str = "float32", init_scale: float = 0.1, semantics: str = "switch_tf", **kwargs: Any):
        super().__init__(**kwargs)
        self._keep(num_experts=num_experts, exploration=exploration, router_dtype=router_dtype,
                   jitter_noise=jitter_noise, init_scale=init_scale, second_expert_policy=second_expert_policy,
                   second_expert_threshold=second_expert_threshold, second_place_loss_weight=second_place_loss_weight)
        self.num_selected_experts = checks.optional("num_selected_experts", num_selected_experts, checks.integer, 1)
        self._policy = policies.resolve(policy, second_expert_policy, second_expert_threshold)
        policies.check_options(self._policy, num_selected_experts, num_experts, exploration)
        self._rules = rules_of(semantics)
        if second_place_loss_weight and self._policy.count(num_selected_experts) < 2:
            raise Refusal(f"second_place_loss_weight={second_place_loss_weight!r} needs a policy with second "
                          f"choices, such as 'top2', not {self._policy.name!r}.")
        self.policy, self.semantics = policy, semantics
        self._wide_dtype = dtypes.wide_dtype(self.compute_dtype)
        self.experts_choose = self._policy.experts_choose
        # Whether the policy keeps a state between steps.
        self.has_state = bool(self._policy.state)
        # Whether `load_balancing_loss` is a losses.Balance, for `models.stack.join`.
        self.reports_balance = False

    def build(self, input_shape: Shape) -> None:
        self._state_vectors = {
            name: partitioning.add_weight(self, name, (self.num_experts,), ("router_expert",), "zeros", trainable=False)
            for name in self._policy.state}
        weights = {}
        if self._policy.has_scores:
            for name, (shape, axes, initial) in self._policy.router_weights(
                    checks.width(input_shape), self.num_experts).items():
                initializer = (kernel_initializer(self.init_scale, shape[0]) if initial is None else
                               keras.initializers.Constant(initial))
                weights[name] = partitioning.add_weight(self, name, shape, axes, initializer, dtype=self._wide_dtype)
        self.kernel = weights.pop("kernel", None)
        self._policy_weights = weights

    def call(self, inputs: Tensor, padding_mask: Mask = None, expert_capacity: int | Tensor | None = None,
             token_ids: Tensor | None = None, training: bool = False, is_present: Tensor | None = None,
             mask: Mask = None,
             inputs_mask: Mask = None) -> tuple[TokenChoices | ExpertChoices, RouterStats]:
        training = checks.flag("training", training)
        checks.tensor("inputs", inputs, "float", (None, None, None))
        expert_capacity = checks.size("expert_capacity", expert_capacity, at_least=1)
        if not isinstance(expert_capacity, int):
            expert_capacity = ops.cast(expert_capacity, "int32")
        if token_ids is not None:
            token_ids = indexing.check_ids("token_ids", token_ids, inputs.shape[:2])
        policy = self._policy
        if policy.needs_token_ids and token_ids is None:
            raise Refusal(f"The {policy.name} policy needs token_ids (<int32>, one for each token); pass "
                          "them to the layer.")
        if 0 in inputs.shape[:2]:
            raise Refusal(f"inputs must hold at least one group of at least one token, not the shape "
                          f"{tuple(inputs.shape)}.")
        is_real = masks.padding_mask(inputs, padding_mask, mask, inputs_mask)
        is_present = masks.padding_mask(inputs, is_present, name="is_present")
        if self._rules.routes_padding:
            is_real = is_present
        if is_real is None:
            is_real = ops.ones(ops.shape(inputs)[:2], "bool")
        logits = selection = probs = None
        if policy.has_scores:
            logits = self._logits(inputs, training)
            probs = ops.softmax(logits, axis=-1)
            selection = ops.stop_gradient(dtypes.widen(logits))
            selection = ops.clip(ops.where(ops.isnan(selection), NO_PREFERENCE, selection), NO_PREFERENCE,
                                 -NO_PREFERENCE)
            if training and self.exploration == "sample":
                draws = self._draw("sample", ops.shape(selection))
                selection = selection + _gumbel(ops.cast(draws, selection.dtype))
        scores = Scores(selection, probs, is_real, token_ids)
        uniform = functools.partial(self._draw, "second_expert") if training else None
        decisions = policies.imported(policy.decide)(scores, Options(
            self.num_experts, expert_capacity, policy.count(self.num_selected_experts), self._rules.normalizes_gates,
            training, policy, uniform, self._read_state()))
        if logits is None:
            # Without scores, each token's expert has probability 1.
            probs = ops.one_hot(decisions.expert_index[..., 0], self.num_experts, dtype=self._wide_dtype)
            scores = scores._replace(probs=probs)
        return decisions, self._stats(scores, logits, decisions)

    def _logits(self, inputs, training):
        """<any float>[group, tokens, d_model] -> <router dtype>[group, tokens, expert]."""
        x = ops.cast(inputs, dtypes.wide_dtype(inputs.dtype, self.router_dtype))
        if training and self.exploration == "input_jitter" and self.jitter_noise:
            noise = self._draw("jitter", ops.shape(inputs))
            # A float64 model would show that XLA and TensorFlow round float32 factors differently.
            noise = ops.cast(noise, dtypes.wide_dtype(x.dtype))
            x = x * ops.cast(1 - self.jitter_noise + 2 * self.jitter_noise * noise, x.dtype)
        elif training and self.exploration == "input_dropout":
            x = drop(x, self._draw("input_dropout", ops.shape(inputs)), INPUT_DROPOUT_RATE)
        logits = None if self.kernel is None else products.product("gsm,me->gse", x, self.kernel)
        if self._policy.score:
            logits = policies.imported(self._policy.score)(self._policy, x, logits, {
                name: partitioning.use(variable, x.dtype) for name, variable in self._policy_weights.items()})
            checks.tensor(f"The logits of the policy {self._policy.name!r}", logits, "float",
                          (*inputs.shape[:2], self.num_experts))
        return partitioning.constrain(logits, ("group", None, "router_expert"))

    def update_state(self, expert_load: Mean) -> None:
        """Updates the policy's state, if any, after a training step.

        Args:
            expert_load: Mean of <float32>[expert] over the global batch.
        """
        if not self.has_state:
            return
        state = policies.imported(self._policy.update)(self._policy, self._read_state(), expert_load.value)
        for name, variable in self._state_vectors.items():
            variable.assign(state[name])

    def _read_state(self):
        return {name: partitioning.use(variable, variable.dtype) for name, variable in self._state_vectors.items()}

    def _stats(self, scores, logits, decisions):
        """`scores.probs` is not None here."""
        probs = dtypes.widen(scores.probs)
        real = ops.cast(scores.is_real, probs.dtype)
        num_real = ops.sum(real)
        entropy = -ops.sum(probs * ops.log(ops.maximum(probs, 1e-30)), axis=-1)
        chosen = None
        if not isinstance(decisions, ExpertChoices):
            chosen = slots.top_experts(scores, 1) if self._policy.counts_preference else decisions.expert_index
        expert_load, num_filled, num_served = decisions.counts(scores.is_real, chosen, probs.dtype)
        num_slots = ops.cast(ops.shape(probs)[0] * decisions.capacity * self.num_experts, probs.dtype)
        balance_loss = no_loss = Mean(ops.zeros_like(num_real), num_real)
        if not self._policy.is_balanced:
            balance = losses.balance(scores.probs, chosen, scores.is_real, self.semantics,
                                     self.second_place_loss_weight)
            balance_loss = balance if self.reports_balance else balance.mean
        return RouterStats(
            expert_load=expert_load,
            fraction_tokens_dropped=Mean(num_real - num_served, num_real),
            router_entropy=Mean(ops.sum(entropy * real), num_real),
            router_confidence=Mean(ops.sum(ops.max(probs, axis=-1) * real), num_real),
            expert_usage=Mean(num_filled, num_slots),
            load_balancing_loss=balance_loss,
            router_z_loss=no_loss if logits is None else losses.router_z_mean(logits, scores.is_real))

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        if isinstance(self.policy, policies.Policy):
            registered = policies.get(self.policy.name)
            changes = {field.name: value for field in dataclasses.fields(self.policy)
                       if (value := getattr(self.policy, field.name)) != getattr(registered, field.name)}
            config["policy"] = {"name": registered.name, **changes}
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Router":
        policy = config["policy"]
        if isinstance(policy, dict):
            policy = dataclasses.replace(policies.get(policy["name"]), **policy)
        return cls(**{**config, "policy": policy})


def _gumbel(draws):
    """Converts uniform draws to Gumbel noise: the top k of logits plus noise sample the softmax without replacement."""
    # Half the generator's step for a draw of 0 keeps both logarithms finite. The largest draw is 1 - 2^-24.
    return -ops.log(-ops.log(ops.maximum(draws, 2.0**-25)))
