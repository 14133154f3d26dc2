import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from switch_tf.checkpoints import folders, run_folder
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, lock, places


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path):
    folder = RunFolder(tmp_path / "run")
    script = f"from switch_tf.checkpoints.run_folder import RunFolder; RunFolder({str(folder.path)!r})"
    second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert second.returncode != 0
    assert f"Another process (pid {os.getpid()}) is training in" in second.stderr


def test_the_lock_dies_with_its_process(tmp_path):
    script = ("import os, signal; from switch_tf.checkpoints.run_folder import RunFolder; "
              f"folder = RunFolder({str(tmp_path)!r}); os.kill(os.getpid(), signal.SIGKILL)")
    killed = subprocess.run([sys.executable, "-c", script])
    assert killed.returncode == -signal.SIGKILL
    RunFolder(tmp_path)
    assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_lines_past_the_restored_step_and_a_torn_last_line_are_cut(tmp_path):
    folder = RunFolder(tmp_path)
    lines = [json.dumps({"step": step}) for step in (0, 10, 20, 30)]
    folder.metrics.write_text("\n".join(lines) + '\n{"step": 4')
    folder.cut_metrics(20)
    assert folder.metrics.read_text().splitlines() == lines[:3]


def test_the_last_training_line_of_a_run_that_ended_between_two_logged_steps_is_cut_with_them(tmp_path):
    folder = RunFolder(tmp_path)
    lines = [json.dumps({"step": step, name: 1.0}) for step, name in (
        (10, "train/loss"), (15, "eval/task/loss"), (15, "train/loss"), (20, "train/loss"))]
    folder.metrics.write_text("".join(line + "\n" for line in lines))
    folder.cut_metrics(15, ends_between=True)
    assert folder.metrics.read_text().splitlines() == lines[:2]


def test_the_seconds_of_cut_lines_stay_and_those_of_later_steps_are_redone(tmp_path):
    folder = RunFolder(tmp_path)
    lines = [{"step": 0, "seconds/start/import": 2.0}, {"step": 10, "train/loss": 1.0, "seconds/steps": 8.0},
             {"step": 15, "train/loss": 1.0, "seconds/steps": 4.0, "seconds/input": None},  # between two logged ones
             {"step": 15, "seconds/save": 0.5}, {"step": 20, "train/loss": 1.0, "seconds/steps": 5.0},
             {"step": 20, "eval/task/loss": 1.0, "seconds/evaluate": 3.0}]
    json_lines.append(folder.metrics, lines)
    folder.cut_metrics(15, ends_between=True)
    cut = [record for _, record in run_folder.records_of(folder.metrics)]
    assert cut == [lines[0], lines[1], lines[3],
                   {"step": 15, "seconds/steps": 4.0, "seconds/input": 0, "seconds/redone": 8.0}]
    folder.cut_metrics(15, ends_between=True)
    assert [record for _, record in run_folder.records_of(folder.metrics)] == cut  # a kill at once loses nothing
    folder.cut_metrics(-1)  # no checkpoint is left
    assert [record for _, record in run_folder.records_of(folder.metrics)] == [
        {"step": 0, "seconds/start/import": 2.0, "seconds/redone": 20.5}]


def test_unfinished_checkpoints_are_removed(tmp_path):
    unfinished = tmp_path / "checkpoints" / "tmp.step_00000005"
    unfinished.mkdir(parents=True)
    (unfinished / "state.index").write_text("half")
    RunFolder(tmp_path)
    assert not unfinished.exists()


@pytest.mark.parametrize("bad", [b"\xff\xfe\x00", b"[]", b'{"step": -5}', b'{"step": 1', b"[" * 100_000,
                                 b'{"step": 1%s}' % (b"0" * 400), b'{"step": 5, "train/loss": 1%s}' % (b"0" * 400),
                                 b'{"step": 5, "train/loss": [2.0]}', b'{"step": 5, "eval/t/loss": "2.0"}',
                                 b'{"step": 5, "seconds/steps": "2"}',
                                 b'{"step": 5, "router/encoder/layers_1/expert_load": 0.5}',
                                 b'{"step": 5, "router/encoder/layers_1/expert_load": ["a"]}',
                                 b'{"step": 5, "router/encoder/layers_1/router_entropy": [0.5, 0.5]}'])
def test_a_line_that_cannot_be_read_is_cut_with_a_word(tmp_path, capsys, bad):
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 10}\n')
    folder.cut_metrics(20)
    assert folder.metrics.read_bytes() == b'{"step": 0}\n{"step": 10}\n'
    assert "metrics.jsonl: skipped 1 unreadable line (line 2)" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["removed", "replaced", "without checkpoints"])
def test_a_folder_that_is_gone_or_another_one_is_an_error(tmp_path, change):
    folder = RunFolder(tmp_path / "run")
    folder.check_is_there()
    shutil.rmtree(folder.path if change != "without checkpoints" else folder.checkpoints)
    if change == "replaced":
        other = RunFolder(tmp_path / "run")
    with pytest.raises(Refusal, match="was removed or replaced while this process was training in it"):
        folder.check_is_there()
    folder.close()
    if change == "replaced":
        other.check_is_there()


