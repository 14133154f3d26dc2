"""A policy is one record, and a module outside of the package can add one: the one of docs/routing.md does."""

import dataclasses
import importlib
import inspect
import pathlib
import re

import keras
import numpy as np
import pytest

import switch_tf
from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.configs import gin_syntax, parts, policies
from switch_tf.layers import Router, SwitchFeedForward

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "routing.md"
SMALL = {"vocab_size": 32, "d_model": 8, "d_ff": 16, "d_kv": 4, "num_heads": 2, "num_encoder_layers": 1,
         "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_groups_multiple": 1}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(policies, "_policies", dict(policies._policies))


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """The module and the gin file of the page, as files, and the module imported by that name."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (module,) = (text for language, text in blocks if language == "python" and "round_robin" in text)
    (gin_file,) = (text for _, text in blocks if "import round_robin" in text)
    assert len(module.splitlines()) < 30
    (tmp_path / "round_robin.py").write_text(module)
    (tmp_path / "round_robin.gin").write_text(gin_file)
    monkeypatch.syspath_prepend(tmp_path)
    yield str(tmp_path / "round_robin.gin")
    importlib.sys.modules.pop("round_robin", None)


def test_a_policy_from_outside_is_chosen_in_gin_and_trains_and_is_saved(documented, tmp_path):
    said = gin_syntax.read(["gin/models/switch_tiny.gin", documented]).check()
    config = dataclasses.replace(said.part(parts.CONFIG).make(), **SMALL)
    assert (config.routing_policy, config.decoder_policy) == ("round_robin", "round_robin")
    model = SwitchTransformer(config)
    model.build()
    assert model.count_params() == config.num_parameters
    assert config.flops_per_sequence(16, 8) == dataclasses.replace(config, routing_policy="switch").flops_per_sequence(
        16, 8)
    random = np.random.RandomState(0)
    features = {f"{stack}_input_tokens": random.randint(1, 32, (4, 8)).astype("int32")
                for stack in ("encoder", "decoder")}
    _, router_stats = model.forward(features)
    for stats in router_stats:
        np.testing.assert_array_equal(stats.expert_load.total, [4] * 8)
        assert float(stats.load_balancing_loss.total) == 0
    before = [variable.numpy() for variable in model.trainable_variables]
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert np.isfinite(model.train_on_batch(features, features["decoder_input_tokens"]))
    assert all((old != new.numpy()).any() for old, new in zip(before, model.trainable_variables, strict=True))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.config == config
    np.testing.assert_array_equal(again(features), model(features))


def test_a_policy_from_outside_belongs_to_a_router_and_to_a_saved_layer(documented):
    importlib.import_module("round_robin")
    layer = SwitchFeedForward(4, 5, router=Router(4, policy="round_robin"), name="layer", min_expert_capacity=1)
    layer.build((None, None, 3))
    x = np.random.RandomState(0).randn(1, 8, 3).astype("float32")
    is_real = np.array([[True] * 6 + [False] * 2])
    decisions, _ = layer.router(x, padding_mask=is_real, expert_capacity=1)
    np.testing.assert_array_equal(decisions.expert_index[0, :, 0], [0, 1, 2, 3, 0, 1, 2, 3])
    # One slot an expert: the first four tokens take them, and padding never does.
    np.testing.assert_array_equal(decisions.slot[0, :, 0], [0] * 4 + [1] * 4)
    again = SwitchFeedForward.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.router.policy == "round_robin"
    outputs = []
    for layer.dispatch in ("einsum", "index", "ragged"):
        outputs.append(layer(x, padding_mask=is_real))
        np.testing.assert_allclose(outputs[-1], outputs[0], rtol=1e-6, atol=1e-7)


def test_a_module_may_be_run_again_but_a_name_is_not_taken_twice(documented):
    module = importlib.import_module("round_robin")
    importlib.reload(module)
    assert policies.get("round_robin").decide is module.decide
    message = (r"There is a policy 'switch' already, by switch_tf\.layers\.policy_functions:switch; give the one by "
               r"round_robin:decide another name\.$")
    with pytest.raises(ValueError, match=message):
        policies.register(policies.Policy("switch", module.decide))


def test_an_unknown_policy_names_the_nearest(documented):
    importlib.import_module("round_robin")
    message = "must be one of 'switch', .*, 'round_robin', or one that an imported module registers, not 'round_robbin'"
    for argument, make in (("policy", lambda: Router(4, policy="round_robbin")),
                           ("routing_policy", lambda: SwitchConfig(num_experts=4, routing_policy="round_robbin")),
                           ("decoder_routing_policy", lambda: SwitchConfig(decoder_routing_policy="round_robbin"))):
        with pytest.raises(ValueError, match=rf"^{argument} {message}\. Did you mean 'round_robin'\?$"):
            make()


@pytest.mark.parametrize("facts, message", [
    ({"experts_choose": True}, "In the policy 'mine' experts choose, .* set is_balanced=True"),
    ({"experts_choose": True, "is_balanced": True, "has_kernel": False}, "In the policy 'mine' experts choose"),
    ({"counts_preference": True, "has_kernel": False}, "The policy 'mine' has no scores that say what a token")])
def test_facts_that_exclude_each_other_are_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        policies.Policy("mine", print, **facts)


def test_every_shipped_policys_function_is_there():
    for name in policies.names():
        function = policies.imported(policies.get(name).decide)
        assert list(inspect.signature(function).parameters)[:2] == ["scores", "options"]


def test_the_package_has_policies_under_a_public_name():
    assert switch_tf.policies is policies
