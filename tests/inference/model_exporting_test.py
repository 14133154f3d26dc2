"""A Keras model as a SavedModel that decodes."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import inference
from switch_tf.tasks import vocabularies

BYTES = vocabularies.byte()
SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1}


def test_ids_are_decoded_as_generate_does(make_model, tmp_path):
    model = make_model(**SHALLOW)
    inference.export(model, tmp_path / "saved", max_length=4)
    loaded = tf.saved_model.load(tmp_path / "saved")
    for shape in ((2, 5), (3, 7)):
        ids = np.random.default_rng(0).integers(2, 32, shape).astype("int32")
        found = loaded.signatures["serving_default"](inputs=tf.constant(ids))
        np.testing.assert_array_equal(found["outputs"], model.generate(ids, max_length=4))
        assert found["scores"].shape == shape[:1]
    card = (tmp_path / "saved" / "MODEL_CARD.md").read_text()
    assert "int32 [batch, 4]" in card and "decoded by greedy search." in card


@pytest.mark.slow
def test_with_a_vocabulary_texts_are_answered_as_generate_does(make_model, tmp_path):
    model = make_model(vocab_size=384, logits_via_embedding=False, scale_decoder_outputs=False)
    inference.export(model, tmp_path / "saved", BYTES, max_length=6, inputs_length=20)
    loaded = tf.saved_model.load(tmp_path / "saved")
    texts = ["ab <extra_id_0> c", "d", "zzz"]
    found = loaded.signatures["serving_default"](inputs=tf.constant(texts))["outputs"].numpy()
    assert [text.decode(errors="replace") for text in found] == inference.generate(model, texts, BYTES, max_length=6)


@pytest.mark.parametrize("changes, options, message", [
    ({"num_decoder_layers": 0}, {}, "has no decoder"), ({}, {"vocabulary": BYTES}, "The vocabulary has 359 ids"),
    ({}, {"max_length": 0}, "max_length must be"), ({}, {"sampler": "best"}, "'greedy'")])
def test_mistakes_are_refused_before_anything_is_written(make_model, tmp_path, changes, options, message):
    with pytest.raises(ValueError, match=message):
        inference.export(make_model(**{**SHALLOW, **changes}), tmp_path / "saved", **options)
    assert not (tmp_path / "saved").exists()
