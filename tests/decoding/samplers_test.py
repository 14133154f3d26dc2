"""Distribution of samples, edges of top-k and top-p, and independence of the batch."""

import numpy as np
import pytest
from keras import ops

from switch_tf import decoding
from switch_tf.decoding import Sample

LOGITS = np.log(np.array([0.4, 0.25, 0.2, 0.1, 0.05], "float32"))
NUM_DRAWS = 20_000


def draw(sampler, logits=LOGITS, count=NUM_DRAWS, position=3):
    rows = np.arange(count, dtype="int32")
    return ops.convert_to_numpy(sampler.draw(np.tile(logits, (count, 1)), rows, position))


def softmax(logits):
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


# 99.9 % of true samplers stay below: chi-square of 1, 2 and 4 degrees of freedom.
@pytest.mark.parametrize("sampler, kept, limit", [
    (Sample(), 5, 18.47), (Sample(temperature=0.5), 5, 18.47), (Sample(temperature=3.0, seed=7), 5, 18.47),
    (Sample(top_k=3), 3, 13.82), (Sample(top_p=0.7), 3, 13.82), (Sample(top_k=4, top_p=0.6, seed=1), 2, 10.83)])
def test_tokens_are_drawn_by_their_probability(sampler, kept, limit):
    counts = np.bincount(draw(sampler), minlength=5)
    expected = softmax(LOGITS[:kept] / sampler.temperature) * NUM_DRAWS
    assert not counts[kept:].any()
    assert ((counts[:kept] - expected) ** 2 / expected).sum() < limit


def test_improbable_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should_be():
    """One token has half of the probability, 20,000 share the rest: bits that are too few would show among them."""
    logits = np.zeros(20_001, "float32")
    logits[17] = np.log(20_000)
    found = draw(Sample(), logits, count=800)
    assert abs((found == 17).sum() - 400) < 3.3 * (800 / 4) ** 0.5
    assert len(np.unique(found[found != 17])) > 385  # of about 400 draws, some four pairs


def test_rows_and_positions_draw_by_themselves():
    uniform = np.zeros(1000, "float32")
    first, second = draw(Sample(), uniform, 400), draw(Sample(), uniform, 400, position=4)
    assert (first == second).sum() < 6 and len(np.unique(first)) > 300
    assert (first == draw(Sample(seed=1), uniform, 400)).sum() < 6
    np.testing.assert_array_equal(first, draw(Sample(), uniform, 400))


@pytest.mark.parametrize("sampler, expected", [
    (Sample(top_k=1), {0, 1}), (Sample(top_k=2), {0, 1}), (Sample(top_k=5), {0, 1, 2, 3, 4}),
    (Sample(top_k=99), {0, 1, 2, 3, 4}), (Sample(top_p=1.0), {0, 1, 2, 3, 4}), (Sample(top_p=1e-6), {0, 1}),
    (Sample(top_p=0.59), {0, 1}), (Sample(top_p=0.61), {0, 1, 2})])
def test_the_cuts_at_their_edges(sampler, expected):
    """Two tokens are equally probable: none of them is left out for its place."""
    logits = np.log(np.array([0.3, 0.3, 0.2, 0.1, 0.1], "float32"))
    assert set(draw(sampler, logits, 3_000)) == expected


@pytest.mark.parametrize("sampler", [
    pytest.param(Sample(seed=3), marks=pytest.mark.slow), Sample(temperature=2.0, top_k=20, top_p=0.9)])
def test_a_row_draws_alike_in_any_batch(make_model, sampler):
    model = make_model(logits_via_embedding=False, scale_decoder_outputs=False, num_encoder_layers=1,
                       num_decoder_layers=1, encoder_sparse_step=1, decoder_sparse_step=1)
    inputs = np.random.default_rng(1).integers(2, 32, (5, 6)).astype("int32")
    inputs[2, 3:] = 0
    rows = np.arange(5, dtype="int32")

    def decode(chosen):
        return ops.convert_to_numpy(
            sampler.decode(model, {"encoder_input_tokens": inputs[chosen]}, 4, rows=rows[chosen]).ids[:, 0])

    together = ops.convert_to_numpy(sampler.decode(model, {"encoder_input_tokens": inputs}, 4).ids[:, 0])
    np.testing.assert_array_equal(np.concatenate([decode([0, 1]), decode([2]), decode([3, 4])]), together)
    assert len(np.unique(together)) > 5


@pytest.mark.parametrize("arguments, message", [
    ({"temperature": 0}, "temperature must be a number above 0, not 0"), ({"top_k": 0}, "top_k must be an integer of"),
    ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\], not 0.0"), ({"top_p": 1.5}, "top_p must be"),
    ({"seed": -1}, "seed must be an integer of at least 0"), ({"temperature": float("nan")}, "temperature must be")])
def test_wrong_values_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sample(**arguments)


def test_a_sampler_is_known_by_its_name():
    assert decoding.get_sampler("beam") == decoding.Beam()
    assert decoding.get_sampler(Sample(top_k=3)) == Sample(top_k=3)
    with pytest.raises(ValueError, match="sampler must be one of .*, not 'greedi'. Did you mean 'greedy'"):
        decoding.get_sampler("greedi")
