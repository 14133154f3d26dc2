"""The policy with weights of docs/routing.md is counted, trained, split, saved, converted and rebuilt."""

import dataclasses
import pathlib
import re

import keras
import numpy as np
import pytest

from switch_tf import SwitchTransformer
from switch_tf.checkpoints import tensors
from switch_tf.configs import policies
from switch_tf.configs.run import StepSettings
from switch_tf.conversion import from_switch_tf, to_hugging_face, to_switch_tf
from switch_tf.layers import Router
from switch_tf.optim.adafactor import Adafactor
from switch_tf.surgery import kernels, shrinking, upcycling
from switch_tf.training import train_step

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "routing.md"
WIDTH = 64
NAMES = {"down", "directions", "temperature"}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(policies, "_policies", dict(policies._policies))


@pytest.fixture
def cosine():
    """The policy of the page."""
    (module,) = re.findall(r"```python\n([^`]*RouterWeight[^`]*)```", PAGE.read_text())
    exec(module, {})
    return policies.get("cosine")


@pytest.fixture
def config(cosine, shallow_config):
    return dataclasses.replace(shallow_config, routing_policy="cosine", dropout_rate=0.0, expert_dropout_rate=0.0,
                               decoder_sparse_step=0, jitter_noise=0.0)


def built(config):
    keras.utils.set_random_seed(1)
    model = SwitchTransformer(config)
    model.build()
    return model


def of_router(model):
    return {weight.name: weight for weight in model.weights if "/router/" in weight.path}


def test_scores_are_cosines_over_the_temperature(cosine):
    router = Router(4, policy="cosine", jitter_noise=0.0, name="router")
    x = np.random.RandomState(0).standard_normal((1, 5, 6)).astype("float32")
    decisions, stats = router(x, expert_capacity=5)
    down, directions, temperature = (np.asarray(weight) for weight in router.trainable_weights)
    assert (down.shape, directions.shape, temperature[0]) == ((6, WIDTH), (WIDTH, 4), np.float32(0.3))
    tokens = x @ down
    logits = (tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)
              @ (directions / np.linalg.norm(directions, axis=0)) / temperature)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_array_equal(decisions.expert_index[..., 0], probs.argmax(-1))
    np.testing.assert_allclose(decisions.gate[..., 0], probs.max(-1), rtol=1e-5)
    np.testing.assert_allclose(stats.router_z_loss.value, np.mean(np.log(np.exp(logits).sum(-1)) ** 2), rtol=1e-5)


def test_a_score_may_change_the_logits_of_the_kernel():
    warm = policies.Policy("warm", "switch_tf.layers.policy_functions:switch",
                           weights=lambda *sizes: {"scale": policies.RouterWeight((1,), (None,), 2.0)},
                           score=lambda policy, inputs, logits, weights: logits * weights["scale"])
    x = np.random.RandomState(0).standard_normal((1, 5, 6)).astype("float32")
    plain, scaled = Router(4, jitter_noise=0.0), Router(4, policy=policies.register(warm), jitter_noise=0.0)
    for router in (plain, scaled):
        router.build(x.shape)
    assert [weight.name for weight in scaled.weights] == ["kernel", "scale"]
    plain.kernel.assign(2 * scaled.kernel)
    np.testing.assert_allclose(scaled(x, expert_capacity=5)[0].gate, plain(x, expert_capacity=5)[0].gate, rtol=1e-6)


def test_logits_of_another_shape_are_refused():
    flat = policies.Policy("flat", "switch_tf.layers.policy_functions:switch",
                           score=lambda policy, inputs, logits, weights: logits[..., :2])
    with pytest.raises(ValueError, match=r"The logits of the policy 'flat' must be .*\[1, 5, 4\], not .*\[1, 5, 2\]"):
        Router(4, policy=policies.register(flat))(np.ones((1, 5, 6), "float32"), expert_capacity=5)


def test_the_weights_are_counted(config):
    model = built(config)
    assert set(of_router(model)) == NAMES
    assert config.num_parameters == sum(np.prod(weight.shape) for weight in model.trainable_weights)
    per_token = config.d_model * WIDTH + WIDTH * config.num_experts
    assert config.flops_by_part(8, 8)["router"] == 2 * per_token * 8 * len(config.encoder_sparse_layers)


