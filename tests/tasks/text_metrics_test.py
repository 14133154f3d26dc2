"""Each metric that a gin file may name, on right and wrong predictions."""

import math

import pytest

from switch_tf.tasks import text_metrics

TARGETS = ["cat", "cat", "dog", "the big dog"]
# Three of four are right, one of the two cats is not.
PREDICTIONS = ["cat", "cow", "dog", "the big dog"]
# Name -> values that are 100 where all is right, and what they are here.
EXPECTED = {
    "accuracy": {"accuracy": 75},
    "f1": {"f1": 100 * (2 / 3 + 1 + 1) / 3},  # a cat of two found: precision 1, recall 1/2
    "sequence_accuracy": {"sequence_accuracy": 75},
    "squad": {"em": 75, "f1": 75},
    "trivia_qa": {"em": 75, "f1": 75},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_are_percent(name):
    [metric] = text_metrics.metric_functions(name)
    assert metric(TARGETS, PREDICTIONS) == pytest.approx(EXPECTED[name])
    assert metric(TARGETS, TARGETS) == pytest.approx(dict.fromkeys(EXPECTED[name], 100))


def test_bleu_rouge_and_edit_distance_tell_right_from_wrong():
    bleu, distance, rouge = text_metrics.metric_functions(["bleu", "edit_distance", "rouge"])
    long = ["the quick brown fox jumps over the lazy dog"]
    assert bleu(long, long)["bleu"] == pytest.approx(100) and bleu(long, ["no"])["bleu"] < 1
    assert distance(["cat"], ["cat"])["max_edit"] == 0 and distance(["a cat"], ["a cow"])["max_edit"] == 1
    assert rouge(long, long) == pytest.approx({"rouge1": 100, "rouge2": 100, "rougeLsum": 100})
    assert rouge(long, ["no"]) == pytest.approx({"rouge1": 0, "rouge2": 0, "rougeLsum": 0})


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_correlations_are_of_numbers(name):
    [metric] = text_metrics.metric_functions(name)
    key = f"{name}_corrcoef"
    targets = ["1.0", "2.0", "3.0", "5.0"]
    assert metric(targets, targets) == {key: pytest.approx(100)}
    assert metric(targets, ["5", "3", "2", " 1e0 "])[key] < -70
    # A prediction that is no finite number counts as -1, as in t5's STS-B.
    for wrong in ("", "three", "nan", "inf", "-Infinity"):
        assert metric(targets, ["1", wrong, "3", "5"]) == metric(targets, ["1", "-1.0", "3", "5"])


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_constants_correlate_with_nothing(name):
    [metric] = text_metrics.metric_functions(name)
    key = f"{name}_corrcoef"
    for targets, predictions in ((["1", "2"], ["3", "3"]), (["1", "1"], ["1", "1"]), (["1", "2"], ["a", "b"]),
                                 (["1"], ["1"]), (["1", "2"], ["1e200", "-1e300"])):
        assert math.isfinite(metric(targets, predictions)[key])
    assert metric(["1", "2"], ["3", "3.0"]) == {key: 0}
    with pytest.raises(ValueError, match=f"{key}, which needs numbers as targets, not 'good'"):
        metric(["1", "good"], ["1", "2"])


def test_every_name_is_a_metric_that_seqio_takes():
    import seqio

    task = seqio.Task("metrics", None, {}, metric_fns=text_metrics.metric_functions(text_metrics.NAMES))
    assert len(task.predict_metric_fns) == len(text_metrics.NAMES)


def test_another_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"METRICS must be one of 'accuracy', .*Did you mean 'accuracy'\?"):
        text_metrics.metric_functions(["acuracy"])
    with pytest.raises(ValueError, match="METRICS must be a list of names, not 5"):
        text_metrics.metric_functions(5)
