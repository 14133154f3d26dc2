"""Compiles a training step of Flaxformer's T5 1.0, dense or every other layer sparse, for a topology of TPUs (JAX).

`python flaxformer_program.py '{"flaxformer": ..., "topology": "v5e:2x4", "hlo": FILE, ...}'`, in the environment that
`step.py` gives it: no TPU is needed. The optimised program goes to the file; where its devices lie, and what it
needs, is printed as one JSON object. The layout is T5X's: experts over the mesh axis "expert", the batch over both.
"""

import json
import sys

import flaxformer_setup
import jax
import jax.numpy as jnp
import optax
from flax import core
from flax.linen import partitioning
from flaxformer_step import t5
from jax.experimental import mesh_utils, topologies
from jax.sharding import NamedSharding, PartitionSpec
from layer_problem import LOAD_BALANCING_LOSS_WEIGHT, ROUTER_Z_LOSS_WEIGHT

RULES = (("batch", ("expert", "data")), ("expert", "expert"), ("expert_replicas", "data"))
Z_LOSS_WEIGHT = 1e-4


def main(job):
    """Compiles, writes the program, and returns what is known of it."""
    flaxformer_setup.install(job["flaxformer"])
    model = t5(job, jnp.bfloat16, lambda length, is_sparse: _feed_forward(job, is_sparse))
    optimizer = optax.adafactor(lambda count: jax.lax.rsqrt(jnp.maximum(count.astype(jnp.float32), 1e4)))
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=job["topology"]).devices)
    sizes = tuple(job["mesh"].values())
    placed = mesh_utils.create_device_mesh(sizes, devices=devices, allow_split_physical_axes=True)
    mesh = jax.sharding.Mesh(placed, tuple(job["mesh"]))

    def described(length):
        by_row = NamedSharding(mesh, PartitionSpec(("expert", "data")))
        return jax.ShapeDtypeStruct((job["batch"], length), jnp.int32, sharding=by_row)

    features = {"encoder_input_tokens": described(job["encoder_length"]),
                "decoder_input_tokens": described(job["decoder_length"]),
                "decoder_target_tokens": described(job["decoder_length"])}
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(mesh, PartitionSpec()))

    def loss(parameters, features, key):
        logits, variables = model.apply({"params": parameters}, **features, enable_dropout=True,
                                        rngs={"dropout": key, "jitter": key}, mutable=["intermediates"])
        logits, weights = logits.astype(jnp.float32), features["decoder_target_tokens"] > 0
        log_z = jax.nn.logsumexp(logits, axis=-1)
        label = jnp.take_along_axis(logits, features["decoder_target_tokens"][..., None], axis=-1)[..., 0]
        total = ((log_z - label + Z_LOSS_WEIGHT * log_z**2) * weights).sum() / weights.sum()
        if not job["experts"]:
            return total
        return (total + LOAD_BALANCING_LOSS_WEIGHT * flaxformer_setup.sown(variables, "auxiliary_loss")
                + ROUTER_Z_LOSS_WEIGHT * flaxformer_setup.sown(variables, "router_z_loss"))

    def step(parameters, state, features, key):
        value, gradients = jax.value_and_grad(loss)(parameters, features, key)
        with jax.named_scope("adafactor"):
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state, value

    with mesh, partitioning.axis_rules(RULES):
        variables = jax.eval_shape(lambda key: model.init(
            {"params": key, "jitter": key}, **jax.tree.map(lambda one: jnp.ones(one.shape, one.dtype), features),
            enable_dropout=False), key)
        parameters = core.unfreeze(variables["params"])
        slots = jax.eval_shape(optimizer.init, parameters)
        held = [_laid_out(tree, job["experts"], mesh) for tree in (parameters, slots)]
        lies = jax.tree.map(lambda one: one.sharding, held)
        compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*lies, None)).lower(
            *held, features, key).compile()
    with open(job["hlo"], "w") as file:
        file.write(compiled.runtime_executable().hlo_modules()[0].to_string())
    memory = compiled.memory_analysis()
    return {"coordinates": [list(device.coords) for device in placed.reshape(-1)],
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(parameters)),
            "needed": memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
            "versions": {"jax": jax.__version__, "optax": optax.__version__}}


def _feed_forward(job, is_sparse):
    from flax import linen
    from flaxformer.architectures.moe import moe_layers, routing
    from flaxformer.components import dense

    block = dense.MlpBlock(
        use_bias=False, intermediate_dim=job["d_ff"], activations=("relu",), intermediate_dropout_rate=0.0,
        final_dropout_rate=0.0, kernel_init=linen.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"),
        dtype=jnp.bfloat16)
    if not is_sparse:
        return block
    return moe_layers.MoeLayer(
        num_experts=job["experts"], max_group_size=job["group_tokens"], train_capacity_factor=job["capacity_factor"],
        eval_capacity_factor=job["capacity_factor"], num_expert_partitions=job["mesh"]["expert"],
        num_model_partitions=1, dropout_rate=0.0, expert=block, dtype=jnp.bfloat16,
        router=routing.TokensChooseMaskedRouter(
            router_weights=routing.RouterWeights(
                use_bias=False, dtype=jnp.float32, kernel_init=linen.initializers.normal(0.02)),
            jitter_noise=0.01, num_selected_experts=1, batch_prioritized_routing=False, dtype=jnp.float32,
            ignore_padding_tokens=False))


def _laid_out(tree, num_experts, mesh):
    """Weights and slots of experts over their axis, all others on every chip."""

    def place(path, leaf):
        is_expert = any(getattr(key, "key", None) == "expert" for key in path) and leaf.shape[:1] == (num_experts,)
        spec = PartitionSpec("expert") if is_expert else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, tree)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
