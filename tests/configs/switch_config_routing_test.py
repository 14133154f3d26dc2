"""Routing options that do not fit together are refused in one sentence, by the configuration or by the layers."""

import re

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.layers import Router, SwitchFeedForward

# An encoder and a decoder with experts; the decoder is routed by "switch" unless a test says otherwise.
SPARSE = {"num_experts": 4, "decoder_routing_policy": "switch"}


# Accepted.


@pytest.mark.parametrize("changes, encoder, decoder", [
    ({}, ("switch", None), ("switch", None)),
    ({"routing_policy": "top2"}, ("top2", None), ("switch", None)),
    # The number belongs to routing_policy.
    ({"routing_policy": "top_n", "num_selected_experts": 3}, ("top_n", 3), ("switch", None)),
    ({"routing_policy": "batch_prioritized", "num_selected_experts": 2, "decoder_routing_policy": None,
      "allow_non_causal_decoder": True}, ("batch_prioritized", 2), ("batch_prioritized", 2)),
    ({"routing_policy": "expert_choice", "decoder_routing_policy": "hash"}, ("expert_choice", None), ("hash", None)),
])
def test_encoder_and_decoder_have_policies_of_their_own(changes, encoder, decoder):
    config = SwitchConfig(**{**SPARSE, **changes})
    assert config.routing(is_decoder=False) == encoder
    assert config.routing(is_decoder=True) == decoder


@pytest.mark.parametrize("changes", [{"num_decoder_layers": 0}, {"decoder_sparse_step": 0}, {"num_experts": 0}])
def test_without_experts_in_a_decoder_any_policy_is_fine(changes):
    assert SwitchConfig(**{"num_experts": 4, "routing_policy": "top2", **changes}).routing_policy == "top2"


def test_a_second_place_loss_belongs_to_the_stack_that_has_second_choices():
    model = SwitchTransformer(SwitchConfig(**SPARSE, routing_policy="top2", second_place_loss_weight=0.5))
    encoder, decoder = (stack.layers[1].mlp.router for stack in (model.encoder, model.decoder))
    assert (encoder.policy, encoder.second_place_loss_weight) == ("top2", 0.5)
    assert (decoder.policy, decoder.second_place_loss_weight) == ("switch", 0.0)


# Refused by the configuration.


@pytest.mark.parametrize("policy", ["ntlb", "batch_prioritized", "top2", "expert_choice", "sinkhorn"])
def test_a_decoder_that_would_see_later_tokens_is_refused_unless_it_is_allowed(policy):
    message = (rf"^A decoder cannot be routed by '{policy}', which lets later tokens change earlier ones; use "
               r"decoder_routing_policy='switch', or allow_non_causal_decoder=True to train it nevertheless\.$")
    for changes in ({"routing_policy": policy}, {"decoder_routing_policy": policy}):
        with pytest.raises(ValueError, match=message):
            SwitchConfig(num_experts=4, **changes)
        allowed = SwitchConfig(num_experts=4, allow_non_causal_decoder=True, **changes)
        assert allowed.decoder_policy == policy


@pytest.mark.parametrize("changes, message", [
    ({"routing_policy": "top3"}, r"routing_policy must be one of 'switch', .*, or .*, not 'top3'\. Did you mean"),
    ({"exploration": "jitter"}, "exploration must be one of 'input_jitter', 'argmax', 'input_dropout', 'sample', not"),
    ({"second_expert_policy": "some"}, "second_expert_policy must be one of 'random', 'all', 'none', 'threshold', not"),
    ({"second_expert_threshold": 0}, r"second_expert_threshold must be a number in \(0, 1\), not 0"),
    ({"second_expert_threshold": 1.0}, r"second_expert_threshold must be a number in \(0, 1\), not 1.0"),
    ({"routing_policy": "top_n"},
     "num_selected_experts must be an integer of at least 2 with routing_policy='top_n', not None"),
    ({"routing_policy": "top_n", "num_selected_experts": 1}, "an integer of at least 2 with .*, not 1"),
    ({"routing_policy": "top_n", "num_selected_experts": 2.0}, "an integer of at least 1, not 2.0"),
    ({"routing_policy": "batch_prioritized", "num_selected_experts": 0}, "an integer of at least 1, not 0"),
    ({"routing_policy": "batch_prioritized", "num_selected_experts": True}, "an integer of at least 1, not True"),
    ({"routing_policy": "top2", "num_selected_experts": 3},
     "The top2 policy selects 2 experts for each token, not 3; leave num_selected_experts out, or use routing_policy="),
    ({"num_selected_experts": 2}, "The switch policy selects 1 expert for each token, not 2; leave"),
    ({"routing_policy": "top_n", "num_selected_experts": 5},
     "A token cannot go to 5 of 4 experts; use at least 5 experts or a smaller num_selected_experts"),
    ({"routing_policy": "top2", "num_experts": 1}, "A token cannot go to 2 of 1 experts"),
    ({"routing_policy": "expert_choice", "exploration": "sample"},
     "exploration='sample' draws each token's expert, which the expert_choice policy does not choose by token; use"),
    ({"decoder_routing_policy": "hash", "exploration": "sample"},
     "exploration='sample' draws each token's expert, which the hash policy does not choose by token; use"),
    ({"second_place_loss_weight": -0.5}, "second_place_loss_weight must be a number 0 or above, not -0.5"),
    ({"second_place_loss_weight": 0.5},
     "second_place_loss_weight=0.5 needs a policy with second choices, such as 'top2', not 'switch'"),
])
def test_options_that_do_not_fit_are_refused_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        SwitchConfig(**{**SPARSE, **changes})
    assert "\n" not in str(raised.value)


