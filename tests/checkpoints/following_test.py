"""New checkpoints are followed to the end of a run, whether it ends, is killed or is started again."""

import pytest

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder, follow


@pytest.fixture
def run_folder(tmp_path):
    """A run folder that holds two empty checkpoints."""
    for step in (10, 20):
        folders.path_of(tmp_path / "run" / "checkpoints", step).mkdir(parents=True)
    return tmp_path / "run"


def test_following_waits_for_each_new_checkpoint_until_the_last_step(run_folder, monkeypatch, capsys):
    checkpoints = run_folder / "checkpoints"
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            folders.path_of(checkpoints, 30).mkdir()

    monkeypatch.setattr("time.sleep", nap)
    found = [path.name for path in follow(run_folder, 30, [10])]
    assert found == ["step_00000020", "step_00000030"]
    assert capsys.readouterr().err.count("Waiting for a checkpoint after step 20 of 30") == 1


def _follow(run_folder, last_step=30, done=()):
    return [path.name for path in follow(run_folder, last_step, done)]


def test_a_run_that_is_restarted_with_more_steps_is_followed_further(run_folder, monkeypatch, capsys):
    folder = RunFolder(run_folder)  # which trains beyond the 20 steps that were configured
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            folders.path_of(run_folder / "checkpoints", 40).mkdir()
            folder.write_end(40, "TRAIN_STEPS is 40")
            folder.close()

    monkeypatch.setattr("time.sleep", nap)
    assert _follow(run_folder, last_step=20) == ["step_00000010", "step_00000020", "step_00000040"]
    assert len(naps) == 2
    assert capsys.readouterr().err == ""


def test_following_ends_with_a_run_that_ended_before_its_last_step_and_says_why(run_folder, monkeypatch, capsys):
    folder = RunFolder(run_folder)
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:  # as `loop.Training.close` does
            folders.path_of(run_folder / "checkpoints", 25).mkdir()
            folder.write_end(25, "PATIENCE: 2 evaluations were no better")
            folder.close()

    monkeypatch.setattr("time.sleep", nap)
    assert _follow(run_folder) == ["step_00000010", "step_00000020", "step_00000025"]
    assert len(naps) == 2
    assert "The run has ended (PATIENCE: 2 evaluations were no better)" in capsys.readouterr().err


def test_following_waits_for_a_run_that_goes_on_after_its_end(run_folder, monkeypatch):
    folder = RunFolder(run_folder)
    folder.write_end(20, "stopped by SIGTERM")  # of the process before; this one has not got to removing it

    def nap(seconds):
        checkpoint = folders.path_of(run_folder / "checkpoints", 30)
        if checkpoint.is_dir():
            folder.close()
        else:
            folder.remove_end()
            checkpoint.mkdir()

    monkeypatch.setattr("time.sleep", nap)
    assert _follow(run_folder, done=[10]) == ["step_00000020", "step_00000030"]


def test_following_waits_some_minutes_for_a_run_that_was_killed(run_folder, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0] + 1)

    def nap(seconds):
        clock[0] += seconds

    monkeypatch.setattr("time.sleep", nap)
    assert _follow(run_folder) == ["step_00000010", "step_00000020"]
    assert clock[0] == pytest.approx(900, abs=10)
    error = capsys.readouterr().err
    assert "in case the run was killed and is started again, this waits 15 minutes." in error
    assert "No process has trained in" in error and "did not record why it ended" in error


def test_a_checkpoint_of_a_run_that_was_killed_begins_the_wait_anew(run_folder, monkeypatch, capsys):
    clock, naps = [1.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def nap(seconds):
        naps.append(seconds)
        clock[0] += seconds
        if len(naps) == 2:
            folders.path_of(run_folder / "checkpoints", 25).mkdir()
        elif len(naps) == 4:
            folders.path_of(run_folder / "checkpoints", 30).mkdir()

    monkeypatch.setattr("time.sleep", nap)
    found = []
    for path in follow(run_folder, 30):
        found.append(path.name)
        clock[0] += 2000  # an evaluation takes longer than a run that was killed is awaited
    assert found == ["step_00000010", "step_00000020", "step_00000025", "step_00000030"]
    assert "did not record why it ended" not in capsys.readouterr().err