def test_a_file_system_without_locks_is_refused_in_one_sentence(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ValueError, match=r"has no locks \(No locks available\).*on a local disk"):
        RunFolder(tmp_path / "run")


def test_how_a_run_ended_is_recorded_until_it_is_under_way_again(tmp_path):
    folder = RunFolder(tmp_path)
    assert run_folder.end_of(tmp_path) is None and run_folder.is_running(tmp_path)
    folder.write_end(30, "PATIENCE: 2 evaluations")
    assert run_folder.end_of(tmp_path) == "PATIENCE: 2 evaluations"
    folder.close()
    assert not run_folder.is_running(tmp_path)
    folder = RunFolder(tmp_path)  # who looked holds no lock
    folder.remove_end()
    assert run_folder.end_of(tmp_path) is None
    assert not run_folder.is_running(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"reason": 5}', b"[" * 100_000])
def test_a_damaged_record_of_the_end_is_none(tmp_path, content):
    (tmp_path / "end.json").write_bytes(content)
    assert run_folder.end_of(tmp_path) is None


def test_the_record_of_the_end_of_a_strangers_run_is_read_only_if_it_is_a_small_file(tmp_path):
    os.mkfifo(tmp_path / "end.json")  # reading it would wait for good
    assert run_folder.end_of(tmp_path) is None
    (tmp_path / "end.json").unlink()
    with open(tmp_path / "end.json", "wb") as file:
        file.truncate(2**40)
    assert run_folder.end_of(tmp_path) is None


@pytest.mark.parametrize("url", ["s3://b/run", "gs:/b/run", "gs://"])
def test_an_unknown_url_is_refused_before_a_folder_of_that_name_is_made(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"MODEL_DIR must be a path of this machine or of a bucket, .* not '{url}'"):
        RunFolder(url)
    assert not list(tmp_path.iterdir())


def test_one_process_at_a_time_trains_in_a_folder_of_a_bucket(bucket, monkeypatch, capfd):
    monkeypatch.setattr(lock, "PERIOD", 0.3)
    path = places.at(bucket.new_folder())
    (places.at(path) / "lock").write_text("123")  # of a run that was copied from a disk
    assert not run_folder.is_running(path)
    folder = RunFolder(path)
    assert run_folder.is_running(path) and folder.checkpoints.is_dir() and (folder.path / "lock").read_bytes() != b"123"
    with pytest.raises(ValueError, match=rf"Another process \(pid {os.getpid()} on .*\) is training in '{path}'"):
        RunFolder(path)
    assert "waiting up to 60 s for a sign of life" in capfd.readouterr().err
    folder.check_is_there()
    folder.close()
    assert not run_folder.is_running(path)
    RunFolder(path).close()


def test_a_run_whose_lease_was_taken_saves_nothing_more(bucket, monkeypatch):
    monkeypatch.setattr(lock, "PERIOD", 0.1)
    folder = RunFolder(bucket.new_folder())
    (folder.path / "lock").write_text("{}")  # as a process does that takes this one for dead
    with pytest.raises(ValueError, match="Another process has taken the run folder"):
        for _ in range(50):
            time.sleep(0.1)
            folder.check_is_there()


def test_an_unfinished_checkpoint_in_a_bucket_is_none_and_is_removed(bucket):
    path = places.at(bucket.new_folder())
    RunFolder(path).close()
    for step, name in ((3, folders.DESCRIPTION), (6, "state.index")):
        folders.path_of(path / "checkpoints", step).mkdir()
        (folders.path_of(path / "checkpoints", step) / name).write_text("{}")
    assert folders.steps(path / "checkpoints") == [3]
    RunFolder(path).close()
    assert [entry.name for entry in (path / "checkpoints").iterdir()] == ["step_00000003"]
    folders.remove(folders.path_of(path / "checkpoints", 3))
    assert folders.steps(path / "checkpoints") == []


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="MODEL_DIR .* cannot be written .*; choose a folder that can"):
        RunFolder(tmp_path / "file" / "run")


def test_one_request_lists_all_checkpoints_of_a_bucket(bucket):
    path = places.at(bucket.new_folder()) / "checkpoints"
    for step in range(30):
        (folders.path_of(path, step) / folders.DESCRIPTION).write_text("{}")
    folders.steps(path)  # which connects
    before = bucket.control()["requests"]
    assert folders.steps(path) == list(range(30))
    assert bucket.control()["requests"] == before + 1


def test_a_folder_that_a_failed_start_has_made_is_gone_and_one_that_holds_anything_stays(tmp_path):
    for content in (None, "checkpoints/step_00000001", "notes"):
        folder = RunFolder(tmp_path / "run")
        if content:
            (tmp_path / "run" / content).mkdir()
        folder.discard()
        assert (tmp_path / "run").exists() == bool(content)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").discard()
    assert (tmp_path / "run").exists()
