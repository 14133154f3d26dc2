"""A run whose terminal is closed saves before it ends, or goes on if no signal asks it to stop."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios

import pytest

ARGUMENTS = [
    "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus_bytes.gin",
    "--gin_file=gin/runs/pretrain.gin", "--gin.SwitchConfig.num_encoder_layers=1",
    "--gin.SwitchConfig.num_decoder_layers=1", "--gin.BATCH_SIZE=8", "--gin.LOG_PERIOD=1", "--gin.EVAL_PERIOD=0",
    "--gin.CHECKPOINT_PERIOD=100000", "--gin.MODEL_DIR='run'"]


@pytest.fixture
def start(tmp_path):
    """A function that trains on a terminal of its own for a few steps, closes it, and returns the process."""
    started: list[subprocess.Popen] = []

    def run(has_signal, steps):
        read_end, write_end = os.openpty()

        def own_session():
            os.setsid()
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make slow` would hand on as ignored
            if has_signal:  # the kernel sends SIGHUP to the leader of the session that the terminal controls
                fcntl.ioctl(write_end, termios.TIOCSCTTY, 0)

        process = subprocess.Popen([sys.executable, "-m", "switch_tf.cli", "train", *ARGUMENTS,
                                    f"--gin.TRAIN_STEPS={steps}"], cwd=tmp_path, stdin=write_end, stdout=write_end,
                                   stderr=write_end, preexec_fn=own_session)
        started.append(process)
        os.close(write_end)
        seen = b""
        while b"step 3/" not in seen:
            seen += os.read(read_end, 4096)
        os.close(read_end)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def _end(folder):
    return json.loads((folder / "run" / "end.json").read_text())


@pytest.mark.slow
def test_a_run_saves_when_its_terminal_is_closed(start, tmp_path):
    assert start(True, 100_000).wait(120) == 130
    end = _end(tmp_path)
    assert end["reason"] == f"stopped by {signal.SIGHUP.name}"
    assert (tmp_path / "run" / "checkpoints" / f"step_{end['step']:08d}" / "checkpoint.json").exists()


@pytest.mark.slow
def test_a_run_that_gets_no_signal_outlives_its_terminal(start, tmp_path):
    assert start(False, 30).wait(120) == 0
    assert _end(tmp_path) == {"step": 30, "reason": "TRAIN_STEPS is 30"}
