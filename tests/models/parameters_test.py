"""Golden names, shapes, dtypes and logical axes of every parameter, and the configuration's count of them."""

import collections
import importlib.util
import json
import math
import pathlib

import pytest

from switch_tf import SwitchConfig

SCRIPT = pathlib.Path(__file__).parents[1] / "golden" / "parameters.py"
GOLDEN = json.loads(SCRIPT.with_suffix(".json").read_text())
SMALL = {"vocab_size": 30, "d_model": 10, "d_ff": 14, "d_kv": 4, "num_heads": 3, "num_encoder_layers": 4,
         "num_decoder_layers": 3}
# The part that a parameter is counted in, by the first of these words that its path has.
PARTS = {"token_embedder/": "embedding", "logits_dense/": "logits", "norm/": "norm", "relpos_bias/": "position_bias",
         "router/": "router", "/experts/": "experts", "attention/": "attention", "mlp/": "feed_forward"}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("golden_parameters", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_counts(config, parameters):
    """Holds SwitchConfig.weights() against the parameters of a built model, as multisets."""
    expected = collections.Counter()
    for weight in config.weights():
        expected[weight.part, tuple(weight.shape), weight.axes] += weight.count
    built = collections.Counter((part_of(p["path"]), tuple(p["shape"]), tuple(p["axes"])) for p in parameters)
    assert built == +expected
    assert sum(count * math.prod(shape) for (_, shape, _), count in built.items()) == config.num_parameters


def part_of(path):
    return next(part for word, part in PARTS.items() if word in path)


@pytest.mark.parametrize("name", GOLDEN)
def test_parameters_are_the_golden_ones(name, script):
    assert script.describe(script.configs()[name]) == GOLDEN[name]


def test_the_golden_file_has_every_model_of_its_script(script):
    assert list(GOLDEN) == list(script.configs())


@pytest.mark.parametrize("name", GOLDEN)
def test_the_configuration_counts_the_golden_parameters(name, script):
    check_counts(script.configs()[name], GOLDEN[name])


def test_switch_tiny_by_hand():
    # Embedding 4096 * 128; 2 layers per stack, one of them sparse; each attention has 4 * 128 * 4 * 32.
    attention, dense, experts = 4 * 128 * 128, 2 * 128 * 512, 8 * 2 * 128 * 512 + 128 * 8
    encoder = 2 * attention + dense + experts + 4 * 32 + 128 * 5
    decoder = 4 * attention + dense + experts + 4 * 32 + 128 * 7
    size = sum(math.prod(parameter["shape"]) for parameter in GOLDEN["switch_tiny"])
    assert size == 4096 * 128 + encoder + decoder == SwitchConfig.from_preset("switch_tiny").num_parameters


@pytest.mark.parametrize("overrides", [
    {},
    {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 0},
    {"num_experts": 4, "encoder_sparse_step": 3, "decoder_sparse_step": 2, "activation": "swiglu"},
    {"num_experts": 4, "semantics": "hf", "expert_capacity": 2, "encoder_sparse_step": 4},
    {"num_experts": 4, "num_decoder_layers": 0, "logits_via_embedding": False},
    {"activation": "geglu", "logits_via_embedding": False, "relative_attention_num_buckets": 6},
    {"num_experts": 4, "relative_attention_per_layer": True},
    {"num_experts": 4, "extra_mlp": True},
    {"num_experts": 4, "expert_d_ff": 5, "encoder_sparse_indices": (0, 3), "decoder_sparse_indices": (1,)},
    {"num_experts": 4, "expert_d_ff": 5, "expert_sublayers": "feed_forward_and_attention", "activation": "geglu",
     "extra_mlp": True},
    {"num_experts": 4, "extra_mlp": True, "activation": "geglu", "encoder_sparse_step": 3, "decoder_sparse_step": 1},
    {"num_experts": 4, "extra_mlp": True, "activation": "geglu", "expert_sublayers": "feed_forward_and_attention",
     "decoder_routing_policy": "hash", "logits_via_embedding": False, "decoder_sparse_step": 1},
    {"num_experts": 4}, {"num_experts": 4, "expert_sublayers": "attention"},
    {"num_experts": 4, "expert_sublayers": "attention", "routing_policy": "top2", "decoder_routing_policy": "hash",
     "num_decoder_layers": 2},
    *({"num_experts": 4, "expert_sublayers": "feed_forward_and_attention", **changes}  # sums over both kinds
      for changes in ({}, {"activation": "geglu", "decoder_sparse_step": 1}, {"routing_policy": "hash"},
                      {"routing_policy": "top2", "decoder_routing_policy": "hash", "num_decoder_layers": 2})),
], ids=str)
def test_the_configuration_counts_other_models_too(overrides, script):
    config = SwitchConfig(**{**SMALL, **overrides})
    check_counts(config, script.describe(config))


def test_under_bfloat16_the_parameters_are_the_same(script):
    config = script.configs()["geglu_untied"]
    assert script.describe(config, dtype="mixed_bfloat16") == GOLDEN["geglu_untied"]
