"""Kills at each file operation of a run between an evaluation, its checkpoint and best.json.

A stand-in for training drives the run folder, the checkpoints and the best as `loop.Training` does, without a model:
it goes on while a thread writes a periodic checkpoint, and waits for the best and the last one.
"""

import os
import signal
import sys
import time
import types

import pytest

from switch_tf.checkpoints import bundles, folders
from switch_tf.checkpoints.best import Best
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs.run import Run
from switch_tf.partitioning.layout import Layout
from switch_tf.storage import json_lines

METRIC = "eval/task/loss"
LOSSES = [9.0, 7.0, 8.0, 5.0, 5.0, 6.0]  # of each step; the best is step 3
PERIOD = 2  # of checkpoints
_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
PARTITIONER = types.SimpleNamespace(is_chief=True, process_index=0, num_processes=1, any_process=lambda flag: flag,
                                    are_finite=lambda variables: [], pieces=lambda state: [], layout=Layout(),
                                    is_lost_process=lambda error: False, gather_texts=lambda text: [text])


def _write(prefix, pieces, graph):
    """Writes what TensorFlow does, a file under a temporary name and the index, while the main thread goes on."""
    with open(f"{prefix}.tempstate", "w") as file:
        file.write("half")
    time.sleep(0.01)
    os.rename(f"{prefix}.tempstate", f"{prefix}.data-00000-of-00001")
    with open(f"{prefix}.index", "w") as file:
        file.write("index")
    return True


def _newest(folder):
    return next((path for path in folders.newest_first(folder) if folders.is_whole(path)), None)


def _train(path):
    """Goes on from where the folder stands, to the last step; returns the step at which it began."""
    run = Run(str(path), "task", {"inputs": 8, "targets": 8}, len(LOSSES) - 1, 4, eval_period=1, best_metric=METRIC)
    folder = RunFolder(path)
    newest = _newest(folder.checkpoints)
    begun = -1 if newest is None else folders.describe(newest)["step"]
    folder.remove_end()
    folder.cut_metrics(begun)
    best = Best(run, folder)
    best.take_up(max(begun, 0), is_chief=True)

    checkpointer = Checkpointer(folder.checkpoints, {}, types.SimpleNamespace(save=lambda *_: None), PARTITIONER)
    for step in range(begun + 1, len(LOSSES)):
        values = {METRIC: LOSSES[step]}
        json_lines.append(folder.metrics, [{"step": step, **values}])
        if best.is_improved(values):
            checkpointer.save(step)
            checkpointer.keep_best(best, step, values)
        if step % PERIOD == 0:
            checkpointer.save(step)
    checkpointer.save(len(LOSSES) - 1)
    checkpointer.wait()
    folder.write_end(len(LOSSES) - 1, "TRAIN_STEPS")
    folder.close()
    return begun


def _train_and_be_killed(path, number):
    """Trains in a child that is killed before its file operation of that number; returns whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event, arguments):
            nonlocal count
            if event in _OPERATIONS and str(path) in str(arguments[:2]):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            _train(path)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.fixture(autouse=True)
def _without_tensorflow(monkeypatch):
    monkeypatch.setattr(bundles, "write", _write)
    monkeypatch.setattr(bundles, "object_graph", lambda paths: b"")


def _check(path):
    assert folders.best(path / "checkpoints") == {"step": 3, "metric": METRIC, "value": 5.0}
    assert folders.steps(path / "checkpoints") == [3, 5]
    steps = [record["step"] for _, record in json_lines.read(path / "metrics.jsonl")]
    assert steps == list(range(len(LOSSES)))
    assert not [*path.rglob("*.unfinished"), *path.rglob("tmp.*")]


def test_a_run_that_is_never_killed(tmp_path):
    assert not _train_and_be_killed(tmp_path, 10**9)
    _check(tmp_path)


@pytest.mark.slow
def test_wherever_a_kill_falls_the_run_goes_on_and_its_best_is_right(tmp_path):
    number, begun = 0, set()
    while _train_and_be_killed(tmp_path / str(number), number + 1):
        begun.add(_train(tmp_path / str(number)))
        _check(tmp_path / str(number))
        number += 1
    assert number > 60 and begun >= {-1, 0, 1, 3, 4}


def test_a_run_that_is_killed_again_and_again_ends_with_its_best(tmp_path):
    kills = sum(_train_and_be_killed(tmp_path, number) for number in range(3, 53))
    assert kills >= 20
    _train(tmp_path)
    _check(tmp_path)


def test_a_best_that_cannot_be_written_is_found_by_the_next_start(tmp_path, monkeypatch):
    set_best = folders.set_best

    def full(folder, step, metric, value):
        if step == 3:
            raise OSError(28, "No space left on device")
        set_best(folder, step=step, metric=metric, value=value)

    monkeypatch.setattr(folders, "set_best", full)
    with pytest.raises(OSError, match="No space left"):
        _train(tmp_path)
    assert folders.best(tmp_path / "checkpoints")["step"] == 1
    monkeypatch.setattr(folders, "set_best", set_best)
    assert _train(tmp_path) == 3
    _check(tmp_path)


@pytest.mark.parametrize("kind", ["removed", "damaged"])
def test_a_best_checkpoint_that_is_lost_leaves_the_place_to_the_best_of_the_others(tmp_path, kind):
    _train(tmp_path)
    path = folders.path_of(tmp_path / "checkpoints", 3)
    for file in path.iterdir():
        if kind == "removed" or file.name == "checkpoint.json":
            file.unlink()
    if kind == "removed":
        path.rmdir()
    _train(tmp_path)
    assert folders.best(tmp_path / "checkpoints") == {"step": 5, "metric": METRIC, "value": 6.0}
