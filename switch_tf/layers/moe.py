"""The Switch layer: a feed-forward layer of experts with a router."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from switch_tf import checks, context, losses, partitioning
from switch_tf.configs.policies import Policy
from switch_tf.configs.semantics import Grouping
from switch_tf.layers import dispatch, grouping, masks
from switch_tf.layers.basic import KeepsShape, serializable
from switch_tf.layers.feed_forward import ExpertFeedForward
from switch_tf.layers.routing import Router
from switch_tf.metrics import Mean, RouterStats
from switch_tf.ops import indexing
from switch_tf.partitioning.tensors import Mask, Shape, Tensor
from switch_tf.refusals import Refusal


class Routed:
    """Base class of layers and models with routers. Precedes Keras' base class.

    Attributes:
        router_observer: In training, the call passes one RouterStats per router to its `update`, and traces it.
    """

    router_observer: Any = None
    # From Keras' base class.
    add_loss: Callable
    call: Callable
    __call__: Callable

    @property
    def routers(self) -> dict[str, int]:
        """Number of experts by router name."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls without adding losses and returns `(outputs, router_stats)`.

        `training` defaults to False, even inside a model in training. `router_stats` is the RouterStats of a layer with
        one router, or a tuple of them in the order of `routers`.
        """
        if "training" not in list(inspect.signature(type(self).call).parameters)[1:1 + len(args)]:
            kwargs = {"training": False, **kwargs}
        return self(*args, **kwargs, return_router_stats=True)

    def add_router_losses(self, expert_layers: Sequence["SwitchFeedForward"], router_stats: tuple[RouterStats, ...],
                          training: bool) -> None:
        """Adds the weighted losses. In training, also updates the observer and stateful routers."""
        if training and self.router_observer is not None:
            self.router_observer.update(router_stats)
        for experts, stats in zip(expert_layers, router_stats, strict=True):
            if training:
                experts.router.update_state(stats.expert_load)
            self.add_loss(losses.router_loss(stats, experts.load_balancing_loss_weight, experts.router_z_loss_weight))


@serializable
class SwitchFeedForward(Routed, KeepsShape):
    """Sparse feed-forward layer that routes each token to experts (arXiv 2101.03961, section 2).

    Tokens compete for expert slots within their group. A dropped token gets exactly zero. Calls add the weighted losses
    with `add_loss`.

    Args:
        num_experts, d_ff, activation, output_dim: See `ExpertFeedForward`.
        group_size, num_groups_multiple: See `semantics.Grouping`. A training batch must divide into groups. Other
            batches are padded with masked tokens.
        train_capacity_factor, eval_capacity_factor, min_expert_capacity, expert_capacity: See `semantics.Grouping`.
        expert_dropout_rate: The experts' `dropout_rate`.
        load_balancing_loss_weight, router_z_loss_weight: Coefficients of the losses that `layer(x)` adds.
        init_scale: See `Router` and `ExpertFeedForward`. None for the router's.
        jitter_noise, router_dtype: See `Router`. None for the router's.
        semantics: "switch_tf", or "mtf", "t5x" or "hf" for the rules of Mesh TensorFlow, T5X or Hugging Face, see
            `semantics.Rules`.
        dispatch: "einsum", "index", "ragged" or "auto", see `layers.dispatch`.
        router: Name or record of a policy, or a `Router`. A Router sets jitter_noise, router_dtype and init_scale.

    Call arguments:
        inputs: <compute dtype>[batch, length, d_model].
        padding_mask: <bool>[batch, length], True at real tokens. Defaults to Keras' mask.
        token_ids: <int32>[batch, length]. Required by the "hash" policy.
        return_router_stats: Returns `(outputs, RouterStats)` and adds no losses. Set by `forward`.
        mask, inputs_mask: Passed by Keras and propagated to the outputs.

    Returns: <compute dtype>[batch, length, output_dim].
    """

    # The paper's hyperparameters.
    def __init__(self, num_experts: int, d_ff: int, activation: str = "relu", group_size: int = 4096,
                 num_groups_multiple: int = 1, jitter_noise: float | None = None,
                 train_capacity_factor: float = 1.25, eval_capacity_factor: float = 2.0, min_expert_capacity: int = 4,
                 expert_dropout_rate: float = 0.0, load_balancing_loss_weight: float = 1e-2,
                 router_z_loss_weight: float = 1e-3, router_dtype: str | None = None, init_scale: float | None = None,
                 semantics: str = "switch_tf", expert_capacity: int | None = None, dispatch: str = "auto",
                 router: str | Policy | Router = "switch", output_dim: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.grouping = Grouping(num_experts, group_size, num_groups_multiple, train_capacity_factor,
                                 eval_capacity_factor, min_expert_capacity, semantics, expert_capacity)
        for name, value in dataclasses.asdict(self.grouping).items():
            setattr(self, name, value)
        self._keep(dispatch=dispatch, expert_dropout_rate=expert_dropout_rate,
                   load_balancing_loss_weight=load_balancing_loss_weight, router_z_loss_weight=router_z_loss_weight)
        self.router = self._make_router(router, jitter_noise=jitter_noise, router_dtype=router_dtype,
                                        init_scale=init_scale)
        self.jitter_noise, self.router_dtype = self.router.jitter_noise, self.router.router_dtype
        self.init_scale = self.router.init_scale
        self.experts = ExpertFeedForward(num_experts, d_ff, activation, expert_dropout_rate, self.init_scale,
                                         output_dim, dtype=self.dtype_policy, name="experts")
        self.d_ff, self.activation, self.output_dim = self.experts.d_ff, activation, self.experts.output_dim

    def _make_router(self, router, **options):
        options = {name: value for name, value in options.items() if value is not None}
        if isinstance(router, str | Policy):
            return Router(self.num_experts, policy=router, semantics=self.semantics, dtype=self.dtype_policy,
                          name="router", **options)
        if not isinstance(router, Router):
            raise Refusal(f"router must be a Router or the name of a policy, not {checks.shown(router)}.")
        if router.num_experts != self.num_experts:
            raise Refusal(f"The router chooses among {router.num_experts} experts, but num_experts is "
                          f"{self.num_experts}; give both the same number.")
        if router.semantics != self.semantics:
            raise Refusal(f"The router has semantics={router.semantics!r}, but the layer {self.semantics!r}; give "
                          "both the same.")
        for name, value in options.items():
            if value != getattr(router, name):
                raise Refusal(f"{name}={checks.shown(value)} stands beside a Router that has "
                              f"{name}={getattr(router, name)!r}; give it to the Router alone.")
        return router

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape)
        self.router.build((None, None, d_model))
        self.experts.build((self.num_experts, None, None, d_model))

    @property
    def routers(self) -> dict[str, int]:
        """Number of experts by router name."""
        return {self.name: self.num_experts}

    def call(self, inputs: Tensor, padding_mask: Mask = None, token_ids: Tensor | None = None,
             training: bool = False, return_router_stats: bool = False, mask: Mask = None,
             inputs_mask: Mask = None) -> Any:
        padding_mask = self._check(inputs, padding_mask, token_ids, training, return_router_stats, mask, inputs_mask)
        batch, length, _ = ops.shape(inputs)
        groups, expert_capacity, (rows, columns) = grouping.plan(
            self.grouping, (batch, length), training, self.router.experts_choose)
        if padding_mask is None:
            padding_mask = ops.ones((batch, length), "bool")
        elif self.grouping.rules.zeroes_padding:
            inputs = inputs * ops.cast(padding_mask, inputs.dtype)[..., None]
        more, missing = (rows - batch, columns - length), groups.count * groups.size - rows * columns

        def split_groups(x):
            """[batch, length, ...] -> [group, tokens, ...]. Zeros complete the batch and the last group."""
            width = x.shape[2:]
            x = ops.reshape(_padded(x, more), (-1, *width))
            return ops.reshape(_padded(x, (missing,)), (*groups, *width))

        def merge_groups(x):
            """[group, tokens, width] -> [batch, length, width]."""
            width = x.shape[-1]
            x = ops.reshape(x, (-1, width))
            x = x if _is_zero(missing) else x[:rows * columns]
            x = ops.reshape(x, (rows, columns, width))
            return x if all(map(_is_zero, more)) else x[:batch, :length]

        tokens = partitioning.constrain(split_groups(inputs), ("group", None, "embed"))
        is_present = _padded(ops.ones((rows * columns,), "bool"), (missing,))
        decisions, stats = self.router(
            tokens, padding_mask=split_groups(padding_mask), expert_capacity=expert_capacity,
            token_ids=None if token_ids is None else split_groups(token_ids), training=training,
            is_present=ops.reshape(is_present, (*groups,)))
        routes = context.current().routes
        if routes is not None:
            routes[self.path] = merge_groups(decisions.gates)
        dispatcher = dispatch.create(decisions, self.dispatch)
        # Again, to reduce the experts' gradient before the router's is added.
        tokens = partitioning.constrain(tokens, ("group", None, "embed"))
        outputs = ops.cast(dispatcher.run(self.experts, tokens, training), inputs.dtype)
        outputs = partitioning.constrain(outputs, ("group", None, "embed"))
        outputs = partitioning.constrain(merge_groups(outputs), ("batch", "length", "embed"))
        if return_router_stats:
            return outputs, stats
        self.add_router_losses((self,), (stats,), training)
        return outputs

    def _check(self, inputs, padding_mask=None, token_ids=None, training=False, return_router_stats=False, mask=None,
               inputs_mask=None):
        checks.flag("training", training)
        checks.flag("return_router_stats", return_router_stats)
        checks.tensor("inputs", inputs, "float", (None, None, self.experts.input_kernels[0].shape[1]))
        if token_ids is not None:
            indexing.check_ids("token_ids", token_ids, inputs.shape[:2])
        return masks.padding_mask(inputs, padding_mask, mask, inputs_mask)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape[:-1], input_shape[-1] if self.output_dim is None else self.output_dim)

    def compute_output_spec(self, inputs: Tensor, return_router_stats: bool = False, **kwargs: Any) -> Any:
        # Explicit: JAX cannot trace the grouping of a batch of unknown size.
        self._check(inputs, return_router_stats=return_router_stats, **kwargs)
        outputs = keras.KerasTensor(self.compute_output_shape(inputs.shape), self.compute_dtype)
        if not return_router_stats:
            return outputs
        shapes = {**dict.fromkeys(RouterStats._fields, ()), "expert_load": (self.num_experts,)}
        return outputs, RouterStats(*(Mean(keras.KerasTensor(shape, "float32"), keras.KerasTensor((), "float32"))
                                      for shape in shapes.values()))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SwitchFeedForward":
        # Layers saved by 0.1.0 may differ from their router in init_scale.
        return super().from_config({**config, "init_scale": None})


def _is_zero(count):
    return isinstance(count, int) and not count


def _padded(x, counts):
    """Adds `counts` zeros at the end of the leading axes."""
    if all(map(_is_zero, counts)):
        return x
    return ops.pad(x, (*((0, count) for count in counts), *((0, 0),) * (len(x.shape) - len(counts))))
