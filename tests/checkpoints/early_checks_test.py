"""Runs are refused for their names before TensorFlow is imported."""

import types

import pytest

from switch_tf import tasks
from switch_tf.checkpoints import early_checks
from switch_tf.configs.run import Run
from switch_tf.refusals import Refusal

TASK = "docs_corpus_span_corruption"
assert TASK in {name for names in tasks.TASKS.values() for name in names}  # the import declares them


def check(folder, **changes):
    run = Run(str(folder), TASK, {"inputs": 8, "targets": 8}, 10, 2, **changes)
    early_checks.check(types.SimpleNamespace(run=run, config=None))


@pytest.mark.parametrize("metric, hint", [
    ("eval/no_such_task/loss", f"The task of this run is '{TASK}'."),
    ("eval/docs_corpus_span_coruption/loss", f"Did you mean 'eval/{TASK}/loss'?")])
def test_a_best_metric_of_no_task_is_refused_and_the_runs_own_task_named(tmp_path, metric, hint):
    with pytest.raises(Refusal) as refusal:
        check(tmp_path / "run", best_metric=metric)
    assert str(refusal.value).endswith(hint) and "BEST_METRIC must be of a task that this run evaluates" in str(
        refusal.value)


@pytest.mark.parametrize("metric", [f"eval/{TASK}/loss", "eval/average", "eval/glue_mrpc/f1"])
def test_metrics_that_may_be_measured_pass(tmp_path, metric):
    check(tmp_path / "run", best_metric=metric)


def test_a_vocabulary_that_is_nowhere_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(Refusal, match="VOCABULARY 'byts' is no registered vocabulary .* Did you mean 'bytes'"):
        check(tmp_path / "run", vocabulary="byts")
