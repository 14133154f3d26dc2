import types

import pytest

from switch_tf.training import checkpoint_folders
from switch_tf.training.best import Best, UnknownMetric
from switch_tf.training.run import Run

RUN = {"model_dir": "runs/x", "mixture_or_task_name": "task", "task_feature_lengths": {"inputs": 8, "targets": 8},
       "train_steps": 100, "batch_size": 4, "eval_period": 10}


def _best(folder, metric="eval/task/f1", patience=2):
    return Best(Run(**RUN, best_metric=metric, patience=patience), types.SimpleNamespace(checkpoints=folder))


def _save(folder, *steps):
    for step in steps:
        checkpoint_folders.path_of(folder, step).mkdir(parents=True)


@pytest.mark.parametrize(("metric", "better", "worse"), [
    ("eval/task/f1", 0.6, 0.4), ("eval/task/loss", 0.4, 0.6), ("eval/task/perplexity", 0.4, 0.6)])
def test_the_best_is_the_highest_metric_and_the_lowest_loss(tmp_path, metric, better, worse):
    best = _best(tmp_path, metric)
    assert best.is_improved({metric: 0.5})
    best.keep(10, {metric: 0.5}, is_chief=True)
    assert not best.is_improved({metric: 0.5})
    assert not best.is_improved({metric: worse})
    assert best.is_improved({metric: better})


def test_another_process_of_the_run_and_the_next_one_remember_it_as_long_as_its_checkpoint_is_there(tmp_path):
    _save(tmp_path, 10)
    _best(tmp_path).keep(10, {"eval/task/f1": 0.5}, is_chief=False)
    assert _best(tmp_path).found is None
    _best(tmp_path).keep(10, {"eval/task/f1": 0.5}, is_chief=True)
    assert _best(tmp_path).found == {"step": 10, "metric": "eval/task/f1", "value": 0.5}
    assert _best(tmp_path, "eval/task/em").found is None
    checkpoint_folders.path_of(tmp_path, 10).rmdir()
    assert _best(tmp_path).found is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"step": "x"}'])
def test_a_torn_file_is_no_best(tmp_path, text):
    (tmp_path / "best.json").write_text(text)
    assert _best(tmp_path).found is None


def test_patience_counts_evaluations_since_the_best(tmp_path):
    best = _best(tmp_path, patience=2)
    assert best.reason_to_stop(90) is None  # nothing was measured
    best.keep(30, {"eval/task/f1": 0.5}, is_chief=True)
    assert best.reason_to_stop(49) is None
    assert best.reason_to_stop(50) == "PATIENCE: 2 evaluations were no better than eval/task/f1 0.5000 at step 30"
    assert _best(tmp_path, patience=0).reason_to_stop(90) is None


def test_a_metric_that_no_evaluation_writes_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(UnknownMetric, match="evaluations of this run write eval/task/accuracy, eval/task/f1. Did you "
                                            "mean 'eval/task/f1'"):
        _best(tmp_path, "eval/task/f2").is_improved({"eval/task/f1": 1.0, "eval/task/accuracy": 1.0})
    assert not Best(Run(**RUN), types.SimpleNamespace(checkpoints=tmp_path)).is_improved({})


def test_the_best_and_each_so_many_steps_outlive_the_newest_ones(tmp_path):
    _save(tmp_path, 10, 20, 30, 40, 50, 60)
    checkpoint_folders.set_best(tmp_path, 10, "eval/task/f1", 0.5)

    def left(**rules):
        outdated = checkpoint_folders.outdated(tmp_path, **rules)
        return [step for step in checkpoint_folders.steps(tmp_path)
                if checkpoint_folders.path_of(tmp_path, step) not in outdated]

    assert left(keep=2) == [10, 50, 60]
    assert left(keep=1, keep_every=20) == [10, 20, 40, 60]


@pytest.mark.parametrize(("changes", "message"), [
    ({"patience": 3}, r"PATIENCE \(3\) waits for a better BEST_METRIC"),
    ({"best_metric": "f1"}, "BEST_METRIC must be the name of what evaluations write"),
    ({"best_metric": "eval/task/f1", "eval_period": 0}, "EVAL_PERIOD=0 has none"),
    ({"keep_every": -1}, "KEEP_EVERY must be an integer of at least 0"),
])
def test_rules_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Run(**{**RUN, **changes})
