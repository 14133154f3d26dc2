"""Texts to ids and back, and the same answers by hand, by `generate` and whatever the batch."""

import numpy as np
import pytest
import seqio
from keras import ops

from switch_tf import data, decoding, inference
from switch_tf.inference.text_model import TextModel
from switch_tf.tasks import vocabularies

BYTES = vocabularies.byte()
TEXTS = ["ab <extra_id_0> c", "d", "a rather long text that is cut somewhere"]


@pytest.fixture
def model(make_model):
    return make_model(vocab_size=384, logits_via_embedding=False, scale_decoder_outputs=False, num_encoder_layers=1,
                      num_decoder_layers=1, encoder_sparse_step=1, decoder_sparse_step=1)


@pytest.mark.parametrize("text, ids", [
    ("ab", [100, 101]), ("<extra_id_0>", [358]), ("a<extra_id_0><extra_id_99> b", [100, 358, 259, 35, 101]),
    ("<extra_id_100>", None), ("<extra_id_x>", None), ("<extra_id_-1>", None)])
def test_a_typed_sentinel_is_one(text, ids):
    found = data.read_text(BYTES, text)
    if ids is None:  # spelt out, byte by byte
        assert len(found) == len(text)
    else:
        assert found == ids and data.spell(BYTES, ids) == text


@pytest.mark.parametrize("extra_ids", [0, 3])
def test_a_vocabulary_has_as_many_sentinels_as_it_has(extra_ids):
    vocabulary = seqio.ByteVocabulary(extra_ids=extra_ids)
    ids = data.read_text(vocabulary, "a<extra_id_2>")
    assert ids == ([100, 259] if extra_ids else [100, *(3 + letter for letter in b"<extra_id_2>")])
    assert data.spell(vocabulary, [100, 3 + ord("z")]) == "az"
    assert data.spell(vocabulary, [258 + extra_ids]) == ("<extra_id_0>" if extra_ids else vocabulary.decode([258]))


def test_ids_beyond_the_vocabulary_are_told():
    assert data.spell(BYTES, [100, 358, 359, 383, 1]) == "a<extra_id_0> <id_359> <id_383> </s>"


def test_pieces_are_what_ids_stand_for():
    vocabulary = vocabularies.docs_corpus()
    ids = data.read_text(vocabulary, "the arrays <extra_id_0> é")
    pieces = data.pieces(vocabulary, [0, *ids, 1])
    assert "".join(pieces[1:-1]).replace("<0xC3><0xA9>", "é") == " the arrays<extra_id_0> é"
    assert (pieces[0], pieces[-1]) == ("<pad>", "</s>")
    assert data.pieces(BYTES, [0, 100, 35, 3 + 0xc3, 358, 370, 1]) == [
        "<pad>", "a", " ", "<id_198>", "<extra_id_0>", "<id_370>", "</s>"]


def test_answers_are_those_of_the_ids(model):
    text_model = TextModel(model, data.Reading(BYTES, BYTES), 20, 6, batch_size=2)
    read = [text_model.read(text) for text in TEXTS]
    assert [one.num_cut for one in read] == [0, 0, len(TEXTS[2]) + 1 - 20]
    assert read[1].ids == [103, 1] and read[0].ids == [100, 101, 35, 358, 35, 102, 1]
    found = [text_model.answer([read[0].ids, read[1].ids], [0, 1]), text_model.answer([read[2].ids], [2])]
    inputs = np.zeros((3, 20), "int32")
    for row, one in zip(inputs, read, strict=True):
        row[:len(one.ids)] = one.ids
    ids, scores = decoding.Greedy().decode(model, {"encoder_input_tokens": inputs}, 6)
    for (answer,), one, score in zip(found[0] + found[1], ops.convert_to_numpy(ids[:, 0]), scores[:, 0], strict=True):
        assert answer.text == data.spell(BYTES, [id_ for id_ in one if id_ > 1])
        assert answer.score == pytest.approx(float(score), rel=1e-5)
    assert len({answer.text for (answer,) in found[0] + found[1]}) == 3


def test_generate_takes_texts_and_gives_texts(model):
    found = inference.generate(model, TEXTS, BYTES, max_length=6)
    assert len(found) == 3 and len(set(found)) == 3 and inference.generate(model, [], "bytes") == []


@pytest.mark.slow
def test_generate_draws_alike_in_any_batch(model):
    found, sample = inference.generate(model, TEXTS, "bytes", max_length=6, batch_size=2), decoding.Sample(seed=1)
    drawn = inference.generate(model, TEXTS, BYTES, max_length=6, sampler=sample)
    assert inference.generate(model, TEXTS, BYTES, max_length=6, sampler=sample, batch_size=1) == drawn != found


def test_scores_are_likelihoods_of_the_targets(model):
    text_model = TextModel(model, data.Reading(BYTES, BYTES), 20, 6, batch_size=4)
    inputs, targets = text_model.read("ab").ids, text_model.read_target("cd").ids
    assert targets == [102, 103, 1]
    expected = decoding.log_likelihoods(model, {
        "encoder_input_tokens": np.array([inputs], "int32"), "decoder_input_tokens": np.array([[0, 102, 103]], "int32"),
        "decoder_target_tokens": np.array([targets], "int32"), "decoder_loss_weights": np.ones((1, 3), "int32")})
    assert text_model.score([inputs] * 3, [targets] * 3) == pytest.approx([float(expected[0])] * 3, rel=1e-5)


@pytest.mark.parametrize("texts, options, message", [
    ("one text", {}, r"texts must be a list of them, such as \['one text'\]"), ([""], {}, "A text must be text that"),
    ([3], {}, "A text must be text"),
    (["a"], {"vocabulary": "docs_corpus"}, "The vocabulary has 4096 ids and the model"),
    (["a"], {"max_length": 0}, "max_length must be"), (["a"], {"batch_size": 0}, "batch_size must be")])
def test_what_is_wrong_is_one_sentence(model, texts, options, message):
    with pytest.raises(ValueError, match=message):
        inference.generate(model, texts, **{"vocabulary": BYTES, **options})
