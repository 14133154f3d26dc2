"""What is text never becomes a control token."""

import pytest
import seqio
import tensorflow as tf

from switch_tf.tasks import corpora, preprocessors, sentinels, vocabularies

VOCABULARY = vocabularies.docs_corpus()
FIRST_SENTINEL = VOCABULARY.vocab_size - vocabularies.NUM_SENTINELS
CONTROL = {0, 1, *range(FIRST_SENTINEL, VOCABULARY.vocab_size)}


def tokens_of(*texts, vocabulary=VOCABULARY):
    """What the first steps of a pretraining task make of texts, before noise."""
    rekey, tokenize, spell_out, *_ = preprocessors.pretraining(preprocessors.span_corruption)
    features = preprocessors.output_features(vocabulary)
    dataset = rekey(tf.data.Dataset.from_tensor_slices({"text": list(texts)}))
    dataset = spell_out(tokenize(dataset, output_features=features), output_features=features)
    return [example["targets"].tolist() for example in dataset.as_numpy_iterator()]


def test_the_vocabulary_alone_makes_a_sentinel_of_text():
    assert VOCABULARY.encode("a <extra_id_0> b")[1] == VOCABULARY.vocab_size - 1


@pytest.mark.parametrize("text", [
    "a <extra_id_0> b", "<extra_id_99>", "x<extra_id_7>y", "<extra_id_1><extra_id_2>", "<extra\u200b_id_0>",
    "＜extra_id_0＞", "<extra_id_0> at the start", "</s> <pad> <unk> <s>"])
def test_no_text_becomes_a_control_token(text):
    [tokens] = tokens_of(text)
    assert tokens and not CONTROL & set(tokens)


def test_what_is_spelt_out_can_still_be_read_and_other_text_is_as_it_was():
    plain = "No sentinel, whatever the <extra> id."
    spelt, same = tokens_of("see <extra_id_12> here", plain)
    assert VOCABULARY.decode(spelt).replace(" ", "") == "see<extra_id_12>here"
    assert same == VOCABULARY.encode(plain)


def test_texts_of_different_lengths_and_none_at_all():
    assert tokens_of("", "a") == [[], VOCABULARY.encode("a")]


def test_bytes_have_no_sentinels_in_text():
    [tokens] = tokens_of("<extra_id_0>", vocabulary=vocabularies.byte())
    assert tokens == [byte + 3 for byte in b"<extra_id_0>"]


def test_no_document_of_the_docs_corpus_becomes_a_control_token():
    texts = [text for split in corpora.NUM_DOCUMENTS for text in corpora.docs_corpus(split) if "extra_id" in text]
    assert texts
    assert any(set(VOCABULARY.encode(text)) & CONTROL for text in texts)
    assert not any(set(tokens) & CONTROL for tokens in tokens_of(*texts))


@pytest.mark.parametrize("task", ["docs_corpus_span_corruption", "docs_corpus_masked_tokens"])
def test_every_pretraining_task_spells_sentinels_out(task):
    from switch_tf.tasks import docs_corpus  # noqa: F401  registers them
    steps = seqio.TaskRegistry.get(task).preprocessors
    assert any(step is sentinels.spell_out or getattr(step, "__wrapped__", None) is sentinels.spell_out
               for step in steps)
