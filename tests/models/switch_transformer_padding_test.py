"""The whole model: what a position sees, and that neither padding nor a neighbour in a packed row matters."""

import numpy as np
import pytest
import tensorflow as tf

from tests.models.conftest import BOTH, ENOUGH

kinds = pytest.mark.parametrize("overrides", [{"is_sparse": False}, {}, BOTH], ids=["dense", "sparse", "attention"])


def packed_and_apart():
    """Two examples in one row of 9 inputs and 8 targets, and the same in two rows."""
    rng = np.random.RandomState(4)
    inputs, targets = [rng.randint(1, 32, n) for n in (4, 3)], [rng.randint(1, 32, n) for n in (3, 4)]
    shifted = [np.concatenate([[0], target[:-1]]) for target in targets]

    def row(parts, length):
        joined = np.concatenate(parts)
        return np.pad(joined, (0, length - len(joined)))[None].astype("int32")

    segments = [[np.full(len(part), i + 1) for i, part in enumerate(parts)] for parts in (inputs, targets)]
    packed = {
        "encoder_input_tokens": row(inputs, 9), "encoder_segment_ids": row(segments[0], 9),
        "decoder_input_tokens": row(shifted, 8), "decoder_target_tokens": row(targets, 8),
        "decoder_segment_ids": row(segments[1], 8)}
    apart = {
        "encoder_input_tokens": np.concatenate([row([part], 9) for part in inputs]),
        "decoder_input_tokens": np.concatenate([row([part], 8) for part in shifted]),
        "decoder_target_tokens": np.concatenate([row([part], 8) for part in targets])}
    return packed, apart


@pytest.mark.parametrize("overrides", [
    {"is_sparse": False}, {}, {"num_groups_multiple": 2}, {"expert_sublayers": "attention"}, BOTH], ids=str)
def test_a_later_target_never_changes_an_earlier_logit(make_model, features, overrides):
    # One sequence: top-1 routing in order is causal inside of one, and only there.
    model = make_model(num_encoder_layers=1, **overrides, eval_capacity_factor=0.6)
    one = {name: features[name][:1] for name in ("encoder_input_tokens", "decoder_input_tokens")}
    forward = tf.function(model.forward, autograph=False)
    logits, router_stats = forward(one)
    assert all(stats.fraction_tokens_dropped.total > 0 for stats in router_stats)
    assert bool(router_stats) == overrides.get("is_sparse", True)
    for position in range(1, 6):
        changed = one["decoder_input_tokens"].copy()
        changed[:, position:] = (changed[:, position:] + 7) % 32
        again = forward({**one, "decoder_input_tokens": changed})[0].numpy()
        np.testing.assert_allclose(again[:, :position], logits[:, :position], rtol=1e-5, atol=1e-5)
        assert np.abs(again[:, position] - logits[:, position]).max() > 1e-3


@pytest.mark.parametrize("overrides", [
    {"is_sparse": False},
    # One layer, sparse in attention: only its attention mixes tokens.
    {"expert_sublayers": "attention", "num_encoder_layers": 1, "encoder_sparse_step": 1, "num_decoder_layers": 0,
     **ENOUGH}], ids=["dense", "attention"])
def test_every_position_sees_the_whole_input(make_model, features, overrides):
    model = make_model(**overrides)
    logits = model(features).numpy()
    changed = features["encoder_input_tokens"].copy()
    changed[0, -1] = changed[0, -1] % 31 + 1
    difference = np.abs(model({**features, "encoder_input_tokens": changed}).numpy() - logits).max(-1)
    assert (difference[0] > 1e-4).all() and (difference[1:] == 0).all()


@kinds
def test_packed_examples_are_the_same_as_apart(make_model, overrides):
    model = make_model(**overrides, **ENOUGH)
    packed, apart = packed_and_apart()
    logits, expected = model(packed).numpy(), model(apart).numpy()
    np.testing.assert_allclose(logits[0, :3], expected[0, :3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits[0, 3:7], expected[1, :4], rtol=1e-4, atol=1e-5)


def test_packed_examples_do_not_see_each_other(make_model):
    model = make_model(is_sparse=False)
    packed, _ = packed_and_apart()
    logits = model(packed).numpy()
    for name, of_second in (("encoder_input_tokens", slice(4, 7)), ("decoder_input_tokens", slice(3, 7))):
        changed = {**packed, name: packed[name].copy()}
        changed[name][:, of_second] = changed[name][:, of_second] % 31 + 1
        again = model(changed).numpy()
        np.testing.assert_array_equal(again[:, :3], logits[:, :3])
        assert (np.abs(again - logits)[0, 3:7].max(-1) > 1e-4).all()


@kinds
def test_what_padding_holds_does_not_matter(make_model, overrides):
    # Few slots, and two rows in a group: the padding of the first stands before the tokens of the second.
    model = make_model(**overrides, eval_capacity_factor=0.7)
    packed = {name: np.repeat(value, 2, axis=0) for name, value in packed_and_apart()[0].items()}
    logits, router_stats = model.forward(packed)
    for stats in router_stats:
        assert stats.fraction_tokens_dropped.total > 0 and stats.expert_load.weight == 2 * 7
    changed = {name: packed[name].copy() for name in packed}
    for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens"):
        changed[name][:, 7:] = 9
    np.testing.assert_array_equal(model(changed)[:, :7], logits[:, :7])


@kinds
def test_more_padding_does_not_matter(make_model, features, overrides):
    model = make_model(**overrides, **ENOUGH)
    longer = {name: np.pad(value, ((0, 0), (0, 5))) for name, value in features.items()}
    is_real = features["decoder_target_tokens"] != 0
    np.testing.assert_allclose(
        model(longer).numpy()[:, :6][is_real], model(features).numpy()[is_real], rtol=1e-4, atol=1e-5)


def test_masks_come_from_segments_before_tokens(make_model, features):
    # A real token 0 (here in the middle) is padding without segments and none with them.
    model = make_model(is_sparse=False)
    tokens = features["encoder_input_tokens"].copy()
    tokens[0, 3] = 0
    with_zero = {**features, "encoder_input_tokens": tokens}
    with_segments = {**with_zero, "encoder_segment_ids": (features["encoder_input_tokens"] != 0).astype("int32")}
    assert np.abs(model(with_zero) - model(with_segments)).max() > 1e-3
