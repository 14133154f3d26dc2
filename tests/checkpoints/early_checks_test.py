"""Runs are refused for their names before TensorFlow is imported."""

import dataclasses
import json
import types

import pytest

from switch_tf import SwitchConfig, tasks
from switch_tf.checkpoints import continuation, folders
from switch_tf.configs.run import Run, StepSettings
from switch_tf.refusals import Refusal

TASK = "docs_corpus_span_corruption"
assert TASK in {name for names in tasks.TASKS.values() for name in names}  # the import declares them


def check(folder, config=None, **changes):
    run = Run(str(folder), TASK, {"inputs": 8, "targets": 8}, 10, 2, **changes)
    continuation.check_early(types.SimpleNamespace(run=run, config=config, settings=StepSettings()))


@pytest.mark.parametrize("metric, hint", [
    ("eval/no_such_task/loss", f"evaluates, {TASK}, not 'eval/no_such_task/loss'."),
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


def test_another_model_or_batch_than_the_newest_checkpoints_is_refused(tmp_path):
    config = SwitchConfig(num_experts=4)
    path = folders.path_of(tmp_path / "run" / "checkpoints", 1)
    path.mkdir(parents=True)

    def write(batch_size, **settings):
        saved = continuation.record_of(config, StepSettings(**settings)) | {"BATCH_SIZE": batch_size}
        (path / "checkpoint.json").write_text(json.dumps(
            {"format_version": 3, "step": 1, "variables": {}, "files": {}, "configuration": saved}))

    write(2)
    check(tmp_path / "run", config)
    with pytest.raises(Refusal, match="SwitchConfig.d_ff was 2048 and is 64"):
        check(tmp_path / "run", dataclasses.replace(config, d_ff=64))
    write(3)
    with pytest.raises(Refusal, match="BATCH_SIZE was 3 and is 2"):
        check(tmp_path / "run", config)
    write(2, trainable="router")
    with pytest.raises(Refusal, match="StepSettings.trainable was 'router' and is 'all'"):
        check(tmp_path / "run", config)
