import pytest
from t5.evaluation import metrics

from switch_tf.configs import directions


@pytest.mark.parametrize("name", ["loss", "eval/task/loss", "eval/task/unigram_loss", "perplexity", "min_edit",
                                  "sum_edit", "edit_distance", "word_error_rate", "wer", "rmse", "eval/a/nll",
                                  "max_error"])
def test_lower_is_better(name):
    assert directions.is_lower_better(name)


@pytest.mark.parametrize("name", [
    "accuracy", "token_accuracy", "sequence_accuracy", "f1", "em", "exact_match", "bleu", "rouge1", "rougeLsum",
    "pearson_corrcoef", "spearman_corrcoef", "matthews_corrcoef", "auc-roc", "mean_score", "answer", "edited", "flower",
    "eval/loss_of_words/f1", "eval/average"])
def test_higher_is_better(name):
    assert not directions.is_lower_better(name)


def test_every_value_of_t5s_edit_distance_is_better_low():
    values = metrics.edit_distance(["a b"], ["a c"])
    assert all(map(directions.is_lower_better, values))


def test_what_a_metric_declares_comes_first():
    assert directions.is_lower_better("eval/t/f1", {"eval/t/f1": True})
    assert not directions.is_lower_better("eval/t/loss", {"eval/t/loss": False})
    records = [{"step": 1, "lower_is_better": {"a": True, "b": 3}}, {"step": 2}, {"step": 3, "lower_is_better": []}]
    assert directions.declared_in(records) == {"a": True}
