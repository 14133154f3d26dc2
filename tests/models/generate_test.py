"""`model.generate`: ids in, ids out, as Keras' users know it."""

import keras
import numpy as np
import pytest
from keras import ops

from switch_tf import SwitchTransformer, decoding
from tests.models.conftest import SHALLOW

UNTIED = {"logits_via_embedding": False, "scale_decoder_outputs": False, **SHALLOW}
INPUTS = np.random.default_rng(3).integers(2, 32, (3, 7)).astype("int32")
INPUTS[2, 4:] = 0


@pytest.mark.parametrize("sampler, same", [
    ("greedy", decoding.Greedy()), pytest.param("sample", decoding.Sample(), marks=pytest.mark.slow),
    pytest.param("beam", decoding.Beam(), marks=pytest.mark.slow),
    (decoding.Sample(top_k=5, seed=2), decoding.Sample(top_k=5, seed=2))])
def test_it_is_what_the_sampler_decodes_in_a_program(make_model, sampler, same):
    model = make_model(**UNTIED)
    ids = model.generate(INPUTS, max_length=5, sampler=sampler)
    assert ids.dtype == "int32"
    np.testing.assert_array_equal(ids, same.decode(model, {"encoder_input_tokens": INPUTS}, 5).ids[:, 0])


def test_lengths_of_a_kind_share_a_program_and_new_weights_are_seen(fresh_model):
    model = fresh_model(**UNTIED)
    first = ops.convert_to_numpy(model.generate(INPUTS.tolist(), max_length=4))
    (program,) = model._programs.values()
    traced = program.experimental_get_tracing_count()
    np.testing.assert_array_equal(model.generate(np.pad(INPUTS, ((0, 0), (0, 20))), max_length=4), first)
    assert program.experimental_get_tracing_count() == traced == 1
    model.logits_dense.kernel.assign(-model.logits_dense.kernel)
    assert (ops.convert_to_numpy(model.generate(INPUTS, max_length=4)) != first).any()


@pytest.mark.slow
def test_a_model_that_was_saved_and_loaded_generates_alike(make_model, tmp_path):
    model = make_model(**UNTIED)
    ids = model.generate(INPUTS, max_length=4)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras").generate(INPUTS, max_length=4), ids)


def test_a_new_model_builds_itself(shallow_config):
    assert SwitchTransformer(shallow_config).generate([[5, 6]], max_length=2).shape == (1, 2)


@pytest.mark.parametrize("inputs, options, message", [
    ([[5, 32]], {}, r"Ids of inputs must be in \[0, 32\), not 32"), ([[1], [2, 3]], {}, "inputs must be ids, <int32>"),
    ([5, 6], {}, r"inputs must be <int>\[any, any\], not <int\d+>\[2\]"),
    ("text", {}, "inputs must be .*switch_tf.inference.generate"),
    ([[5.0]], {}, "inputs must be <int>"), ([[5]], {"max_length": 0}, "max_length must be an integer of at least 1"),
    ([[5]], {"sampler": "best"}, "sampler must be one of 'greedy', 'sample', 'beam', not 'best'"),
    (np.zeros((0, 5), "int32"), {}, "inputs must hold"), (np.zeros((2, 0), "int32"), {}, "inputs must hold"),
    ([], {}, "inputs must be"), ([[]], {}, "inputs must hold"),
    ([[5]], {"end_id": "1"}, "end_id must be an integer"),
    ([[5]], {"end_id": 32}, "end_id must be below 32, the size of the vocabulary, not 32"),
    ([[5]], {"end_id": (1, 40)}, "end_id must be below 32, the size of the vocabulary, not 40"),
    ([[-1]], {}, r"Ids of inputs must be in \[0, 32\), not -1")])
def test_what_is_wrong_is_one_sentence_before_weights_are_made(make_model, inputs, options, message):
    model = SwitchTransformer(make_model().config)
    with pytest.raises(ValueError, match=message):
        model.generate(inputs, **options)
    assert not model.built