@pytest.mark.parametrize("layout, mesh_shape, backend", [
    ("single", None, "auto"), *(pytest.param("expert", "data=2", backend, marks=pytest.mark.slow)
                                for backend in ("dtensor", "pjrt"))])
def test_a_step_trains_them_in_any_layout(config, batch, make_partitioner, layout, mesh_shape, backend):
    states = []
    compared = [] if layout == "single" else [make_partitioner("single", None)]  # the others must agree with it
    for partitioner in (*compared, make_partitioner(layout, mesh_shape, backend=backend)):
        keras.utils.set_random_seed(1)
        model, optimizer = SwitchTransformer(config), keras.optimizers.SGD(1.0)
        partitioner.build(model, optimizer)
        before = {name: np.asarray(weight.numpy()) for name, weight in of_router(model).items()}
        step = train_step.compile_steps(model, optimizer, 0, StepSettings(), partitioner)
        step(partitioner.place({name: value[None] for name, value in batch.items()}))
        after = {name: np.asarray(weight.numpy()) for name, weight in of_router(model).items()}
        assert all(np.any(after[name] != before[name]) for name in NAMES)
        states.append(after)
    for name in NAMES:
        np.testing.assert_allclose(states[-1][name], states[0][name], rtol=1e-4, atol=1e-6)


def test_checkpoints_and_saved_models_keep_them(config, tmp_path, batch):
    model, optimizer = built(config), Adafactor()
    optimizer.build(model.trainable_variables)
    assert {path.rpartition("/")[2] for path in tensors.state_variables(model, optimizer)
            if path.startswith("model/") and "/router/" in path} == NAMES
    of_router(model)["temperature"].assign([0.7])
    to_switch_tf(model, tmp_path / "weights")
    model.save(tmp_path / "model.keras")
    for again in (from_switch_tf(tmp_path / "weights"), keras.saving.load_model(tmp_path / "model.keras")):
        for name, weight in of_router(model).items():
            np.testing.assert_array_equal(of_router(again)[name], weight)
    with pytest.raises(ValueError, match="but it is 'cosine'; such a model cannot be written"):
        to_hugging_face(model, tmp_path / "hugging_face")


def test_upcycling_starts_them_as_a_new_model_and_shrinking_keeps_the_columns(config, shallow_config):
    dense = built(dataclasses.replace(config, num_experts=0))
    model = upcycling.upcycle(dense, config, kernels.Changes(gate_scale="auto"))
    weights = of_router(model)
    assert weights["temperature"].numpy() == np.float32(0.3)
    limit = 2 * (config.init_scale / WIDTH) ** 0.5
    assert 0 < np.abs(weights["directions"]).max() <= limit * 1.001
    (layer,) = config.sparse_layer_names
    small = shrinking.shrink(model, {layer: [[2], [0]]}, {layer: np.ones(config.num_experts)})
    np.testing.assert_array_equal(of_router(small)["directions"], np.asarray(weights["directions"])[:, [2, 0]])
    np.testing.assert_array_equal(of_router(small)["down"], weights["down"])


@pytest.mark.parametrize("fields, message", [
    ({"weights": print}, "has weights and no score that uses them"),
    ({"score": "mine"}, "score of the policy 'mine' must be a function, or its place"),
    ({"has_kernel": False, "counts_preference": True}, "has no scores that say what a token prefers")])
def test_impossible_weights_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        policies.Policy("mine", print, **fields)


@pytest.mark.parametrize("name, shape, message", [
    ("scale", (), r"The weight 'scale' of the policy 'mine' .* \(1,\) for a number"),
    ("kernel", (1,), "has a weight 'kernel', the name of the router's kernel"),
    ("bias", (1,), "has a weight 'bias', the name of .* a state")])
def test_weights_of_other_names_or_shapes_are_refused(name, shape, message):
    policy = policies.Policy("mine", print, state=("bias",), update=print, score=print, weights=lambda *sizes: {
        name: policies.RouterWeight(shape, (None,) * len(shape))})
    with pytest.raises(ValueError, match=message):
        policy.router_weights(8, 4)
