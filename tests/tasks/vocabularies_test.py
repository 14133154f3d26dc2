import pathlib

import pytest

from switch_tf.tasks import train_vocabulary, vocabularies


@pytest.mark.exhaustive
def test_the_shipped_models_are_what_the_script_makes():
    for make, vocabulary in ((train_vocabulary.docs_corpus, vocabularies.docs_corpus()),
                             (train_vocabulary.source_code, vocabularies.source_corpus())):  # fmt: skip
        assert make() == pathlib.Path(vocabulary.sentencepiece_model_file).read_bytes()


def test_sizes_are_those_of_the_presets():
    assert vocabularies.docs_corpus().vocab_size == vocabularies.source_corpus().vocab_size == 4096
    assert vocabularies.byte().vocab_size == 3 + 256 + 100


def test_the_first_sentinel_is_the_last_id():
    assert vocabularies.docs_corpus().encode("<extra_id_0>")[-1] == 4095


def test_every_character_can_be_encoded():
    vocabulary = vocabularies.docs_corpus()
    text = "What? naïve café: 100% {x} [y] ~ ☃ 漢字"
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.unk_id not in vocabulary.encode(text)


def test_remote_vocabularies_are_not_read_before_an_id_is_needed():
    for vocabulary in (vocabularies.t5(), vocabularies.mt5()):
        assert vocabulary.sentencepiece_model_file.startswith("gs://")
        assert vocabulary._model is None


def test_all_tasks_share_one_object():
    assert vocabularies.docs_corpus() is vocabularies.docs_corpus()
