"""A SavedModel answers as the model that it was made of, in batches of any size."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import data, decoding
from switch_tf.inference import exporting
from switch_tf.inference.text_model import TextModel
from switch_tf.refusals import Refusal
from switch_tf.tasks import vocabularies

BYTES = vocabularies.byte()
TEXTS = ["ab <extra_id_0> c", "d", "a rather long text that is cut somewhere", "<extra_id_3>", "zzz"]
CASES = [(decoding.Greedy(), "mixed_bfloat16"),
         pytest.param(decoding.Sample(top_k=9, seed=1), "float32", marks=pytest.mark.exhaustive),
         (decoding.Beam(3), "float32")]


@pytest.fixture
def text_model(make_model):
    """A function to a TextModel of five rows."""

    def make(sampler="greedy", dtype="float32", **options):
        model = make_model(dtype, vocab_size=384, logits_via_embedding=False, scale_decoder_outputs=False, **options)
        return TextModel(model, data.Reading(BYTES, BYTES), 20, 6, sampler, batch_size=5)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("sampler, dtype", CASES, ids=repr)
def test_it_answers_as_the_model_does(text_model, tmp_path, sampler, dtype):
    model = text_model(sampler, dtype)
    exporting.export_texts(model, tmp_path / "saved", {"step": 3})
    signatures = tf.saved_model.load(tmp_path / "saved").signatures
    found = signatures["serving_default"](inputs=tf.constant(TEXTS))
    expected = [results[0] for results in model.answer([model.read(text).ids for text in TEXTS], range(5))]
    assert len({one.text for one in expected}) > 3
    # In bfloat16 the programs' products round differently, and nearly level tokens change places.
    rounding = 1e-5 if dtype == "float32" else 0.02
    np.testing.assert_allclose(found["scores"], [one.score for one in expected], rtol=rounding)
    if dtype == "float32":
        assert [text.decode(errors="replace") for text in found["outputs"].numpy()] == [one.text for one in expected]
    if isinstance(sampler, decoding.Beam):  # draws depend on the row's number
        for text, answer in zip(TEXTS, found["outputs"].numpy(), strict=True):
            assert signatures["serving_default"](inputs=tf.constant([text]))["outputs"].numpy() == [answer]


@pytest.mark.slow
def test_texts_and_ids_have_signatures_and_what_is_empty_has_no_answer(text_model, tmp_path):
    model = text_model()
    exporting.export_texts(model, tmp_path / "saved", {})
    signatures = tf.saved_model.load(tmp_path / "saved").signatures
    ids = np.random.default_rng(0).integers(2, 384, (3, 7)).astype("int32")
    ids[1] = 0
    expected = model.sampler.decode(model.model, {"encoder_input_tokens": ids}, 6)
    found = signatures["ids"](inputs=tf.constant(ids))
    np.testing.assert_array_equal(found["outputs"], expected.ids[:, 0])
    np.testing.assert_allclose(found["scores"], expected.scores[:, 0], rtol=1e-5)
    answers = [results[0] for results in model.answer([model.read(text).ids for text in TEXTS], range(5))]
    found = signatures["serving_default"](inputs=tf.constant([*TEXTS, "", ""]))
    assert [text.decode() for text in found["outputs"].numpy()] == [*(one.text for one in answers), "", ""]
    np.testing.assert_allclose(found["scores"], [*(one.score for one in answers), 0, 0], rtol=1e-5)
    card = (tmp_path / "saved" / exporting.CARD).read_text()
    assert '"num_experts": 4' in card and "below 384" in card and "int32 [batch, 6]" in card
    assert "by greedy search." in card or "by beam search (num_beams" in card


def test_nothing_is_left_of_an_export_that_failed(text_model, tmp_path, monkeypatch):
    def fail(module, folder, signatures):
        raise OSError("No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", fail)
    with pytest.raises(Refusal, match="No space left"):
        exporting.export_texts(text_model(), tmp_path / "saved", {})
    assert not list(tmp_path.iterdir())
    (tmp_path / "kept").write_text("x")
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        exporting.export_texts(text_model(), tmp_path, {})
