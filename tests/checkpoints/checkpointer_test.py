"""Saves that a thread writes: their snapshot, their failures, and processes that meet through files."""

import hashlib
import os
import pathlib
import subprocess
import tempfile
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import switch_tf
from switch_tf.checkpoints import bundles, folders, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer, staging_of
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import Piece, host_tensor
from switch_tf.refusals import Refusal
from switch_tf.storage import places

PATH = "model/kernel"
KEY = bundles.key_of(PATH)
BATCHES = types.SimpleNamespace(save=lambda folder, index: (folder / f"data_position_{index}").write_text(f"{index}"))


@pytest.fixture
def variable():
    return keras.Variable(np.arange(8.0, dtype="float32").reshape(4, 2))


@pytest.fixture
def checkpointer(variable, tmp_path):
    return Checkpointer(tmp_path, {PATH: variable}, BATCHES, keep=2, configuration={"vocabulary": ["12 bytes, ff"]})


@pytest.fixture
def writer(monkeypatch):
    """Holds every writing thread until `go` is set, and has it fail with `error`."""
    held = types.SimpleNamespace(go=threading.Event(), started=threading.Event(), error=None)
    write = bundles.write

    def slow(*args):
        held.started.set()
        assert held.go.wait(60)
        if held.error:
            raise held.error
        return write(*args)

    monkeypatch.setattr(bundles, "write", slow)
    yield held
    held.go.set()


def _value(folder, step):
    return tf.train.load_checkpoint(str(folders.path_of(folder, step) / "state")).get_tensor(KEY)


def test_training_goes_on_while_a_snapshot_is_written(checkpointer, variable, writer, tmp_path):
    before = variable.numpy()
    checkpointer.save(1, {"loss": [2.0]})
    assert writer.started.wait(60) and folders.steps(tmp_path) == []
    variable.assign_add(np.ones((4, 2)))
    tf.raw_ops.ResourceScatterUpdate(resource=variable.value.handle, indices=[0], updates=[[7.0, 7.0]])
    writer.go.set()
    checkpointer.wait()
    np.testing.assert_array_equal(_value(tmp_path, 1), before)
    description = folders.describe(folders.path_of(tmp_path, 1))
    assert description["pending_metrics"] == {"loss": [2.0]}
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(variable.numpy(), before)


def test_a_save_waits_for_the_one_before_it_but_not_for_its_own_step(checkpointer, writer, tmp_path):
    checkpointer.save(1)
    checkpointer.save(1)  # under way
    done = threading.Event()
    saving = threading.Thread(target=lambda: (checkpointer.save(2), done.set()))
    saving.start()
    assert not done.wait(0.2) and folders.steps(tmp_path) == []
    writer.go.set()
    saving.join()
    assert folders.steps(tmp_path)[0] == 1
    checkpointer.wait()
    assert folders.steps(tmp_path) == [1, 2]
    checkpointer.save(3)
    checkpointer.close()
    assert folders.steps(tmp_path) == [2, 3]


def _save_again(checkpointer):
    checkpointer.save(3)


@pytest.mark.parametrize("next_call", [_save_again, Checkpointer.wait, Checkpointer.close])
def test_a_thread_that_fails_is_reported_by_the_next_call_and_leaves_the_last_good_one(
        checkpointer, writer, tmp_path, next_call):
    writer.go.set()
    checkpointer.save(1)
    checkpointer.wait()
    writer.error = OSError(28, "No space left on device")
    checkpointer.save(2)
    message = r"The checkpoint of step 2 could not be written to .*No space left on device\); the older ones are as"
    with pytest.raises(Refusal, match=message):
        next_call(checkpointer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]
    assert folders.is_whole(folders.path_of(tmp_path, 1))
    writer.error = None  # somebody made room
    checkpointer.save(4)
    checkpointer.wait()
    assert folders.steps(tmp_path) == [1, 4]


def test_a_position_that_cannot_be_written_is_a_checkpoint_that_cannot(variable, tmp_path):
    def full(folder, index):
        raise OSError(28, "No space left on device")

    checkpointer = Checkpointer(tmp_path, {PATH: variable}, types.SimpleNamespace(save=full))
    checkpointer.save(1)
    with pytest.raises(Refusal, match="step 1 could not be written .*No space left"):
        checkpointer.wait()
    assert not list(tmp_path.iterdir())


def test_a_bug_in_the_thread_is_no_refusal(checkpointer, writer):
    writer.error = ZeroDivisionError("a bug")
    writer.go.set()
    checkpointer.save(1)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        checkpointer.wait()


def test_best_json_names_a_step_only_when_its_checkpoint_is_there(checkpointer, writer, tmp_path):
    named = []
    best = types.SimpleNamespace(keep=lambda step, values, is_chief: named.append((step, folders.steps(tmp_path))))
    checkpointer.save(1)
    threading.Timer(0.2, writer.go.set).start()
    checkpointer.keep_best(best, 1, {})
    assert named == [(1, [1])]
    writer.error = OSError("The disk is full.")
    checkpointer.save(2)
    with pytest.raises(Refusal, match="step 2 could not be written"):
        checkpointer.keep_best(best, 2, {})
    assert len(named) == 1


def test_the_description_has_sums_versions_layout_and_vocabulary(variable, tmp_path):
    layout = Layout("data=1,model=1", (("batch", "data"), ("mlp", ("data", "model"))))
    checkpointer = Checkpointer(tmp_path, {PATH: variable}, BATCHES, Partitioner(layout),
                                configuration={"vocabulary": ["12 bytes, ff"]})
    checkpointer.save(1)
    checkpointer.wait()
    path = folders.path_of(tmp_path, 1)
    description = folders.describe(path)
    assert set(description["files"]) == {"state.index", "state.data-00000-of-00001", "data_position_0"}
    for name, entry in description["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert description["versions"] == {
        "switch_tf": switch_tf.__version__, "tensorflow": tf.__version__, "keras": keras.__version__}
    assert description["layout"] == {"mesh": "data=1, model=1", "rules": "batch over data, mlp over data and model",
                                     "at_rest_rules": "", "backend": "auto", "processes": 1}
    assert description["vocabulary"] == ["12 bytes, ff"] and description["format_version"] == 4