# Refused by the layers, to whom the configuration's rules apply too.


@pytest.mark.parametrize("arguments, message", [
    ({"policy": "top_n"}, "num_selected_experts must be an integer of at least 2"),
    ({"policy": "top2", "num_selected_experts": 3}, "The top2 policy selects 2 experts for each token, not 3"),
    ({"policy": "top_n", "num_selected_experts": 5}, "A token cannot go to 5 of 4 experts"),
    ({"policy": "hash", "exploration": "sample"}, "exploration='sample' draws each token's expert, which the hash"),
    ({"policy": "switch", "second_place_loss_weight": 0.5}, "second_place_loss_weight=0.5 needs a policy with second"),
    ({"policy": "batch_prioritized", "second_place_loss_weight": 0.5}, "second_place_loss_weight=0.5 needs a policy"),
    ({"exploration": "greedy"}, "exploration must be one of"),
])
def test_a_router_refuses_them_too(arguments, message):
    with pytest.raises(ValueError, match=message):
        Router(4, **arguments)


def make_layer(policy="switch", dispatch="auto"):
    return SwitchFeedForward(2, 3, router=Router(2, policy=policy), min_expert_capacity=1, dispatch=dispatch)


def test_the_hash_policy_needs_token_ids():
    with pytest.raises(ValueError, match=r"The hash policy needs token_ids \(<int32>, one for each token\); pass them"):
        make_layer("hash")(np.ones((1, 4, 3), "float32"))


def test_ragged_dispatch_is_refused_where_experts_choose():
    with pytest.raises(ValueError, match="dispatch='ragged' leaves out empty slots, .*; use 'index' or 'auto'"):
        make_layer("expert_choice", "ragged")(np.ones((1, 4, 3), "float32"))


def test_ragged_dispatch_is_refused_by_xla():
    layer = make_layer(dispatch="ragged")
    layer.build((None, None, 3))
    compiled = tf.function(lambda x: layer(x), jit_compile=True, autograph=False)
    with pytest.raises(ValueError, match="dispatch='ragged' needs shapes that depend on values, .* dispatch='index'"):
        compiled(tf.ones((1, 4, 3)))
    # By itself, the layer finds a dispatch that XLA compiles.
    layer = make_layer(dispatch="auto")
    layer.build((None, None, 3))
    assert tf.function(lambda x: layer(x), jit_compile=True, autograph=False)(tf.ones((1, 4, 3))).shape == (1, 4, 3)


def test_a_layer_and_its_router_have_the_same_number_of_experts():
    with pytest.raises(ValueError, match="The router chooses among 3 experts, but num_experts is 2; give"):
        SwitchFeedForward(2, 3, router=Router(3))


@pytest.mark.parametrize("name, value, routers", [
    ("jitter_noise", 0.2, 0.01), ("jitter_noise", 0, 0.01), ("router_dtype", "bfloat16", "float32"),
    ("init_scale", 1.0, 0.1)])
def test_what_a_router_holds_is_not_given_beside_it(name, value, routers):
    message = f"{name}={value!r} stands beside a Router that has {name}={routers!r}; give it to the Router alone."
    with pytest.raises(ValueError, match=re.escape(message)):
        SwitchFeedForward(2, 3, router=Router(2), **{name: value})
    layer = SwitchFeedForward(2, 3, router=Router(2, **{name: value}), **{name: value})
    assert getattr(layer, name) == value
    assert SwitchFeedForward.from_config(layer.get_config()).get_config() == layer.get_config()


def test_a_router_gives_its_init_scale_to_the_experts():
    assert SwitchFeedForward(2, 3, router=Router(2, init_scale=0.5)).experts.init_scale == 0.5
    assert SwitchFeedForward(2, 3).experts.init_scale == 0.1


def test_a_layer_of_0_1_0_with_another_init_scale_than_its_router_loads():
    layer = SwitchFeedForward(2, 3, router=Router(2, init_scale=1.0), name="layer")
    again = SwitchFeedForward.from_config({**layer.get_config(), "init_scale": 0.1})
    assert again.get_config() == layer.get_config()
