"""A module outside of the package adds a policy with a parameter and a state: trained, saved and restored."""

import dataclasses
import importlib

import keras
import numpy as np
import pytest

from switch_tf import SwitchTransformer
from switch_tf.checkpoints import tensors
from switch_tf.configs import policies
from switch_tf.configs.run import StepSettings
from switch_tf.layers import Router, SwitchFeedForward
from switch_tf.surgery import kernels, shrinking, upcycling
from switch_tf.training import train_step

MODULE = '''"""Top-1 with a bias that each step raises for idle experts (loss-free balancing, arXiv 2408.15664)."""

import dataclasses
from collections.abc import Callable

from keras import ops

from switch_tf import policies
from switch_tf.layers import slots


def decide(scores, options):
    biased = scores._replace(selection=scores.selection + options.state["bias"])
    return slots.assign(scores, options, slots.top_experts(biased, 1))


def update(policy, state, load):
    return {"bias": state["bias"] + policy.rate * ops.sign(ops.mean(load) - load)}


@dataclasses.dataclass(frozen=True)
class BiasBalanced(policies.Policy):
    """Args: rate: float, the change of the bias a step."""

    name: str = "bias_balanced"
    decide: Callable = decide
    is_causal: bool = True
    is_balanced: bool = True
    state: tuple[str, ...] = ("bias",)
    update: Callable = update
    rate: float = 0.01


policies.register(BiasBalanced())
'''


@pytest.fixture
def balanced(tmp_path, monkeypatch):
    """The module, imported."""
    assert len(MODULE.splitlines()) < 40
    monkeypatch.setattr(policies, "_policies", dict(policies._policies))
    (tmp_path / "bias_balanced.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("bias_balanced")
    importlib.sys.modules.pop("bias_balanced", None)


def make_layer(router):
    layer = SwitchFeedForward(2, 3, router=router, name="layer", min_expert_capacity=8)
    layer.build((None, None, 1))
    layer.router.kernel.assign([[1.0, 0.0]])
    return layer


def test_a_training_call_updates_the_state_and_the_state_changes_decisions(balanced):
    layer = make_layer(Router(2, policy=balanced.BiasBalanced(rate=0.75), jitter_noise=0.0, name="router"))
    x = np.full((1, 4, 1), 1.0, "float32")
    # All tokens prefer expert 0 by a logit of 1. Each training call moves the biases by 0.75 each.
    loads = [np.asarray(layer.forward(x)[1].expert_load.value)]
    layer(x)
    loads.append(np.asarray(layer.forward(x)[1].expert_load.value))
    layer(x, training=True)
    loads.append(np.asarray(layer.forward(x)[1].expert_load.value))
    np.testing.assert_array_equal(loads, [[1, 0], [1, 0], [0, 1]])
    (bias,) = layer.non_trainable_weights
    np.testing.assert_array_equal(bias, [-0.75, 0.75])
    assert bias.path == "layer/router/bias" and [weight.name for weight in layer.trainable_weights] == [
        "kernel", "wi", "wo"]


def test_a_record_of_its_own_is_saved_with_the_layer(balanced):
    layer = make_layer(Router(2, policy=balanced.BiasBalanced(rate=0.75)))
    again = SwitchFeedForward.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.router.policy == balanced.BiasBalanced(rate=0.75)
    assert layer.get_config()["router"]["config"]["policy"] == {"name": "bias_balanced", "rate": 0.75}
    assert SwitchFeedForward(2, 3, router=policies.Top2(second_expert="none")).router.policy.second_expert == "none"


@pytest.mark.parametrize("layout, mesh_shape", [
    ("single", None), pytest.param("expert", "data=2", marks=pytest.mark.slow),
    pytest.param("mirrored", "data=2", marks=pytest.mark.slow)])
def test_a_step_updates_the_state_by_the_load_of_the_whole_batch(balanced, shallow_config, batch, make_partitioner,
                                                                 layout, mesh_shape):
    config = dataclasses.replace(shallow_config, routing_policy="bias_balanced", dropout_rate=0.0,
                                 expert_dropout_rate=0.0, decoder_sparse_step=0)
    changes = {"backend": "mirrored"} if layout == "mirrored" else {}
    partitioner = make_partitioner("data" if layout == "mirrored" else layout, mesh_shape, **changes)
    keras.utils.set_random_seed(1)
    with partitioner.creates_variables():
        model, optimizer = SwitchTransformer(config), keras.optimizers.Adam(0.01)
    partitioner.build(model, optimizer)
    step = train_step.compile_steps(model, optimizer, 0, StepSettings(num_microbatches=2), partitioner)
    placed = partitioner.place({name: value[None] for name, value in batch.items()})
    expected = dict.fromkeys(config.sparse_layer_names, 0.0)
    for _ in range(3):
        for name, stats in step(placed)[0].batch.routers.items():
            load = np.asarray(stats.expert_load.value)
            expected[name] = expected[name] + 0.01 * np.sign(load.mean() - load)
    variables = tensors.state_variables(model, optimizer)
    for name, bias in expected.items():
        np.testing.assert_allclose(variables[f"model/{name}/mlp/router/bias"].numpy(), bias, atol=1e-6)
        assert np.any(bias)
    assert not any("router_bias" in path for path in variables if path.startswith("optimizer/"))


def test_keras_fit_updates_the_state_and_save_keeps_it(balanced, shallow_config, batch, tmp_path):
    model = SwitchTransformer(dataclasses.replace(shallow_config, routing_policy="bias_balanced", num_decoder_layers=0,
                                                  dropout_rate=0.0, expert_dropout_rate=0.0))
    model.build()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    features = {"encoder_input_tokens": batch["encoder_input_tokens"].numpy()}
    model.fit(features, features["encoder_input_tokens"], batch_size=8, verbose=0)
    states = [variable.numpy() for variable in model.non_trainable_variables if variable.name == "bias"]
    assert len(states) == 1 and np.any(states[0])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(features), model(features), rtol=1e-5, atol=1e-5)
    for one, other in zip(model.non_trainable_variables, again.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_made_from_a_dense_one_starts_with_no_state_and_one_with_fewer_experts_keeps_its(
        balanced, shallow_config):
    config = dataclasses.replace(shallow_config, routing_policy="bias_balanced", decoder_sparse_step=0)
    dense = SwitchTransformer(dataclasses.replace(config, num_experts=0))
    dense.build()
    model = upcycling.upcycle(dense, config, kernels.Changes())
    ((layer, router),) = zip(config.sparse_layer_names, model.router_layers, strict=True)
    (bias,) = router.non_trainable_weights
    np.testing.assert_array_equal(bias, np.zeros(config.num_experts))
    bias.assign(np.arange(config.num_experts))
    small = shrinking.shrink(model, {layer: [[3], [1]]}, {layer: np.ones(config.num_experts)})
    np.testing.assert_array_equal(small.router_layers[0].non_trainable_weights[0], [3, 1])


@pytest.mark.parametrize("fields, message", [
    ({"state": ("bias",)}, "keeps a state, so update must be a function"),
    ({"state": "bias"}, "state must be a tuple of names, not 'bias'")])
def test_impossible_states_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        policies.Policy("mine", print, **fields)


def test_a_record_and_the_knobs_of_a_name_are_not_mixed():
    with pytest.raises(ValueError, match=r"go with the name of a policy; give them to the record"):
        Router(4, policy=policies.Top2(), second_expert_policy="all")
    with pytest.raises(ValueError, match="There is a policy 'switch' already, .* register the one by"):
        Router(4, policy=policies.Policy("switch", print))
