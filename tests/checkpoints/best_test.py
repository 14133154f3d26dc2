import json
import math
import shutil

import pytest

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.best import Best
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run
from switch_tf.refusals import Refusal

RUN = {"model_dir": "runs/x", "mixture_or_task_name": "task", "task_feature_lengths": {"inputs": 8, "targets": 8},
       "train_steps": 100, "batch_size": 4, "eval_period": 10}


def _best(folder, metric="eval/task/f1", patience=2):
    return Best(Run(**RUN, best_metric=metric, patience=patience), _folder(folder))


def _folder(checkpoints):
    """The run folder whose checkpoints are in that folder; not locked."""
    folder = RunFolder(checkpoints.parent, is_owner=False)
    assert folder.checkpoints == checkpoints
    return folder


@pytest.fixture
def tmp_path(tmp_path):
    """The folder of a run's checkpoints."""
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def _save(folder, *steps):
    for step in steps:
        folders.path_of(folder, step).mkdir(parents=True)
        (folders.path_of(folder, step) / "checkpoint.json").write_text(json.dumps(
            {"format_version": 3, "step": step, "variables": {}, "files": {}}))


def _evaluate(folder, values, metric="eval/task/f1", **more):
    (folder.parent / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, metric: value, **more}) + "\n" for step, value in values.items()))


@pytest.mark.parametrize(("metric", "better", "worse"), [
    ("eval/task/f1", 0.6, 0.4), ("eval/task/loss", 0.4, 0.6), ("eval/task/perplexity", 0.4, 0.6),
    ("eval/task/mean_edit", 0.4, 0.6), ("eval/task/word_error_rate", 0.4, 0.6),
    ("eval/task/pearson_corrcoef", 0.6, 0.4)])
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
    assert _best(tmp_path).current is None
    _best(tmp_path).keep(10, {"eval/task/f1": 0.5}, is_chief=True)
    assert _best(tmp_path).current == {"step": 10, "metric": "eval/task/f1", "value": 0.5}
    assert _best(tmp_path, "eval/task/em").current is None
    shutil.rmtree(folders.path_of(tmp_path, 10))
    assert _best(tmp_path).current is None


@pytest.mark.parametrize("content", [
    b"", b"{", b"[1]", b'{"step": "x"}', b"\xff", b"[" * 100_000, b'{"step": 10}', b'{"step": true}',
    *(b'{"step": %b, "metric": "eval/task/f1", "value": %b}' % pair for pair in (
        (b"10", b"NaN"), (b"10", b"null"), (b"10", b"1e999"), (b"10", b"[1]"), (b"10", b'"0.5"'), (b"10", b"true"),
        (b"-10", b"0.5"), (b"10.0", b"0.5"), (b"[10]", b"0.5"), (b"9" * 30, b"0.5"), (b"10", b"9" * 400))),
    b'{"step": 10, "metric": ["eval/task/f1"], "value": 0.5}'])
def test_a_file_that_names_no_best_is_none_and_does_not_stop_a_start(tmp_path, content):
    _save(tmp_path, 10)
    (tmp_path / "best.json").write_bytes(content)
    best = _best(tmp_path)
    best.take_up(10, is_chief=True)
    assert best.current is None
    assert folders.outdated(tmp_path, keep=1) == []


def test_what_is_not_finite_is_never_better_and_never_the_best(tmp_path):
    for metric in ("eval/task/f1", "eval/task/loss"):
        best = _best(tmp_path, metric)
        for value in (math.nan, math.inf, -math.inf):
            assert not best.is_improved({metric: value})
        assert best.reason_to_stop(90) is None  # PATIENCE waits for the first finite value
        assert best.is_improved({metric: 0.5})
        best.keep(20, {metric: 0.5}, is_chief=False)
        assert not best.is_improved({metric: math.nan})
        assert best.reason_to_stop(30) is None and best.reason_to_stop(40)


def test_a_metric_says_itself_that_a_lower_value_is_better(tmp_path):
    _save(tmp_path, 10, 20)
    best, declared = _best(tmp_path), {"eval/task/f1": True}
    best.keep(10, {"eval/task/f1": 0.5}, is_chief=True)
    assert best.is_improved({"eval/task/f1": 0.4}, declared)
    assert not best.is_improved({"eval/task/f1": 0.6}, declared)
    _evaluate(tmp_path, {10: 0.5, 20: 0.4}, lower_is_better=declared)
    again = _best(tmp_path)
    again.take_up(20, is_chief=True)
    assert again.current["step"] == 20 and not again.is_improved({"eval/task/f1": 0.45})


