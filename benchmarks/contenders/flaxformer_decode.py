"""Greedy decoding by Flaxformer's T5 1.0 with its cache, dense or every other layer sparse: one jitted loop (JAX)."""

import flaxformer_setup
import jax
import jax.numpy as jnp
import numpy as np
from flax import version as flax
from flaxformer_step import t5
from step_problem import CROSS_ATTENTION_FACTOR, EMBEDDING_FACTOR, batch, tokens_of_a_step


def decode(job):
    """Decodes `max_length` tokens of each of `batch` inputs; none of them is an end.

    Experts have slots by the capacity factor in each step, too, so tokens that meet at one expert are dropped.
    """
    flaxformer_setup.install(job["flaxformer"])
    model = t5(job)
    sources, length = jnp.asarray(batch(job)[0]), job["max_length"]
    blank = jnp.ones((job["batch"], length), jnp.int32)
    features = {"encoder_input_tokens": sources, "decoder_input_tokens": blank, "decoder_target_tokens": blank,
                "enable_dropout": False}
    parameters = jax.jit(lambda: model.init({"params": jax.random.PRNGKey(0)}, **features))()["params"]

    parameters["token_embedder"]["embedding"] *= EMBEDDING_FACTOR
    for name, layer in parameters["decoder"].items():
        if name.startswith("layers_"):
            layer["encoder_decoder_attention"]["out"]["kernel"] *= CROSS_ATTENTION_FACTOR

    @jax.jit
    def greedy(parameters, sources):
        encoded = model.apply({"params": parameters}, sources, enable_dropout=False, method=model.encode)
        _, variables = model.apply({"params": parameters}, **features, decode=True, mutable=["cache"])

        def step(index, carried):
            token, cache, ids = carried
            logits, changed = model.apply(
                {"params": parameters, "cache": cache}, encoded, sources, token, token, enable_dropout=False,
                decode=True, max_decode_length=length, mutable=["cache"], method=model.decode)
            token = logits[:, -1].argmax(-1).astype(jnp.int32)[:, None]
            return token, changed["cache"], jax.lax.dynamic_update_slice(ids, token, (0, index))

        first = jnp.zeros((job["batch"], 1), jnp.int32), variables["cache"], jnp.zeros_like(blank)
        return jax.lax.fori_loop(0, length, step, first)[2]

    def run():
        return np.asarray(greedy(parameters, sources))

    ids = run()
    return run, {"parameters": sum(leaf.size for leaf in jax.tree.leaves(parameters)), "output_shape": list(ids.shape),
                 "tokens_of_a_step": tokens_of_a_step(ids),
                 "versions": {"jax": jax.__version__, "flax": flax.__version__}}
