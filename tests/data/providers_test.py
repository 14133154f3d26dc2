"""Tasks by name: their vocabularies, and the refusal of unknown names."""

import pytest

from switch_tf import data
from switch_tf.tasks import docs_corpus  # noqa: F401  registers the tasks


def test_the_vocabulary_of_a_task_counts_its_sentinels():
    assert data.vocabulary_size("docs_corpus_span_corruption") == 4096
    assert data.vocabulary_size("docs_corpus_span_corruption_bytes") == 359


def test_a_model_with_too_few_embeddings_is_refused():
    data.check_vocabulary("docs_corpus_span_corruption", 4096)
    data.check_vocabulary("docs_corpus_span_corruption_bytes", 4096)
    with pytest.raises(ValueError, match=r"vocab_size 4095, but .* has token ids up to 4095; set .* at least 4096"):
        data.check_vocabulary("docs_corpus_span_corruption", 4095)


def test_a_misspelt_task_is_answered_with_the_nearest():
    data.check_task("docs_corpus_span_corruption")
    with pytest.raises(ValueError, match=r"_coruption'. Did you mean 'docs_corpus_span_corruption'\?"):
        data.check_task("docs_corpus_span_coruption")
    with pytest.raises(ValueError, match=r"`switch-tf tasks` lists .*--gin_file=gin/tasks/docs_corpus\.gin"):
        data.check_task("???")


def test_an_unknown_task_has_no_batches():
    with pytest.raises(ValueError, match="Did you mean 'docs_corpus_masked_tokens'"):
        data.get_dataset(data.DatasetDescription("docs_corpus_masked_token", {"inputs": 4, "targets": 4}, 2))
