"""An upcycled model computes what the dense one does, where gates sum to one and no token is dropped."""

import dataclasses

import keras
import numpy as np
import pytest

from switch_tf import SwitchTransformer
from switch_tf.conversion import weight_source
from switch_tf.surgery import upcycling
from switch_tf.surgery.kernels import Changes

# With as many slots for an expert as tokens, none is dropped.
UPCYCLED = {"num_experts": 4, "eval_capacity_factor": 4.0, "min_expert_capacity": 1}
SUMS_TO_ONE = {
    "hash": {"routing_policy": "hash"},
    "top2": {"routing_policy": "top2", "allow_non_causal_decoder": True},
    "three": {"routing_policy": "top_n", "num_selected_experts": 3, "allow_non_causal_decoder": True}}
TWO_SLICES = {"routing_policy": "top_n", "num_selected_experts": 2, "allow_non_causal_decoder": True, "expert_d_ff": 12}


@pytest.fixture(scope="module")
def features():
    random = np.random.RandomState(0)
    inputs, targets = random.randint(1, 32, (4, 9)), random.randint(1, 32, (4, 5))
    inputs[1, 6:], targets[2, 3:] = 0, 0
    return {"encoder_input_tokens": inputs, "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            "decoder_target_tokens": targets}


def upcycle(dense, changes=Changes(), **fields):  # noqa: B008
    return upcycling.upcycle(dense, dataclasses.replace(dense.config, **{**UPCYCLED, **fields}), changes)


def logits_of(model, features):
    return np.asarray(model.forward(features)[0])


@pytest.mark.parametrize(("policy", "activation"), [("hash", "relu"), ("top2", "geglu"), ("three", "relu")])
def test_the_function_is_the_dense_models(policy, activation, make_model, features):
    dense = make_model(is_sparse=False, activation=activation)
    expected = logits_of(dense, features)
    sparse = upcycle(dense, **SUMS_TO_ONE[policy])
    np.testing.assert_allclose(logits_of(sparse, features), expected, atol=1e-5)
    assert np.std(expected) > 0.5


@pytest.mark.parametrize("gate_scale", [2.0, "auto"])
def test_all_slices_of_a_copy_with_their_number_as_scale_are_the_dense_layer(gate_scale, make_model, features):
    dense = make_model(is_sparse=False)
    sparse = upcycle(dense, Changes(gate_scale=gate_scale), **TWO_SLICES)
    np.testing.assert_allclose(logits_of(sparse, features), logits_of(dense, features), atol=1e-5)


def test_everything_else_is_the_same_and_the_dense_model_stays_as_it_was(make_model):
    dense = make_model(is_sparse=False)
    before = [weight.copy() for weight in dense.get_weights()]
    sparse = upcycle(dense, Changes(noise=0.5, reinitialize=0.5))
    dense_weights = {variable.path: variable.numpy() for variable in dense.weights}
    same = [variable for variable in sparse.weights if variable.path in dense_weights]
    assert len(same) == len(dense_weights) - 2 * 2  # wi and wo of a layer of each stack
    for variable in same:
        np.testing.assert_array_equal(variable.numpy(), dense_weights[variable.path])
    for weight, was in zip(dense.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, was)


def test_draws_depend_on_the_seed_alone(make_model):
    dense = make_model(is_sparse=False)
    first, again, other = (upcycle(dense, Changes(noise=0.1, reinitialize=0.5, seed=seed)) for seed in (1, 1, 2))
    experts = [[variable.numpy() for variable in model.weights if "/mlp/experts/" in variable.path
                or "/router/" in variable.path] for model in (first, again, other)]
    for one, same, different in zip(*experts, strict=True):
        np.testing.assert_array_equal(one, same)
        assert not np.allclose(one, different)
    kernels = experts[0][0]
    assert not np.allclose(kernels[0], kernels[1])


def test_noise_is_relative_to_the_spread_of_the_dense_kernel(make_model):
    dense = make_model(is_sparse=False)
    dense.encoder.layers[1].mlp.wo.assign(100 * dense.encoder.layers[1].mlp.wo.numpy())
    for layer in (mlps := [stack.layers[1].mlp for stack in (dense.encoder, dense.decoder)]):
        assert layer.wo.numpy().std() > 0
    sparse = upcycle(dense, Changes(noise=0.1), num_experts=16)
    for old, new in zip(mlps, (sparse.encoder.layers[1].mlp, sparse.decoder.layers[1].mlp), strict=True):
        for was, kernel in ((old.wo, new.experts.wo), (old.input_kernels[0], new.experts.input_kernels[0])):
            added = kernel.numpy() - was.numpy()
            assert added.std() == pytest.approx(0.1 * was.numpy().std(), rel=0.1)


def test_portions_of_any_size_are_parts_of_the_same_weights(make_model, monkeypatch):
    """A model that is written in small portions, experts one by one and the embedding by rows, is the same."""
    dense, changes = make_model(is_sparse=False), Changes(noise=0.1, reinitialize=0.25, gate_scale=2.0)
    whole = {name: variable.numpy() for name, variable in weight_source.variables_of(upcycle(dense, changes)).items()}
    source = upcycling.open_upcycled(weight_source.model_weights(dense), dataclasses.replace(dense.config, **UPCYCLED),
                                     changes)
    monkeypatch.setattr(weight_source, "LARGEST", 512)
    seen = {name: np.full(values.shape, np.nan) for name, values in whole.items()}
    groups = weight_source.groups_of(source)
    assert sum(map(len, groups)) > len(whole) + 10
    for name, rows, _ in (portion for group in groups for portion in group):
        seen[name][rows] = source.read(name, rows)
    for name, values in whole.items():
        np.testing.assert_array_equal(seen[name], values, name)


def test_a_hidden_unit_is_drawn_anew_in_all_kernels_of_its_expert(make_model):
    dense = make_model(is_sparse=False, activation="geglu")
    old, experts = dense.encoder.layers[1].mlp, upcycle(dense, Changes(reinitialize=0.25)).encoder.layers[1].mlp.experts
    changed = [(kernel.numpy() != was.numpy()).all(axis=1)
               for kernel, was in zip(experts.input_kernels, old.input_kernels, strict=True)]
    changed.append((experts.wo.numpy() != old.wo.numpy()).all(axis=2))
    assert changed[0].sum(axis=1).tolist() == [6] * 4  # a quarter of 24
    for other in changed[1:]:
        np.testing.assert_array_equal(other, changed[0])


@pytest.mark.parametrize("policy", [{}, {**SUMS_TO_ONE["top2"], "semantics": "t5x", "second_expert_policy": "all"}])
def test_a_scale_makes_up_for_gates_that_do_not_sum_to_one(policy, make_model, features):
    keras.utils.set_random_seed(2)
    dense = SwitchTransformer(make_model(is_sparse=False).config)  # with norms of 1
    dense.build()
    expected = logits_of(dense, features)
    errors = [np.abs(logits_of(upcycle(dense, Changes(gate_scale=scale), init_scale=0.1, num_experts=8,
                                       eval_capacity_factor=8.0, **policy), features) - expected)[
                                           features["decoder_target_tokens"] > 0].max() for scale in (1.0, "auto")]
    assert errors[1] < errors[0] / 3 and errors[0] > 0.5


def test_gates_of_one_expert_by_hand(make_model):
    # Of two experts with logits 2x and 0 of a token x, the larger probability is sigmoid(2 |x|).
    dense = make_model(is_sparse=False)
    source = upcycling.open_upcycled(weight_source.model_weights(dense), dataclasses.replace(dense.config, **{
        **UPCYCLED, "num_experts": 2}), Changes())
    d_model = dense.config.d_model

    def read(name, rows):
        return np.pad([[2.0, 0.0]], ((0, d_model - 1), (0, 0))) if "router" in name else np.ones(d_model)

    sums = upcycling.gate_sums(source._replace(read=read), "encoder/layers_1")
    drawn = np.random.RandomState(0).standard_normal((1024, d_model))[:, 0]
    np.testing.assert_allclose(sums, 1 / (1 + np.exp(-2 * np.abs(drawn))), rtol=1e-5)
    assert upcycling.gate_scale(sums, 3) == pytest.approx(3 / sums.mean(), rel=1e-4)


def test_the_policies_of_both_stacks_may_have_no_router(make_model):
    sparse = upcycle(make_model(is_sparse=False), routing_policy="hash")
    assert not any("/router/" in variable.path for variable in sparse.weights)