def test_tensorflow_finds_the_variables_by_their_names(checkpointer, variable, tmp_path):
    checkpointer.save(1)
    checkpointer.wait()
    other = tf.Variable(tf.zeros((4, 2)))
    status = tf.train.Checkpoint(state={PATH: other}).read(str(folders.path_of(tmp_path, 1) / "state"))
    status.assert_consumed()
    np.testing.assert_array_equal(other, variable)


class _Process(Partitioner):
    """One of two processes that are threads here, each with half of the rows; `lost` is raised by collectives."""

    num_processes = 2
    lost = None

    def __init__(self, index, meeting, flags):
        super().__init__()
        self.process_index, self._meeting, self._flags = index, meeting, flags

    def pieces(self, state):
        first = 2 * self.process_index
        return [Piece(path, f"4 2 {first},2:-", host_tensor(variable.numpy()[first:first + 2]))
                for path, variable in state.items()]

    def gather_texts(self, text):
        return ["token"] * 2

    def any_process(self, flag):
        if self.lost is not None:
            raise self.lost
        self._flags[self.process_index] = flag
        self._meeting.wait(60)
        answer = any(self._flags)
        self._meeting.wait(60)
        return answer


def _together(*functions):
    """Calls functions in threads; returns what each returned or raised."""
    results = [None] * len(functions)

    def call(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.fixture
def two(variable, tmp_path):
    """The partitioners of two processes, and their checkpointers."""
    meeting, flags = threading.Barrier(2), [False, False]
    processes = [_Process(index, meeting, flags) for index in range(2)]
    return processes, [Checkpointer(tmp_path, {PATH: variable}, BATCHES, process, keep=3) for process in processes]


def _saved(checkpointers, step):
    assert _together(*(lambda one=one: one.save(step) for one in checkpointers)) == [None, None]


def test_two_processes_join_their_parts(two, variable, tmp_path):
    _, checkpointers = two
    for step in (1, 2):
        _saved(checkpointers, step)
    assert _together(*(one.wait for one in checkpointers)) == [None, None]
    path = folders.path_of(tmp_path, 2)
    assert sorted(entry.name for entry in path.iterdir()) == [
        "checkpoint.json", "data_position_0", "data_position_1", "state.data-00000-of-00002",
        "state.data-00001-of-00002", "state.index"]
    np.testing.assert_array_equal(_value(tmp_path, 2), variable)
    for name, entry in folders.describe(path)["files"].items():
        assert entry == bundles.sum_of(path / name)
    other = keras.Variable(np.zeros((4, 2), "float32"))
    tensors.restore(path, {PATH: other})
    np.testing.assert_array_equal(other, variable)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_cannot_write_its_part_makes_both_refuse(two, tmp_path, monkeypatch, failing):
    _, checkpointers = two
    _saved(checkpointers, 1)
    assert _together(*(one.wait for one in checkpointers)) == [None, None]
    write = bundles.write

    def full(prefix, *args):
        if prefix.name == f"part_{failing:05d}":
            raise OSError(28, "No space left on device")
        return write(prefix, *args)

    monkeypatch.setattr(bundles, "write", full)
    _saved(checkpointers, 2)
    errors = _together(*(one.wait for one in checkpointers))
    assert all(isinstance(error, Refusal) for error in errors), errors
    assert "No space left" in str(errors[failing])
    assert "another process could not write its part and names the cause" in str(errors[1 - failing])
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]


def test_a_process_that_can_write_nothing_at_all_ends_the_wait_of_the_first_one(two, tmp_path, monkeypatch):
    _, checkpointers = two

    def full(path, *args, **options):
        if "part_00001" in str(path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundles, "write", full)
    monkeypatch.setattr(pathlib.Path, "touch", full)
    _saved(checkpointers, 1)
    errors = _together(*(one.wait for one in checkpointers))
    assert all(isinstance(error, Refusal) for error in errors), errors
    assert not list(tmp_path.iterdir())


def test_a_lost_process_ends_the_other_one_without_waiting_for_its_part(two, tmp_path, monkeypatch):
    processes, checkpointers = two
    threads = []
    write = bundles.write

    def dies(prefix, *args):
        threads.append(threading.current_thread())
        if prefix.name == "part_00001":
            raise SystemExit  # without a trace
        return write(prefix, *args)

    monkeypatch.setattr(bundles, "write", dies)
    monkeypatch.setattr("switch_tf.checkpoints.checkpointer.Writing._report_failure", lambda *args: None)
    _saved(checkpointers, 1)
    lost = tf.errors.UnavailableError(None, None, "Collective ops is aborted by: the other one is gone")
    processes[0].lost = lost
    with pytest.raises(tf.errors.UnavailableError):
        checkpointers[0].wait()
    checkpointers[0].close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert folders.steps(tmp_path) == []


def test_what_a_killed_process_left_of_a_checkpoint_in_a_bucket_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    final = places.at("gs://bucket/run/checkpoints/step_00000001")
    own = staging_of(final)
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = own.rename(own.with_name(own.name.replace(f".{os.getpid()}.", f".{ended.pid}.")))
    (left / "state.index").write_text("half")
    kept = [staging_of(final), staging_of(final)]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
