"""Beam search against all sequences there are, against its own scores by hand, and whatever the batch."""

import itertools

import numpy as np
import pytest
from keras import ops

from switch_tf import decoding
from switch_tf.decoding import Beam

# One layer a stack, as loop_test.py has the caches of several; tied, small models repeat themselves.
UNTIED = {"logits_via_embedding": False, "scale_decoder_outputs": False, "num_encoder_layers": 1,
          "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
INPUTS = np.random.default_rng(2).integers(2, 32, (3, 6)).astype("int32")
INPUTS[1, 3:] = 0
FEATURES = {"encoder_input_tokens": INPUTS}


class Table:
    """A model that predicts the next token from the last one alone, with log probabilities by hand."""

    compute_dtype = "float32"

    def __init__(self, probabilities):
        self.logits = np.log(np.asarray(probabilities, "float32"))
        self.config = type("Config", (), {"vocab_size": len(probabilities), "is_encoder_only": False, "end_id": 1,
                                          "decoder_sparse_layers": (), "dispatch": "auto"})

    def prefill(self, features, max_length):
        zeros = ops.zeros_like(features["encoder_input_tokens"][:, :1])
        return zeros, zeros

    def decode_step(self, tokens, is_real, cache, position, cross_cache):
        return ops.take(ops.convert_to_tensor(self.logits), tokens, axis=0), cache


# After the start (0): 2 or 3; after 2 the end is improbable, after 3 it is certain. 1 is the end.
CHAIN = [[0.01, 0.01, 0.58, 0.40], [0.25] * 4, [0.10, 0.30, 0.30, 0.30], [0.01, 0.97, 0.01, 0.01]]


def decode(sampler, model, features=FEATURES, max_length=5):
    return [ops.convert_to_numpy(one) for one in sampler.decode(model, features, max_length)]


def test_a_sequence_that_begins_worse_may_end_better():
    one = {"encoder_input_tokens": np.array([[5]], "int32")}
    ids, scores = decode(decoding.Greedy(), Table(CHAIN), one, 3)
    assert ids[0, 0, 0] == 2
    ids, scores = decode(Beam(2, length_penalty=0, num_results=2), Table(CHAIN), one, 3)
    assert ids.tolist() == [[[3, 1, 0], [2, 1, 0]]]
    np.testing.assert_allclose(scores, [[np.log(0.40 * 0.97), np.log(0.58 * 0.30)]], rtol=1e-5)


def test_the_search_goes_on_while_the_worst_of_several_results_can_be_passed():
    """The end comes first with 0.6; what follows token 2 cannot pass that and makes a better second result."""
    table = [[0.01, 0.60, 0.37, 0.02], [0.25] * 4, [0.05, 0.60, 0.30, 0.05], [0.25] * 4]
    one = {"encoder_input_tokens": np.array([[5]], "int32")}
    ids, scores = decode(Beam(2, length_penalty=0, num_results=2), Table(table), one, 3)
    assert ids[0].tolist() == [[1, 0, 0], [2, 1, 0]]
    np.testing.assert_allclose(scores[0], np.log([0.60, 0.37 * 0.60]), rtol=1e-5)


def test_several_ends_leave_beams_that_go_on():
    """The four best first tokens are ends; with a single end at most two of four candidates are."""
    table = [[0.01, 0.20, 0.19, 0.18, 0.17, 0.13, 0.12], *[[0.01, 0.94, *[0.01] * 5]] * 6]
    one = {"encoder_input_tokens": np.array([[5]], "int32")}
    found = Beam(2, length_penalty=8, num_results=2).decode(Table(table), one, 2, end_id=(1, 2, 3, 4, 4))
    ids, scores = map(ops.convert_to_numpy, found)
    assert ids[0].tolist() == [[5, 1], [6, 1]]
    np.testing.assert_allclose(scores[0], np.log([0.13 * 0.94, 0.12 * 0.94]) / (7 / 6)**8, rtol=1e-5)
    found = Beam(2, length_penalty=0, num_results=2).decode(Table(table), one, 2, end_id=[1, 2, 3, 4])
    assert ops.convert_to_numpy(found.ids)[0].tolist() == [[1, 0], [2, 0]]
    for sampler in (Beam(2), decoding.Greedy()):
        with pytest.raises(ValueError, match="end_id must be an integer of at least 0, not 'two'"):
            sampler.decode(Table(table), one, 2, end_id="two")


@pytest.mark.parametrize("penalty, expected", [(0.0, [3, 1, 0]), (0.6, [3, 1, 0]), (8.0, [2, 3, 1])])
def test_t5s_length_penalty_by_hand(penalty, expected):
    """ln(.40 .97) = -0.9467 of two tokens, ln(.58 .30 .97) = -1.7792 of three: over (7/6)^p and (8/6)^p."""
    one = {"encoder_input_tokens": np.array([[5]], "int32")}
    ids, scores = decode(Beam(2, length_penalty=penalty), Table(CHAIN), one, 3)
    assert ids[0, 0].tolist() == expected
    by_hand = {2: -0.94675, 3: -1.77915}[np.count_nonzero(expected)] / ((5 + np.count_nonzero(expected)) / 6) ** penalty
    np.testing.assert_allclose(scores[0, 0], by_hand, rtol=1e-4)


def test_a_wide_beam_finds_the_best_of_all_sequences(make_model):
    """All 8 + 64 + 512 sequences of a vocabulary of 8, each scored in one pass."""
    model = make_model(vocab_size=8, **UNTIED)
    inputs = np.minimum(INPUTS[:1], 7)
    every = {(*start, 1) for length in range(3) for start in itertools.product(
        [token for token in range(8) if token != 1], repeat=length)}
    every |= set(itertools.product([token for token in range(8) if token != 1], repeat=3))
    targets = np.array([(*one, *[0] * (3 - len(one))) for one in sorted(every)], "int32")
    lengths = np.array([len(one) for one in sorted(every)])
    features = {"encoder_input_tokens": np.repeat(inputs, len(targets), axis=0),
                "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1], "decoder_target_tokens": targets,
                "decoder_loss_weights": (np.arange(3) < lengths[:, None]).astype("int32")}
    # Targets may be 0 here, which masks would take for padding; experts serve padding's rows nothing.
    features["decoder_segment_ids"] = np.ones_like(targets)
    likelihoods = ops.convert_to_numpy(decoding.log_likelihoods(model, features))
    for penalty in (0.0, 1.0):
        scores = likelihoods / ((5 + lengths) / 6) ** penalty
        best = np.argsort(-scores)[:3]
        ids, found = decode(Beam(4, length_penalty=penalty, num_results=3), model, {"encoder_input_tokens": inputs}, 3)
        np.testing.assert_allclose(found[0], scores[best], rtol=1e-4)
        np.testing.assert_array_equal(ids[0], targets[best])


def test_one_beam_is_greedy_and_a_row_does_not_depend_on_its_batch(make_model):
    model = make_model(**UNTIED)
    greedy, scores = decode(decoding.Greedy(), model)
    ids, own = decode(Beam(1, length_penalty=0), model)
    np.testing.assert_array_equal(ids, greedy)
    np.testing.assert_allclose(own, scores, rtol=1e-5)
    beam = Beam(3, num_results=3)
    ids, own = decode(beam, model)
    for row in (0, 1):  # full and padded
        alone, score = decode(beam, model, {"encoder_input_tokens": INPUTS[row:row + 1]})
        np.testing.assert_array_equal(alone[0], ids[row])
        np.testing.assert_allclose(score[0], own[row], rtol=1e-5)
    assert (np.diff(own) <= 0).all() and len(np.unique(ids)) > 5


@pytest.mark.parametrize("sampler", [Beam(2), decoding.Sample(temperature=1e-6)])
def test_a_float64_model_is_decoded_as_a_float32_model(make_model, sampler):
    (ids, scores), (expected, _) = (decode(sampler, make_model(dtype, **UNTIED)) for dtype in ("float64", "float32"))
    np.testing.assert_array_equal(ids, expected)
    assert scores.dtype == "float64"


def test_a_row_of_padding_has_no_text(make_model):
    ids, scores = decode(Beam(2), make_model(), {"encoder_input_tokens": np.pad(INPUTS[:1], ((0, 1), (0, 0)))})
    assert ids[0].any() and not ids[1].any() and scores[1, 0] == 0


@pytest.mark.parametrize("arguments, message", [
    ({"num_beams": 0}, "num_beams must be an integer of at least 1"),
    ({"length_penalty": -1}, "length_penalty must be"),
    ({"num_beams": 2, "num_results": 3}, "num_results must be at most num_beams, 2, not 3")])
def test_wrong_values_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Beam(**arguments)


def test_a_vocabulary_smaller_than_its_candidates_is_refused():
    with pytest.raises(ValueError, match="num_beams must be at most 2, half of the vocabulary, not 3"):
        decode(Beam(3), Table(CHAIN))
