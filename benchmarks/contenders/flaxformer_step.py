"""A training step of Flaxformer's T5 1.0, dense or every other layer sparse (JAX, optax)."""

import functools

import flaxformer_setup
import jax
import jax.numpy as jnp
import optax
from flax import core, linen
from flax import version as flax
from layer_problem import LOAD_BALANCING_LOSS_WEIGHT, ROUTER_Z_LOSS_WEIGHT, expert_capacity
from step_problem import batch


def step(job):
    """Builds one jitted step with donated weights and optimizer state; a job without experts is a dense model."""
    flaxformer_setup.install(job["flaxformer"])
    model = t5(job, job.get("dtype", jnp.float32))
    sources, targets = (jnp.asarray(array) for array in batch(job))
    features = {"encoder_input_tokens": sources, "decoder_target_tokens": targets,
                "decoder_input_tokens": jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))}
    keys = {name: jax.random.PRNGKey(index) for index, name in enumerate(("params", "dropout", "jitter"))}
    parameters = core.unfreeze(jax.jit(lambda keys: model.init(keys, **features, enable_dropout=False))(keys))["params"]
    optimizer = {"adamw": optax.adamw, "adafactor": optax.adafactor}[job["optimizer"]](job["learning_rate"])

    def loss(parameters):
        logits, variables = model.apply({"params": parameters}, **features, enable_dropout=True,
                                        rngs={"dropout": keys["dropout"]}, mutable=["intermediates"])
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        if not job["experts"]:
            return cross_entropy
        return (cross_entropy + LOAD_BALANCING_LOSS_WEIGHT * flaxformer_setup.sown(variables, "auxiliary_loss")
                + ROUTER_Z_LOSS_WEIGHT * flaxformer_setup.sown(variables, "router_z_loss"))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def one_step(parameters, state):
        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    held = [parameters, optimizer.init(parameters), None]

    def run():
        held[:] = jax.block_until_ready(one_step(held[0], held[1]))

    run()
    return run, {"parameters": sum(leaf.size for leaf in jax.tree.leaves(held[0])),
                 "first_loss": round(float(held[2]), 3),
                 "versions": {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__}}


def t5(job, dtype=jnp.float32, feed_forward=None):
    """Returns Flaxformer's EncoderDecoder, with slots for the tokens of `encoder_length` and `decoder_length`.

    Args:
        job: dict, sizes; "float32_scores", whether attention's softmax is float32 whatever `dtype` is.
        dtype: of the computation.
        feed_forward: function of a length and whether the layer is sparse, by default without any layout of devices.
    """
    from flaxformer.architectures.moe import moe_architecture, moe_enums
    from flaxformer.architectures.t5 import t5_architecture
    from flaxformer.components import embedding, layer_norm, relative_position_biases
    from flaxformer.components.attention import dense_attention

    initializers = linen.initializers

    def dropout():
        return linen.Dropout(0.0, broadcast_dims=(-2,))

    def attention():
        return dense_attention.MultiHeadDotProductAttention(
            num_heads=job["heads"], head_dim=job["d_kv"], dtype=dtype, use_bias=False, dropout_rate=0.0,
            broadcast_dropout=True, float32_logits=job.get("float32_scores", False),
            kernel_init=initializers.variance_scaling(1.0, "fan_in", "normal"))

    def position_bias():
        return relative_position_biases.RelativePositionBiases(
            num_buckets=32, max_distance=128, num_heads=job["heads"], dtype=dtype,
            embedding_init=initializers.variance_scaling(1.0, "fan_avg", "uniform"))

    def embedder():
        return embedding.Embed(
            num_embeddings=job["vocab_size"], features=job["d_model"], cast_input_dtype=jnp.int32, dtype=dtype,
            attend_dtype=jnp.float32, embedding_init=initializers.normal(1.0), one_hot=False, name="token_embedder")

    def on_one_device(length, is_sparse):
        if not is_sparse:
            return flaxformer_setup.mlp_block(job["d_ff"], dtype)
        tokens = job["batch"] * length
        return flaxformer_setup.moe_layer(job["router"], job["experts"], job["d_ff"], job["d_model"], tokens,
                                          expert_capacity(tokens, job["capacity_factor"], job["experts"]), dtype)

    feed_forward = feed_forward or on_one_device
    shared = {"dropout_factory": dropout, "layer_norm_factory": layer_norm.T5LayerNorm,
              "activation_partitioning_dims": None}

    def encoder_layer(is_sparse, shared_relative_position_bias):
        layer = moe_architecture.SparseEncoderLayer if is_sparse else t5_architecture.EncoderLayer
        return layer(attention=attention(), mlp=feed_forward(job["encoder_length"], is_sparse),
                     shared_relative_position_bias=shared_relative_position_bias, **shared)

    def decoder_layer(is_sparse, shared_relative_position_bias):
        layer = moe_architecture.SparseDecoderLayer if is_sparse else t5_architecture.DecoderLayer
        return layer(self_attention=attention(), encoder_decoder_attention=attention(),
                     mlp=feed_forward(job["decoder_length"], is_sparse),
                     shared_relative_position_bias=shared_relative_position_bias, **shared)

    def stack(name, layer, **dropouts):
        arguments = dict(num_layers=job["layers"], layer_factory=functools.partial(layer, False), dtype=dtype,
                         layer_norm_factory=layer_norm.T5LayerNorm,
                         shared_relative_position_bias_factory=position_bias, **dropouts)
        if not job["experts"]:
            return functools.partial(getattr(t5_architecture, name), **arguments)
        return functools.partial(
            getattr(moe_architecture, f"Sparse{name}"), sparse_layer_factory=functools.partial(layer, True),
            num_sparse_layers=job["layers"] // 2, sparse_layout=moe_enums.LayerLayout.MIXED, **arguments)

    return t5_architecture.EncoderDecoder(
        shared_token_embedder_factory=embedder, dtype=dtype,
        encoder_factory=stack("Encoder", encoder_layer, input_dropout_factory=dropout, output_dropout_factory=dropout),
        decoder_factory=stack("Decoder", decoder_layer, dropout_factory=dropout))
