"""Scores of a model on tasks, for any batch and layout, and the losses of tasks without metrics."""

import dataclasses
import math
import types

import keras
import pytest
import seqio
import tensorflow as tf
from t5.evaluation import metrics

from switch_tf import SwitchTransformer, context, data
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation import split_evaluator
from switch_tf.evaluation.objectives import Objective
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.storage import lock
from switch_tf.tasks import preprocessors, vocabularies

LENGTHS = {"inputs": 12, "targets": 6}


@pytest.fixture(scope="module")
def shallow_config(shallow_config):
    """Experts in the decoder alone: these tests trace many programs."""
    return dataclasses.replace(shallow_config, encoder_sparse_step=0)


def _words(split, shuffle_files=False, seed=None):
    del split, shuffle_files, seed
    return tf.data.Dataset.range(11).map(
        lambda number: {"inputs": tf.strings.as_string(number * number * 37), "targets": tf.strings.as_string(number)})


def likelihood(targets, scores):
    return {"likelihood": float(sum(scores))}


@pytest.fixture(scope="module", autouse=True)
def _tasks():
    before = set(seqio.TaskRegistry.names()), set(seqio.MixtureRegistry.names())
    for name, functions in (("words", [metrics.accuracy]), ("words_scored", [likelihood]), ("words_plain", [])):
        seqio.TaskRegistry.add(
            name, source=seqio.FunctionDataSource(_words, splits=["train", "validation"]), metric_fns=functions,
            preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
            output_features=preprocessors.output_features(vocabularies.byte()))
    seqio.MixtureRegistry.add("all_words", ["words", "words_scored", "words_plain"], default_rate=1.0)
    yield
    for registry, names in zip((seqio.TaskRegistry, seqio.MixtureRegistry), before, strict=True):
        for name in set(registry.names()) - names:
            registry.remove(name)


def _model(config, partitioner):
    keras.utils.set_random_seed(1)
    # Logits of their own, or a model without training would repeat itself.
    model = SwitchTransformer(dataclasses.replace(config, logits_via_embedding=False, eval_capacity_factor=1.0))
    partitioner.build(model)
    return model


def _scores(config, batch_size, partitioner=None):
    partitioner = partitioner or Partitioner()
    description = data.DatasetDescription("all_words", LENGTHS, batch_size, "validation")
    evaluator = split_evaluator.SplitEvaluator(_model(config, partitioner), description, StepSettings(), partitioner,
                                               Objective(), losses_of=())
    return {name: result.scores for name, result in evaluator.run().items()}


def _check_same(found, expected):
    assert found.keys() == expected.keys() == {"words", "words_scored"}
    texts = [record["prediction"] for record in expected["words"].records]
    assert len(set(texts)) > 3
    assert [record["prediction"] for record in found["words"].records] == texts
    for mine, theirs in zip(found["words_scored"].records, expected["words_scored"].records, strict=True):
        assert mine["score"] == pytest.approx(theirs["score"], rel=1e-4)


@pytest.fixture(scope="module")
def expected(shallow_config):
    return _scores(shallow_config, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "changes"), [("expert_model", {}), ("data", {"backend": "mirrored"})])
def test_predictions_and_likelihoods_do_not_depend_on_the_layout(shallow_config, expected, make_partitioner, layout,
                                                                 changes):
    _check_same(_scores(shallow_config, 8, make_partitioner(layout, **changes)), expected)
    assert context.current().part == (1, 0)  # for whatever is traced next


def test_a_split_is_scored_with_any_batch_and_has_a_loss_where_there_are_no_metrics(shallow_config, expected):
    partitioner = Partitioner()
    done = []
    evaluator = split_evaluator.SplitEvaluator(
        _model(shallow_config, partitioner), data.DatasetDescription("all_words", LENGTHS, 7, "validation"),
        StepSettings(), partitioner, Objective())
    results = evaluator.run(done.append)
    assert set(results) == {"words", "words_scored", "words_plain"}
    _check_same({name: result.scores for name, result in results.items() if result.scores}, expected)
    assert results["words"].values == expected["words"].metrics
    plain = results["words_plain"].values
    assert set(plain) == {"loss", "accuracy"}
    assert 4 < plain["loss"] < 9  # near the logarithm of 384 words
    perplexity = split_evaluator.add_perplexity(results["words_plain"])["perplexity"]
    assert perplexity == pytest.approx(math.exp(plain["loss"]))
    average = split_evaluator.average(results)
    assert average == pytest.approx((results["words"].values["accuracy"]
                                     + results["words_scored"].values["likelihood"]) / 2)
    assert sum(done) == 11 + 11 + 14  # the last batch of the third is filled up
    assert list(evaluator.batches) == ["words_plain"] and evaluator.num_examples == {"words": 11, "words_scored": 11}


def test_losses_of_a_mixture_and_its_tasks_stand_beside_their_metrics(shallow_config):
    partitioner = Partitioner()
    evaluator = split_evaluator.SplitEvaluator(
        _model(dataclasses.replace(shallow_config, num_experts=0), partitioner),
        data.DatasetDescription("all_words", LENGTHS, 8, "validation"), StepSettings(), partitioner, Objective(),
        ["all_words", "words"], num_batches=1, num_examples=8)
    results = evaluator.run(has_records=False)
    assert set(results) == {"all_words", "words", "words_scored"}
    assert set(results["all_words"].values) == {"loss", "accuracy"}
    assert set(results["words"].values) == {"loss", "token_accuracy", "accuracy"}
    assert set(results["words_scored"].values) == {"likelihood"}
    assert results["words"].scores.records == []
    weights = [float(results[name].measured.accuracy.weight) for name in ("all_words", "words")]
    assert weights[1] == 16 and weights[0] <= 3 * 8  # "0" to "7", and an end each
    assert evaluator.num_examples == {"words": 8, "words_scored": 8}


def test_an_evaluator_that_is_refused_lets_another_one_write(tmp_path, monkeypatch):
    """In a notebook the error, which keeps all of its variables, stays until the next one."""
    monkeypatch.setattr(data, "check_task", lambda task: None)
    monkeypatch.setattr(data, "check_vocabulary", lambda *arguments: None)

    def make_model():
        raise Refusal("no such model")

    run = types.SimpleNamespace(mixture_or_task_name="words", vocabulary=None, batch_size=8)
    described = types.SimpleNamespace(run=run, config=types.SimpleNamespace(vocab_size=384), partitioner=Partitioner(),
                                      make_model=make_model)
    with pytest.raises(Refusal, match="no such model") as raised:
        split_evaluator.CheckpointEvaluator(described, "validation", None, tmp_path / "eval")
    with lock.held(tmp_path / "eval"):
        assert raised.value.__traceback__ is not None
