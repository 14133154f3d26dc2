"""The evaluator with predictions by hand, on tasks with known answers."""

import dataclasses

import numpy as np
import pytest
import seqio
import tensorflow as tf
from t5.evaluation import metrics

from switch_tf import data
from switch_tf.evaluation import split_evaluator
from switch_tf.evaluation.split_evaluator import TaskResult
from switch_tf.refusals import Refusal
from switch_tf.tasks import preprocessors, vocabularies

LENGTHS = {"inputs": 16, "targets": 8}
NUM_EXAMPLES = 11


def _numbers(split, shuffle_files=False, seed=None):
    del shuffle_files, seed
    return tf.data.Dataset.range(NUM_EXAMPLES if split == "validation" else 0).map(lambda number: {
        "inputs": tf.strings.join(["parity: ", tf.as_string(number)]),
        "targets": tf.where(number % 2 == 0, "even", "odd")})


def mean_log_likelihood(targets, scores):
    return {"mean_log_likelihood": np.mean(scores), "picture": seqio.metrics.Text("none")}


def with_aux(targets, predictions, aux_values):
    return {}


def missed(targets, predictions):
    return {"words_missed": sum(map(str.__ne__, targets, predictions)), "hints": 0}


missed.lower_is_better = True


def divides(targets, predictions):
    return {"nothing": 1 / 0}


TASKS = {"parity": [metrics.accuracy], "parity_scored": [mean_log_likelihood], "parity_plain": [],
         "parity_aux": [with_aux], "parity_fails": [divides], "parity_declared": [missed, metrics.accuracy]}


@pytest.fixture(scope="module", autouse=True)
def _tasks():
    before = set(seqio.TaskRegistry.names()), set(seqio.MixtureRegistry.names())
    for name, functions in TASKS.items():
        seqio.TaskRegistry.add(
            name, source=seqio.FunctionDataSource(_numbers, splits=["train", "validation"]), metric_fns=functions,
            preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
            output_features=preprocessors.output_features(vocabularies.byte()))
    seqio.MixtureRegistry.add("parities", ["parity", "parity_scored", "parity_plain"], default_rate=1.0)
    seqio.MixtureRegistry.add("parities_declared", ["parity_declared", "parity"], default_rate=1.0)
    yield
    for registry, names in zip((seqio.TaskRegistry, seqio.MixtureRegistry), before, strict=True):
        for name in set(registry.names()) - names:
            registry.remove(name)


def _description(name, batch_size=4, split="validation"):
    return data.DatasetDescription(name, LENGTHS, batch_size, split)


def _says(answer):
    """A model that answers only by the number in its inputs."""
    vocabulary = vocabularies.byte()

    def predict(features):
        assert set(features) == {"encoder_input_tokens"}
        rows = []
        for row in features["encoder_input_tokens"]:
            text = vocabulary.decode(row.tolist())
            ids = [*vocabulary.encode(answer(int(text.partition(": ")[2]))), 1] if text else []
            rows.append(ids + [0] * (8 - len(ids)))
        return np.array(rows, "int32")

    return predict


def _scores(features):
    return -features["decoder_loss_weights"].sum(-1)


RIGHT = _says(lambda number: "odd" if number % 2 else "even")


@pytest.mark.parametrize("batch_size", [1, 4, 11, 32])
def test_predictions_are_scored_by_the_tasks_metric_whatever_the_batch(batch_size):
    evaluator = data.Evaluator(_description("parity", batch_size))
    right = evaluator.evaluate(RIGHT, _scores)
    assert right["parity"].metrics == {"accuracy": 100.0}
    assert len(right["parity"].records) == NUM_EXAMPLES
    assert right["parity"].records[3] == {"inputs": "parity: 3", "targets": "odd", "prediction": "odd"}
    assert evaluator.evaluate(RIGHT, _scores, has_records=False)["parity"] == data.TaskScores({"accuracy": 100.0}, [])
    always_odd = evaluator.evaluate(_says(lambda number: "odd"), _scores)
    assert always_odd["parity"].metrics["accuracy"] == pytest.approx(100 * 5 / 11)


def test_every_task_of_a_mixture_with_metrics_is_scored_by_predictions_or_likelihoods():
    done = []
    evaluator = data.Evaluator(_description("parities"))
    scores = evaluator.evaluate(RIGHT, _scores, done.append)
    assert set(scores) == {"parity", "parity_scored"}
    # "even" and "odd" with their ends are 5 and 4 bytes; what is no number is left out.
    assert scores["parity_scored"].metrics == {"mean_log_likelihood": pytest.approx(-(6 * 5 + 5 * 4) / 11)}
    assert scores["parity_scored"].records[0] == {"inputs": "parity: 0", "targets": "even", "score": -5.0}
    assert sum(done) == 2 * NUM_EXAMPLES
    assert data.average(scores) == pytest.approx((100 - 50 / 11) / 2)


