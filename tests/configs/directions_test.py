import pytest
from t5.evaluation import metrics

from switch_tf.configs import directions
from switch_tf.tasks import text_metrics


@pytest.mark.parametrize("name", [
    "loss", "eval/task/loss", "eval/task/unigram_loss", "cross_entropy_loss", "perplexity", "ppl", "min_edit",
    "sum_edit", "edit_distance", "word_error_rate", "wer", "rmse", "mape", "eval/a/nll", "negative_log_likelihood",
    "neg_log_likelihood", "bpb", "kl_divergence", "max_error", "false_positive_rate", "brier_score", "mae_mean"])
def test_lower_is_better(name):
    assert directions.is_lower_better(name) is True


@pytest.mark.parametrize("name", [
    "accuracy", "token_accuracy", "sequence_accuracy", "f1", "mean_3class_f1", "f1_macro", "em", "exact_match", "bleu",
    "bleu_score", "rouge1", "rougeLsum", "pearson_corrcoef", "spearman_corrcoef", "matthews_corrcoef", "auc-roc",
    "log_likelihood", "neg_log_perplexity", "true_positive_rate", "hits@10", "precision_at_5", "eval/loss_of_words/f1",
    "eval/average"])
def test_higher_is_better(name):
    assert directions.is_lower_better(name) is False


@pytest.mark.parametrize("name", ["score", "mean_score", "answer", "edited", "flower", "eval/loss/words", "10", ""])
def test_other_names_say_nothing(name):
    assert directions.is_lower_better(name) is None


def test_every_metric_of_the_package_has_a_direction():
    numbers = {name: (["1", "2", "3"], ["1", "3", "2"]) for name in text_metrics.NAMES}
    values = [value for name, texts in numbers.items() for metric in text_metrics.metric_functions(name)
              for value in metric(*texts)]
    assert len(values) > len(text_metrics.NAMES)
    assert all(directions.is_lower_better(name) is ("edit" in name) for name in values)


def test_every_value_of_t5s_edit_distance_is_better_low():
    values = metrics.edit_distance(["a b"], ["a c"])
    assert all(map(directions.is_lower_better, values))


def test_what_a_metric_declares_comes_first():
    assert directions.is_lower_better("eval/t/f1", {"eval/t/f1": True})
    assert not directions.is_lower_better("eval/t/loss", {"eval/t/loss": False})
    records = [{"step": 1, "lower_is_better": {"a": True, "b": 3}}, {"step": 2}, {"step": 3, "lower_is_better": []}]
    assert directions.declared_in(records) == {"a": True}
