"""Flaxformer's sparse layer, by scatter or by masks, and its dense layer (JAX)."""

import flaxformer_setup
import jax
import jax.numpy as jnp
from flax import core
from flax import version as flax
from layer_problem import LOAD_BALANCING_LOSS_WEIGHT, ROUTER_Z_LOSS_WEIGHT, arrays, with_gradients

VERSIONS = {"jax": jax.__version__, "flax": flax.__version__}


def layer(job):
    """Builds `MoeLayer` with the job's `router`, "scatter" or "masked"."""
    flaxformer_setup.install(job["flaxformer"])
    tokens, kernel, _ = arrays(job)
    module = flaxformer_setup.moe_layer(
        job["router"], job["experts"], job["d_ff"], job["d_model"], job["group_tokens"], job["capacity"],
        job.get("dtype", "float32"))
    parameters = _initial(module, tokens)
    own = parameters["router"]["router_weights"]["w"]
    own["kernel"] = jnp.asarray(kernel).reshape(own["kernel"].shape)

    def more_loss(variables):
        return (LOAD_BALANCING_LOSS_WEIGHT * flaxformer_setup.sown(variables, "auxiliary_loss")
                + ROUTER_Z_LOSS_WEIGHT * flaxformer_setup.sown(variables, "router_z_loss"))

    dropped = jax.jit(lambda parameters, x: flaxformer_setup.sown(
        module.apply({"params": parameters}, x, mutable=["intermediates"])[1], "fraction_tokens_left_behind"))
    run, facts = _measure(job, module, parameters, more_loss)
    return run, {**facts, "fraction_dropped": round(float(dropped(parameters, tokens)), 4)}


def dense(job):
    """Builds `MlpBlock` on the same tokens."""
    flaxformer_setup.install(job["flaxformer"])
    module = flaxformer_setup.mlp_block(job["d_ff"], job.get("dtype", "float32"))
    return _measure(job, module, _initial(module, arrays(job)[0]), lambda variables: 0.0)


def _initial(module, tokens):
    keys = {name: jax.random.PRNGKey(index) for index, name in enumerate(("params", "dropout", "jitter"))}
    return core.unfreeze(jax.jit(module.init)(keys, tokens))["params"]


def _measure(job, module, parameters, more_loss):
    tokens, _, upstream = (jnp.asarray(array, job.get("dtype", "float32")) for array in arrays(job))

    def forward(parameters, x, upstream):
        return module.apply({"params": parameters}, x)

    def loss(parameters, x, upstream):
        outputs, variables = module.apply({"params": parameters}, x, mutable=["intermediates"])
        return (outputs * upstream).sum() + more_loss(variables)

    one_pass = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)) if with_gradients(job) else forward)
    facts = {"output_shape": list(jax.eval_shape(forward, parameters, tokens, upstream).shape), "versions": VERSIONS,
             "parameters": sum(leaf.size for leaf in jax.tree.leaves(parameters))}
    return lambda: jax.block_until_ready(one_pass(parameters, tokens, upstream)), facts