def _task_scores(**metrics):
    return data.TaskScores(metrics, [])


def test_an_average_is_one_over_tasks_whatever_the_number_of_their_metrics():
    scores = {"one": _task_scores(f1=90.0, em=70.0, accuracy=50.0), "two": _task_scores(accuracy=10.0)}
    assert data.average(scores) == (70 + 10) / 2  # over metrics it would be 55
    assert data.average({"one": scores["one"]}) == 70


def test_an_average_of_both_directions_says_nothing():
    assert data.average({"one": _task_scores(mean_edit=2.0), "two": _task_scores(accuracy=10.0)}) is None
    assert data.average({"one": _task_scores(mean_edit=2.0), "two": _task_scores(loss=4.0)}) == 3
    declared = data.TaskScores({"errors_made": 2.0}, [], {"errors_made": True})
    assert data.average({"one": declared, "two": _task_scores(accuracy=10.0)}) is None


def _results(scores):
    return {name: TaskResult(scores=task_scores) for name, task_scores in scores.items()}


def test_a_metric_declares_that_lower_values_of_it_are_better():
    evaluator = data.Evaluator(_description("parities_declared"))
    scores = evaluator.evaluate(RIGHT, _scores)
    assert scores["parity_declared"].declared == {"words_missed": True, "hints": True}
    assert scores["parity_declared"].lower_is_better == {"words_missed": True, "hints": True, "accuracy": False}
    results = _results(scores)
    assert split_evaluator.named({name: result.values for name, result in results.items()},
                                 split_evaluator.average(results)) == {
        "eval/parity_declared/words_missed": 0, "eval/parity_declared/hints": 0, "eval/parity_declared/accuracy": 100,
        "eval/parity/accuracy": 100}  # and no average
    assert split_evaluator.declared_directions(results) == {"eval/parity_declared/words_missed": True,
                                                            "eval/parity_declared/hints": True}


def test_an_average_of_metrics_that_are_all_better_low_is_better_low():
    scores = {name: data.TaskScores({"missed": 1.0}, [], {"missed": True}) for name in ("one", "two")}
    assert split_evaluator.declared_directions(_results(scores))["eval/average"] is True


def test_records_are_strict_json(tmp_path):
    data.write_records(tmp_path / "a.jsonl", [{"score": -np.inf}, {"score": float("nan"), "inputs": "é"}])
    assert (tmp_path / "a.jsonl").read_text() == '{"score": null}\n{"score": null, "inputs": "é"}\n'


def test_some_examples_from_the_beginning_will_do():
    evaluator = data.Evaluator(_description("parity"), num_examples=3)
    assert evaluator.num_examples == {"parity": 3}
    assert [record["inputs"] for record in evaluator.evaluate(RIGHT, _scores)["parity"].records] == [
        "parity: 0", "parity: 1", "parity: 2"]


@pytest.mark.parametrize("name", ["parity", "parities"])
def test_another_vocabulary_is_read_and_decoded_and_nothing_stays_registered(name):
    seen = []

    def predict(features):
        seen.append(features["encoder_input_tokens"].max())
        return np.array([[*vocabularies.docs_corpus().encode("odd"), 1]] * 4)

    before = set(seqio.TaskRegistry.names()), set(seqio.MixtureRegistry.names())
    description = dataclasses.replace(_description(name), vocabulary="docs_corpus")
    scores = data.Evaluator(description).evaluate(predict, _scores)
    assert max(seen) > 358  # no byte
    assert scores["parity"].records[0] == {"inputs": "parity: 0", "targets": "even", "prediction": "odd"}
    assert scores["parity"].metrics["accuracy"] == pytest.approx(100 * 5 / 11)
    assert (set(seqio.TaskRegistry.names()), set(seqio.MixtureRegistry.names())) == before


@pytest.mark.parametrize(("name", "split", "message"), [
    ("parity_plain", "validation", "No task of 'parity_plain' has metrics on split 'validation'"),
    ("parity_aux", "validation", "A metric of task 'parity_aux' asks for prediction_with_aux"),
    ("parity", "train", "Split 'train' of 'parity' has no example to evaluate"),
    ("parity", "test", "'parity' has the splits train, validation, received 'test'"),
])
def test_what_cannot_be_evaluated_is_refused(name, split, message):
    with pytest.raises(ValueError, match=message):
        data.Evaluator(_description(name, split=split))


def test_a_metric_that_fails_is_named_and_the_next_evaluation_does_not_wait_for_it():
    evaluator = data.Evaluator(_description("parity_fails"))
    for _ in range(2):
        with pytest.raises(Refusal, match="Failed to evaluate task parity_fails: division by zero"):
            evaluator.evaluate(RIGHT, _scores)