def test_a_direction_that_only_the_metric_declares_is_known_from_the_first_evaluation_on(tmp_path):
    best, name = _best(tmp_path, "eval/task/score"), "eval/task/score"
    best.take_up(0, is_chief=True)  # no evaluation yet
    assert best.is_improved({name: 0.5}, {name: False})
    _evaluate(tmp_path, {10: 0.5, 20: 0.6}, name, lower_is_better={name: False})
    _save(tmp_path, 10, 20)
    best = _best(tmp_path, name)
    best.take_up(20, is_chief=True)
    assert best.current["step"] == 20
    with pytest.raises(Refusal, match="it is known whether lower or higher is better, not 'eval/task/score'"):
        _best(tmp_path, name).is_improved({name: 0.5})


def test_a_kill_before_best_json_does_not_lose_the_best(tmp_path):
    _save(tmp_path, 10, 20, 30)
    folders.set_best(tmp_path, step=10, metric="eval/task/f1", value=0.5)
    _evaluate(tmp_path, {10: 0.5, 20: 0.9, 30: None, 40: 1.0})  # 40 is past what was restored
    best = _best(tmp_path)
    best.take_up(30, is_chief=False)
    assert best.current == {"step": 20, "metric": "eval/task/f1", "value": 0.9}
    assert folders.best(tmp_path)["step"] == 10
    best.take_up(30, is_chief=True)
    assert folders.best(tmp_path)["step"] == 20


@pytest.mark.parametrize("is_removed", [True, False])
def test_where_the_best_is_damaged_or_gone_the_best_of_the_others_is_it(tmp_path, is_removed):
    _save(tmp_path, 10, 20, 30)
    _evaluate(tmp_path, {10: 0.5, 20: 0.9, 30: 0.4})
    folders.set_best(tmp_path, step=20, metric="eval/task/f1", value=0.9)
    path = folders.path_of(tmp_path, 20)
    shutil.rmtree(path) if is_removed else (path / "checkpoint.json").write_text("{")
    best = _best(tmp_path)
    best.take_up(30, is_chief=True)
    assert best.current == {"step": 10, "metric": "eval/task/f1", "value": 0.5}
    assert best.is_improved({"eval/task/f1": 0.6})


def test_best_json_is_believed_where_its_line_is_lost(tmp_path):
    _save(tmp_path, 10, 20)
    _evaluate(tmp_path, {20: 0.4})
    folders.set_best(tmp_path, step=10, metric="eval/task/f1", value=0.5)
    best = _best(tmp_path)
    best.take_up(20, is_chief=True)
    assert best.current["step"] == 10


def test_of_equal_values_the_first_is_the_best_as_in_a_run_without_a_stop(tmp_path):
    _save(tmp_path, 10, 20)
    _evaluate(tmp_path, {10: 0.5, 20: 0.5})
    best = _best(tmp_path)
    best.take_up(20, is_chief=True)
    assert best.current["step"] == 10


def test_a_value_goes_into_best_json_as_it_is(tmp_path):
    _save(tmp_path, 10)
    _best(tmp_path).keep(10, {"eval/task/f1": 0.1 + 0.2}, is_chief=True)
    assert json.loads((tmp_path / "best.json").read_text())["value"] == 0.1 + 0.2


def test_patience_counts_evaluations_since_the_best(tmp_path):
    best = _best(tmp_path, patience=2)
    assert best.reason_to_stop(90) is None  # nothing was measured
    best.keep(30, {"eval/task/f1": 0.5}, is_chief=True)
    assert best.reason_to_stop(49) is None
    assert best.reason_to_stop(50) == "PATIENCE: 2 evaluations were no better than eval/task/f1 0.5000 at step 30"
    assert _best(tmp_path, patience=0).reason_to_stop(90) is None


def test_a_metric_that_no_evaluation_writes_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(Refusal, match="evaluations of this run write eval/task/accuracy, eval/task/f1. Did you "
                                            "mean 'eval/task/f1'"):
        _best(tmp_path, "eval/task/f2").is_improved({"eval/task/f1": 1.0, "eval/task/accuracy": 1.0})
    assert not Best(Run(**RUN), _folder(tmp_path)).is_improved({})


def test_the_best_and_each_so_many_steps_outlive_the_newest_ones(tmp_path):
    _save(tmp_path, 10, 20, 30, 40, 50, 60)
    folders.set_best(tmp_path, step=10, metric="eval/task/f1", value=0.5)

    def left(**rules):
        outdated = folders.outdated(tmp_path, **rules)
        return [step for step in folders.steps(tmp_path)
                if folders.path_of(tmp_path, step) not in outdated]

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
