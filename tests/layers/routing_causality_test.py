"""Which policies a decoder may use: those by which later tokens never change what happens to earlier ones."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.configs import policies
from switch_tf.layers import Router, SwitchFeedForward
from tests.layers.switch_layers import built

CAUSAL_POLICIES = {name for name in policies.names() if policies.get(name).is_causal}


def make_decoder(policy):
    """A model whose decoder's two layers are sparse and overflow: 12 tokens in one group, 0.6 * 12 / 3 = 2 slots."""
    model = SwitchTransformer(SwitchConfig(
        vocab_size=20, d_model=8, d_ff=6, d_kv=4, num_heads=2, num_encoder_layers=1, num_decoder_layers=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, num_experts=3, encoder_sparse_step=0,
        decoder_sparse_step=1, eval_capacity_factor=0.6, min_expert_capacity=1, decoder_routing_policy=policy))
    model.build()
    random = np.random.RandomState(0)
    for variable in model.variables:
        variable.assign(random.randn(*variable.shape) * (1 if "embedding" in variable.path else 0.5))
    return model


@pytest.mark.parametrize("policy", sorted(CAUSAL_POLICIES))
def test_changing_later_tokens_of_a_sequence_never_changes_its_earlier_outputs_in_a_decoder(policy):
    model, random = make_decoder(policy), np.random.RandomState(1)
    features = {"encoder_input_tokens": random.randint(1, 20, (2, 5)).astype("int32"),
                "decoder_input_tokens": random.randint(1, 20, (2, 6)).astype("int32")}
    forward = tf.function(model.forward, autograph=False)
    logits, router_stats = forward(features)
    assert all(stats.fraction_tokens_dropped.total > 0 for stats in router_stats)
    for sequence in range(2):
        for position in range(1, 6):
            tokens = features["decoder_input_tokens"].copy()
            tokens[sequence, position:] = 1 + (tokens[sequence, position:] + random.randint(0, 18)) % 19
            changed, _ = forward({**features, "decoder_input_tokens": tokens})
            # The number of rows in a product may move its last bits.
            np.testing.assert_allclose(changed[sequence, :position], logits[sequence, :position], rtol=1e-4, atol=1e-4)
            assert np.abs(changed[sequence, position:] - logits[sequence, position:]).max() > 0.1


@pytest.mark.parametrize("policy", ["switch", "hash", "sinkhorn"])
def test_decisions_on_a_prefix_do_not_depend_on_what_follows_at_inference(policy):
    router = built(Router(3, policy=policy), 3, *[np.eye(3)] * (policy != "hash"))

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 2**31 - 1))
    def check(tokens, capacity, seed):
        random = np.random.RandomState(seed)
        prefix = random.randint(1, tokens)
        inputs = random.randint(-1, 2, (2, 12, tokens, 3)).astype("float32")
        token_ids = random.randint(0, 9, (2, 12, tokens)).astype("int32")
        is_real = random.rand(2, 12, tokens) < 0.8
        for array in (inputs, token_ids, is_real):
            array[1, :, :prefix] = array[0, :, :prefix]
        first, second = (router(inputs[i], padding_mask=is_real[i], expert_capacity=capacity, token_ids=token_ids[i])[0]
                         for i in range(2))
        for one, other in zip(first[:3], second[:3], strict=True):
            np.testing.assert_array_equal(one[:, :prefix], other[:, :prefix])

    check()


# For each other policy: arguments, logits of some tokens, another last token, and the earlier token that notices.
# Each expert has one slot.
COUNTEREXAMPLES = {
    # Token 1 finds expert 0 taken; in the second round expert 1 is free only if token 2 did not want it first.
    "ntlb": ({}, [[2, 1], [2, 1], [1, 2]], [2, 1], 1),
    # A later token that is more confident of expert 0 is served before token 0.
    "batch_prioritized": ({}, [[2, 1], [3, 1]], [1, 3], 0),
    # The first choice of a later token comes before the second choice of token 0.
    "top2": ({"second_expert_policy": "all"}, [[2, 1], [1, 2]], [2, 1], 0),
    "top_n": ({"num_selected_experts": 3, "second_expert_policy": "all"}, [[3, 2, 1], [1, 3, 2]], [3, 2, 1], 0),
    # Expert 0 takes the later token, whose probability is higher.
    "expert_choice": ({}, [[2, 1], [3, 1]], [1, 3], 0),
    # Token 0 is left expert 1 if the later token prefers expert 0 more strongly, and else expert 0.
    "sinkhorn": ({}, [[2, 1], [4, 1]], [1, 4], 0),
}


def test_there_is_a_counterexample_for_every_policy_that_a_decoder_is_refused():
    assert set(COUNTEREXAMPLES) == set(policies.names()) - CAUSAL_POLICIES


@pytest.mark.parametrize("policy", COUNTEREXAMPLES)
def test_a_later_token_changes_an_earlier_output(policy):
    arguments, logits, other, noticed = COUNTEREXAMPLES[policy]
    num_experts, num_tokens = len(other), len(logits)
    layer = SwitchFeedForward(num_experts, 4, min_expert_capacity=1, train_capacity_factor=num_experts / num_tokens,
                              router=Router(num_experts, policy=policy, exploration="argmax", **arguments))
    random = np.random.RandomState(0)
    built(layer, num_experts, np.eye(num_experts), random.rand(num_experts, num_experts, 4),
          random.rand(num_experts, 4, num_experts))
    outputs = [np.asarray(layer(np.array([tokens], "float32"), training=True))[0]
               for tokens in (logits, [*logits[:-1], other])]
    assert np.abs(outputs[0][noticed] - outputs[1][noticed]).max() > 0.1
