"""The Switch layer: a feed-forward layer of experts, each token going to one of them."""

import keras
from keras import ops

from switch_tf import losses, partitioning
from switch_tf.config import DISPATCHES, SEMANTICS, check_choice
from switch_tf.layers import dispatch as dispatching
from switch_tf.layers import grouping
from switch_tf.layers.experts import ExpertFeedForward
from switch_tf.layers.routing import Router


@keras.saving.register_keras_serializable("switch_tf")
class SwitchFeedForward(keras.layers.Layer):
    """Sends each token to its most probable expert and gates what comes back (arXiv 2101.03961, section 2).

    Tokens are routed in groups; an expert has a fixed number of slots for each group, and a token that finds none
    left gets exactly zero, so that a residual connection around the layer passes it on unchanged. Used in a model of
    your own, the layer adds its weighted losses with `add_loss`.

    Args:
        num_experts, d_ff, activation: of the experts, see `ExpertFeedForward`.
        group_size, num_groups_multiple: int. Groups of at most `group_size` tokens, a multiple of
            `num_groups_multiple` in number. A training batch that cannot be cut so is refused; elsewhere, and where the
            batch size is unknown while tracing, it is filled up with masked tokens.
        jitter_noise: float, see `Router`.
        train_capacity_factor, eval_capacity_factor: float. Slots over tokens per expert (equation 3).
        min_expert_capacity: int, at least so many slots, as far as the group has tokens.
        expert_dropout_rate: float, see `ExpertFeedForward`.
        load_balancing_loss_weight, router_z_loss_weight: float, coefficients of the losses that `layer(x)` adds.
        router_dtype, init_scale: see `Router`.
        semantics: "switch_tf"; "mtf" for Mesh TensorFlow's grouping, capacity and load-balancing loss; "hf" makes
            each sequence a group with `expert_capacity` slots and routes padding, as Hugging Face does.
        expert_capacity: int, for semantics "hf" only.
        dispatch: "einsum", "index" or "auto", see `dispatch`.

    Call arguments:
        inputs: <compute dtype>[batch, length, d_model].
        padding_mask: <bool>[batch, length], True where the token is real, or None.
        token_ids: <int32>[batch, length], for routers that hash them; the switch policy does not.
        return_router_stats: bool. Hand back the statistics instead of adding losses; `forward` sets it.

    Returns: <compute dtype>, same shape as `inputs`.
    """

    # More arguments than the style guide likes: each is a knob of the paper that a user's functional model may turn.
    def __init__(self, num_experts, d_ff, activation="relu", group_size=4096, num_groups_multiple=1, jitter_noise=0.01,
                 train_capacity_factor=1.25, eval_capacity_factor=2.0, min_expert_capacity=4, expert_dropout_rate=0.0,
                 load_balancing_loss_weight=1e-2, router_z_loss_weight=1e-3, router_dtype="float32", init_scale=0.1,
                 semantics="switch_tf", expert_capacity=None, dispatch="auto", **kwargs):
        super().__init__(**kwargs)
        check_choice("semantics", semantics, SEMANTICS)
        check_choice("dispatch", dispatch, DISPATCHES)
        for name, value in (("num_experts", num_experts), ("d_ff", d_ff), ("group_size", group_size),
                            ("num_groups_multiple", num_groups_multiple), ("min_expert_capacity", min_expert_capacity),
                            ("expert_capacity", 1 if expert_capacity is None else expert_capacity)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}.")
        for name, value in (("train_capacity_factor", train_capacity_factor),
                            ("eval_capacity_factor", eval_capacity_factor)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, not {value!r}: without slots every token is dropped.")
        if (semantics == "hf") != (expert_capacity is not None):
            raise ValueError(f"expert_capacity goes with semantics='hf' and nothing else; it is {expert_capacity!r} "
                             f"with semantics={semantics!r}.")
        self.num_experts = num_experts
        self.d_ff = d_ff
        self.activation = activation
        self.group_size = group_size
        self.num_groups_multiple = num_groups_multiple
        self.jitter_noise = jitter_noise
        self.train_capacity_factor = train_capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_expert_capacity = min_expert_capacity
        self.expert_dropout_rate = expert_dropout_rate
        self.load_balancing_loss_weight = load_balancing_loss_weight
        self.router_z_loss_weight = router_z_loss_weight
        self.router_dtype = router_dtype
        self.init_scale = init_scale
        self.semantics = semantics
        self.expert_capacity = expert_capacity
        self.dispatch = dispatch
        self.router = Router(num_experts, jitter_noise=jitter_noise, router_dtype=router_dtype, init_scale=init_scale,
                             semantics=semantics, dtype=self.dtype_policy, name="router")
        self.experts = ExpertFeedForward(num_experts, d_ff, activation, expert_dropout_rate, init_scale,
                                         dtype=self.dtype_policy, name="experts")

    def build(self, input_shape):
        d_model = input_shape[-1]
        self.router.build((None, None, d_model))
        self.experts.build((self.num_experts, None, None, d_model))

    def forward(self, inputs, padding_mask=None, token_ids=None, training=False):
        """Like calling the layer, but returns `(outputs, RouterStats)` and adds no losses; what models call."""
        return self(inputs, padding_mask=padding_mask, token_ids=token_ids, training=training, return_router_stats=True)

    def call(self, inputs, padding_mask=None, token_ids=None, training=False, return_router_stats=False):
        batch, length, d_model = ops.shape(inputs)
        groups, expert_capacity = self._plan(batch, length, training)
        is_real = None if self.semantics == "hf" else padding_mask
        tokens = ops.reshape(inputs, (-1, d_model))
        is_real = None if is_real is None else ops.reshape(ops.cast(is_real, "bool"), (-1,))
        tokens, is_real = _fill(tokens, is_real, batch * length, groups)

        # [batch, length, d_model] -> [group, tokens, d_model]
        tokens = ops.reshape(tokens, (groups.count, groups.size, d_model))
        tokens = partitioning.constrain(tokens, ("group", None, "embed"))
        is_real = None if is_real is None else ops.reshape(is_real, (groups.count, groups.size))
        decisions, stats = self.router(tokens, padding_mask=is_real, expert_capacity=expert_capacity,
                                       training=training)

        carrier = dispatching.create(self.dispatch, decisions, self.num_experts, expert_capacity)
        # [group, tokens, d_model] -> [expert, group, capacity, d_model], first where the groups are, then where the
        # experts are: between the two lies the all-to-all.
        buffers = partitioning.constrain(carrier.dispatch(tokens), (None, "group", "capacity", "embed"))
        buffers = partitioning.constrain(buffers, dispatching.BUFFER_AXES)
        buffers = partitioning.constrain(self.experts(buffers, training=training), dispatching.BUFFER_AXES)
        buffers = partitioning.constrain(buffers, (None, "group", "capacity", "embed"))
        outputs = ops.cast(carrier.combine(buffers), inputs.dtype)
        outputs = partitioning.constrain(outputs, ("group", None, "embed"))

        outputs = ops.reshape(ops.reshape(outputs, (-1, d_model))[:batch * length], (batch, length, d_model))
        outputs = partitioning.constrain(outputs, ("batch", "length", "embed"))
        if return_router_stats:
            return outputs, stats
        self.add_loss(losses.router_loss(stats, self.load_balancing_loss_weight, self.router_z_loss_weight))
        return outputs

    def _plan(self, batch, length, training):
        """Groups of the batch and slots of an expert for each."""
        if self.semantics == "hf":
            return grouping.Groups(batch, length), self.expert_capacity
        groups = grouping.plan_groups((batch, length), self.group_size, self.num_groups_multiple, training,
                                      self.semantics)
        factor = self.train_capacity_factor if training else self.eval_capacity_factor
        return groups, grouping.expert_capacity(groups.size, factor, self.num_experts, self.min_expert_capacity,
                                                self.semantics)

    def get_config(self):
        names = ("num_experts", "d_ff", "activation", "group_size", "num_groups_multiple", "jitter_noise",
                 "train_capacity_factor", "eval_capacity_factor", "min_expert_capacity", "expert_dropout_rate",
                 "load_balancing_loss_weight", "router_z_loss_weight", "router_dtype", "init_scale", "semantics",
                 "expert_capacity", "dispatch")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def _fill(tokens, is_real, num_tokens, groups):
    """Appends masked tokens until the groups are full."""
    missing = groups.count * groups.size - num_tokens
    if isinstance(missing, int) and missing == 0:
        return tokens, is_real
    is_real = ops.ones(ops.shape(tokens)[:1], "bool") if is_real is None else is_real
    return ops.pad(tokens, ((0, missing), (0, 0))), ops.pad(is_real, ((0, missing),))
