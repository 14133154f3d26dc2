"""Models with experts in self-attention: what is sparse, precision, counts, training steps."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.layers import FeedForward, MultiHeadAttention, SwitchFeedForward, SwitchSelfAttention
from switch_tf.optim.adafactor import Adafactor
from switch_tf.reporting import report
from switch_tf.training import train_step
from tests.models.conftest import BOTH

CHOICES = ("feed_forward", "attention", "feed_forward_and_attention")
NAMES = {"feed_forward": [""], "attention": ["/attention/query", "/attention/key_value"],
         "feed_forward_and_attention": ["/attention/query", "/attention/key_value", ""]}


# Sublayers with experts, and the routers' names.


@pytest.mark.parametrize("expert_sublayers", CHOICES)
def test_the_chosen_sublayers_of_sparse_layers_have_experts(make_model, expert_sublayers):
    model = make_model(expert_sublayers=expert_sublayers)
    for stack in (model.encoder, model.decoder):
        dense, sparse = stack.layers
        assert isinstance(dense.attention, MultiHeadAttention) and isinstance(dense.mlp, FeedForward)
        attention = MultiHeadAttention if expert_sublayers == "feed_forward" else SwitchSelfAttention
        feed_forward = FeedForward if expert_sublayers == "attention" else SwitchFeedForward
        assert isinstance(sparse.attention, attention) and isinstance(sparse.mlp, feed_forward)
    assert isinstance(model.decoder.layers[1].cross_attention, MultiHeadAttention)


@pytest.mark.parametrize("expert_sublayers", CHOICES)
def test_the_names_of_the_routers_are_in_the_order_of_the_statistics(fresh_model, features, expert_sublayers):
    model = fresh_model(expert_sublayers=expert_sublayers, encoder_sparse_step=1)
    places = [("encoder", 0), ("encoder", 1), ("decoder", 1)]
    names = [f"{stack}/layers_{i}{router}" for stack, i in places for router in NAMES[expert_sublayers]]
    assert list(model.config.sparse_layer_names) == names
    routers = []
    for stack, i in places:
        layer = getattr(model, stack).layers[i]
        owners = {"": lambda layer: layer.mlp, "/attention/query": lambda layer: layer.attention.query_experts,
                  "/attention/key_value": lambda layer: layer.attention.key_value_experts}
        routers += [owners[router](layer).router for router in NAMES[expert_sublayers]]
    kernels = [router.kernel.numpy() for router in routers]
    for bit in range(len(names).bit_length()):  # no two routers have zeros for the same bits of their numbers
        has_zeros = [bool(number >> bit & 1) for number in range(1, len(names) + 1)]
        for router, kernel, is_zero in zip(routers, kernels, has_zeros, strict=True):
            router.kernel.assign(np.zeros_like(kernel) if is_zero else kernel)
        _, router_stats = model.forward(features)
        # A router of zeros has the entropy ln 4, and no other has.
        assert has_zeros == [abs(float(stats.router_entropy.value) - np.log(4)) < 1e-6 for stats in router_stats]


def test_the_report_lists_routers_in_the_order_of_the_model():
    config = SwitchConfig(num_experts=2, num_encoder_layers=12, num_decoder_layers=2, encoder_sparse_step=6, **BOTH)
    records = [{f"router/{name}/expert_load": [0.5, 0.5]} for name in sorted(config.sparse_layer_names)]
    assert report.sparse_layers(name for record in records for name in record) == list(config.sparse_layer_names)


def test_the_configuration_reaches_both_layers_of_experts():
    config = SwitchConfig(num_experts=3, d_model=8, d_ff=6, d_kv=2, num_heads=5, activation="geglu", group_size=7,
                          jitter_noise=0.2, expert_dropout_rate=0.3, dropout_rate=0.25, attention_init_scale=0.5,
                          decoder_routing_policy="hash", encoder_sparse_step=1, decoder_sparse_step=1, **BOTH)
    model = SwitchTransformer(config)
    for stack, policy in ((model.encoder, "switch"), (model.decoder, "hash")):
        attention = stack.layers[0].attention
        assert (attention.num_heads, attention.d_kv, attention.dropout_rate, attention.init_scale) == (5, 2, 0.25, 0.5)
        for experts in (attention.query_experts, attention.key_value_experts):
            assert (experts.num_experts, experts.d_ff, experts.output_dim, experts.activation) == (3, 6, 10, "geglu")
            assert (experts.group_size, experts.expert_dropout_rate) == (7, 0.3)
            assert (experts.router.jitter_noise, experts.router.policy) == (0.2, policy)
        assert attention.query_experts.name == "query_experts"
        assert attention.key_value_experts.name == "key_value_experts"


# Precision.


@pytest.mark.parametrize("attention_expert_dtype, expected", [("float32", tf.float32), ("auto", tf.bfloat16)])
def test_under_bfloat16_attention_experts_compute_in_their_own_dtype(fresh_model, features, attention_expert_dtype,
                                                                     expected):
    model = fresh_model("mixed_bfloat16", attention_expert_dtype=attention_expert_dtype, **BOTH)
    seen = {}

    def watch(name, experts):
        original = experts.call

        def call(inputs, *args, **kwargs):
            outputs = original(inputs, *args, **kwargs)
            seen[name] = (inputs.dtype, outputs.dtype)
            return outputs

        experts.call = call

    sparse = model.encoder.layers[1]
    for name, layer in (("query", sparse.attention.query_experts), ("key_value", sparse.attention.key_value_experts),
                        ("feed_forward", sparse.mlp)):
        watch(name, layer.experts)
    logits, router_stats = model.forward(features)
    assert seen == {"query": (expected,) * 2, "key_value": (expected,) * 2, "feed_forward": (tf.bfloat16,) * 2}
    assert logits.dtype == tf.float32 and np.isfinite(logits).all()
    assert sparse.attention.compute_dtype == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert all(mean.total.dtype == tf.float32 for stats in router_stats for mean in stats)


# Training.


def build(config, dtype=None):
    keras.utils.set_random_seed(1)
    model = SwitchTransformer(config, dtype=dtype)
    model.build()
    optimizer = Adafactor(0.05)
    optimizer.build(model.trainable_variables)
    return model, optimizer


@pytest.mark.slow
def test_three_training_steps_lower_the_loss_and_measure_every_router(shallow_config, batch):
    model, optimizer = build(dataclasses.replace(shallow_config, **BOTH), "mixed_bfloat16")
    before = [variable.numpy() for variable in model.trainable_variables]
    step = train_step.compile_steps(model, optimizer, 3, StepSettings())
    losses = []
    for _ in range(3):
        measured, bad_step = step({name: value[None] for name, value in batch.items()})
        assert int(bad_step) == -1
        measured = keras.tree.map_structure(np.float64, measured)
        losses.append(measured.batch.loss_terms["cross_entropy"].value)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    for name in model.config.sparse_layer_names:
        stats = measured.batch.routers[name]
        assert stats.expert_load.total.shape == (4,)
        assert stats.load_balancing_loss.value > 0.5
    for variable, old in zip(model.trainable_variables, before, strict=True):
        assert np.isfinite(variable).all() and np.abs(variable - old).max() > 0, variable.path


@pytest.fixture(scope="module")
def gradients_by_path(shallow_config, batch):
    def compute_all(settings, **changes):
        model, optimizer = build(dataclasses.replace(shallow_config, **BOTH, **changes))
        compute = tf.function(
            lambda: train_step.compute_gradients(model, batch, 3, optimizer.iterations.value, settings)[0],
            jit_compile=settings.use_xla, autograph=False)
        return {variable.path: gradient.numpy()
                for variable, gradient in zip(model.trainable_variables, compute(), strict=True)}

    return compute_all


@pytest.fixture(scope="module")
def plain_gradients(gradients_by_path):
    return gradients_by_path(StepSettings())


@pytest.mark.slow
@pytest.mark.parametrize("changes, settings, tolerance", [
    ({"remat": True}, StepSettings(), 1e-5), ({}, StepSettings(num_microbatches=2), 1e-5),
    ({}, StepSettings(use_xla=True), 1e-4)], ids=["remat", "microbatches", "xla"])
def test_the_gradient_stays_the_same_with_dropout_and_jitter(gradients_by_path, plain_gradients, changes, settings,
                                                             tolerance):
    gradients = gradients_by_path(settings, **changes)
    assert gradients.keys() == plain_gradients.keys()
    for path, gradient in gradients.items():
        largest = np.abs(plain_gradients[path]).max()
        assert np.abs(gradient - plain_gradients[path]).max() <= tolerance * largest > 0, path


# Counts.


def test_flops_of_a_small_model_by_hand():
    small = SwitchConfig(vocab_size=10, d_model=4, d_ff=6, d_kv=2, num_heads=3, num_encoder_layers=2,
                         num_decoder_layers=1, num_experts=5, decoder_sparse_step=0, train_capacity_factor=1.5)
    feed_forward, attention, both = (
        dataclasses.replace(small, expert_sublayers=choice).flops_by_part(7, 3) for choice in CHOICES)
    # Encoder layer 1 loses its dense query, key and value: 3 products of 4 x 6 for 7 tokens.
    saved = 2 * 3 * (4 * 6) * 7
    assert feed_forward["attention"] - attention["attention"] == feed_forward["attention"] - both["attention"] == saved
    # Two experts for each of 7 tokens: 4 x 6 in, 6 x (3 heads of 2) out.
    attention_experts = 2 * 2 * (4 * 6 + 6 * 6) * 7
    assert attention["experts"] == attention_experts
    assert both["experts"] == attention_experts + feed_forward["experts"]
    assert (attention["router"], both["router"]) == (2 * feed_forward["router"], 3 * feed_forward["router"])
    # Layers with a dense feed-forward: all 2 x 7 + 3 tokens, or without those of encoder layer 1.
    assert attention["feed_forward"] == 2 * (2 * 4 * 6) * (2 * 7 + 3)
    assert both["feed_forward"] == feed_forward["feed_forward"] == 2 * (2 * 4 * 6) * (7 + 3)
    assert attention["capacity_padding"] == attention["experts"] // 2
    for part in ("attention_scores", "logits"):
        assert attention[part] == both[part] == feed_forward[part]
