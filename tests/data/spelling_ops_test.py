"""Texts to ids and back by TensorFlow's operations: what Python's functions make of them."""

import numpy as np
import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.tasks import vocabularies

VOCABULARIES = {"sentencepiece": vocabularies.docs_corpus(), "bytes": vocabularies.byte(),
                "no_sentinels": seqio.ByteVocabulary(extra_ids=0), "three_sentinels": seqio.ByteVocabulary(extra_ids=3)}
TEXTS = ["the array", "a <extra_id_0> of <extra_id_12> numbers<extra_id_1>", "<extra_id_99>",
         "<extra_id_100> <extra_id_x>", "  two  spaces\tand a tab ", "<extra_id_0><extra_id_0>",
         "na\u00efve \u4e2d\u6587 \U0001f600", "x" * 60,
         "<extra_id_007>", "a <extra_id_1\u0663> b <extra_id_1\uff11>",
         "one\0two", "\0<extra_id_0>\0a<extra_id_1>\0",
         "a <extra_id_0>\u0338 b", "\u0338<extra_id_0>", "\u2003 \x0b<extra_id_2>\u00a0\x85"]
EMPTY = {"sentencepiece": ["", " ", "\u2003\x0b"]}  # bytes make ids of every character


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request):
    return VOCABULARIES[request.param]


def compiled(function):
    return tf.function(function, autograph=False)


READINGS = [(True, True, "gaps", ""), (True, False, "spelt_out", "label: <extra_id_1> "), (False, True, "gaps", ""),
            (True, True, "as_tokenized", "a ")]


# Other numbers of sentinels matter where sentinels are read.
@pytest.mark.parametrize("name, ends, keeps_end, sentinels, prefix", [
    (name, *reading) for name in VOCABULARIES for reading in READINGS[:2 if "sentinels" in name else 4]])
def test_ids_are_those_of_a_reading(name, ends, keeps_end, sentinels, prefix):
    vocabulary = VOCABULARIES[name]
    graph = data.SpellingOps(vocabulary, sentinels, prefix, keeps_end)
    reading = data.Reading(vocabulary, vocabulary, ends, ends, prefix, sentinels, keeps_end)
    read = compiled(lambda texts: graph.read(texts, 24, ends))
    ids = read(tf.constant(TEXTS)).numpy()
    for text, row in zip(TEXTS, ids, strict=True):
        expected, _ = reading.read(text, 24)
        assert row.tolist() == expected + [0] * (ids.shape[1] - len(expected)), text


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_text_with_nothing_in_it_is_padding(name):
    graph = data.SpellingOps(VOCABULARIES[name])
    empty = EMPTY.get(name, [""])
    read = tf.function(lambda texts: graph.read(texts, 24, True), [tf.TensorSpec([None], tf.string)], autograph=False)
    assert not read(tf.constant([*empty, "a"])).numpy()[:-1].any()
    assert read(tf.constant(empty)).shape == (len(empty), 1) and read(tf.constant([], tf.string)).shape[0] == 0


def test_texts_are_those_of_spell(vocabulary):
    random = np.random.default_rng(0)
    ids = random.integers(0, vocabulary.vocab_size + 20, (40, 9)).astype("int32")
    if isinstance(vocabulary, seqio.ByteVocabulary):  # letters, as what is no UTF-8 has many spellings
        ids = np.where((ids > 2) & (ids < 259), 3 + 32 + ids % 90, ids)
    ids[20:30, 0] = ids[25:35, 2] = 0  # within a sequence
    ids[:10, 5] = vocabulary.eos_id
    ids[10, :] = 0
    ids[11, 0] = vocabulary.eos_id
    ids[12, 1:] = vocabulary.vocab_size - 1
    expected = []
    for row in ids.tolist():
        row = row[:row.index(vocabulary.eos_id)] if vocabulary.eos_id in row else row
        while row and not row[-1]:
            row.pop()
        expected.append(data.spell(vocabulary, row))
    graph = data.SpellingOps(vocabulary)
    found = [text.decode() for text in compiled(graph.spell)(ids).numpy()]
    assert found == expected and len(set(found)) > 30


def test_other_vocabularies_are_refused():
    with pytest.raises(ValueError, match="of SentencePiece or of bytes .* a PassThroughVocabulary"):
        data.SpellingOps(seqio.PassThroughVocabulary(100))
