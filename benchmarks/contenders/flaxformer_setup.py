"""Makes a checkout of Flaxformer importable, and its sparse layer with the groups and slots of the other contenders.

Flaxformer lays experts out over devices: its number of groups is a multiple of its number of experts. On one device
that means many small groups with at least four slots per expert. `moe_layer` removes the rule and its reshapes, which
makes Flaxformer faster.
"""

import functools
import sys
import types


def install(checkout):
    """Puts the checkout on the path, with empty modules for aqt, which it only uses for quantisation."""
    sys.path.insert(0, checkout)
    names = ["aqt", "aqt.jax_legacy", "aqt.jax_legacy.jax"]
    names += [f"{names[-1]}.{leaf}" for leaf in ("flax_layers", "quant_config", "quantization")]
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    # Names in Flaxformer's type hints and defaults.
    modules[names[3]].DenseAqt = type("DenseAqt", (), {})
    modules[names[4]].DynamicContext = type("DynamicContext", (), {})
    modules[names[5]].QuantOps = type("QuantOps", (), {
        "WeightParams": type("WeightParams", (), {}), "ActHParams": type("ActHParams", (), {})})
    sys.modules.update(modules)


def mlp_block(d_ff, dtype="float32"):
    """Returns T5's feed-forward layer, dense or as one expert."""
    from flax import linen
    from flaxformer.components import dense

    return dense.MlpBlock(
        use_bias=False, intermediate_dim=d_ff, activations=("relu",), intermediate_dropout_rate=0.0, dtype=dtype,
        final_dropout_rate=0.0, kernel_init=linen.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"))


def moe_layer(router, experts, d_ff, d_model, group_tokens, capacity, dtype="float32"):
    """Returns the sparse layer with groups of `group_tokens` and exactly `capacity` slots.

    Args:
        router: "scatter" or "masked".
        experts: Number of experts.
        d_ff, d_model: Widths of the layer.
        group_tokens: Tokens in a group.
        capacity: Slots per expert and group.
        dtype: Of the experts; the router's is float32.
    """
    import jax.numpy as jnp
    from flax import linen
    from flaxformer.architectures.moe import moe_layers, routing

    # These functions implement the rule; nothing else in this process uses them.
    moe_layers._num_groups = lambda num_tokens, max_group_size, *_: max(1, num_tokens // max_group_size)
    moe_layers._maybe_pad = lambda inputs, *_: inputs
    router_class = {"scatter": routing.TokensChooseScatterRouter, "masked": routing.TokensChooseMaskedRouter}[router]
    factor = capacity * experts / group_tokens
    return _one_device_class(moe_layers)(
        num_experts=experts, max_group_size=group_tokens, train_capacity_factor=factor, eval_capacity_factor=factor,
        min_expert_capacity=1, num_expert_partitions=experts, num_model_partitions=1, dropout_rate=0.0,
        expert=mlp_block(d_ff, dtype), dtype=dtype,
        router=router_class(
            router_weights=routing.RouterWeights(
                use_bias=False, dtype=jnp.float32, kernel_init=linen.initializers.normal(d_model**-0.5)),
            jitter_noise=0.0, num_selected_experts=1, batch_prioritized_routing=False, dtype=jnp.float32,
            ignore_padding_tokens=False))


def _one_device_class(moe_layers):
    """Returns a MoeLayer with one transpose of [group, expert, slots, d_model], for any number of groups."""
    import jax.numpy as jnp
    from flax.linen import partitioning

    class OneDeviceMoeLayer(moe_layers.MoeLayer):
        def _call_experts(self, inputs, enable_dropout, **kwargs):
            groups, experts, slots, d_model = inputs.shape
            by_expert = jnp.swapaxes(inputs, 0, 1).reshape(experts, groups * slots, d_model)

            @functools.partial(
                partitioning.vmap_with_axes, in_axes=(0,), variable_axes={"params": 0}, spmd_axis_name="expert",
                split_rngs={"params": True, "dropout": True}, partitioning_axis_names={"params": "expert"})
            def apply(expert, rows):
                return self._filter_inputs(expert, rows, enable_dropout=enable_dropout, **kwargs)

            outputs = apply(self.expert, by_expert)
            return jnp.swapaxes(outputs.reshape(experts, groups, slots, -1), 0, 1)

    return OneDeviceMoeLayer


def sown(variables, name):
    """Returns the sum over layers of the values sown as `name`, such as "auxiliary_loss"."""
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(variables["intermediates"])[0]
    return sum(leaf.sum() for path, leaf in leaves if any(getattr(key, "key", None) == name for key in path))
