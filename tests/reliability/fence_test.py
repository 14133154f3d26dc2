"""A suspended process changes nothing after another has taken over its run or output and finished."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from switch_tf.statuses import OUTAGE
from switch_tf.storage import places
from tests.reliability.small_run import ON_ONE_DEVICE, Process

# A lease is taken after four seconds without a renewal.
_PROGRAM = ("-c", "import sys; from switch_tf.cli import main; from switch_tf.storage import lock, whole_file; "
            "lock.PERIOD, lock.LIFETIME, whole_file.UPLOAD_PERIOD = 0.5, 4.0, 0.3; sys.exit(main.main(sys.argv[1:]))")


def contents(folder):
    """Returns URL -> content of the files in a folder of a bucket that anybody reads."""
    return {url: places.read_object(url)[0] for url in places.urls_of(folder) if "/parts." not in url}


def wait_for(is_true, process, seconds=200):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


# Every second step is saved, and each request takes 30 ms: a process is mostly in a save, where it uploads, renames,
# publishes or removes.
@pytest.mark.slow
@pytest.mark.parametrize("moment", [0, *(pytest.param(moment, marks=pytest.mark.exhaustive)
                                         for moment in range(1, 10))])
def test_a_run_that_was_taken_meanwhile_stays_as_its_new_owner_left_it(moment, bucket, tmp_path):
    run = places.at(bucket.new_folder()) / "run"
    arguments = (*ON_ONE_DEVICE, "--gin.TRAIN_STEPS=30", "--gin.CHECKPOINT_PERIOD=2", "--gin.EVAL_PERIOD=10",
                 "--gin.LOG_PERIOD=1", "--gin.Run.keep_checkpoints=2")
    bucket.control(latency=0.03)
    first = Process(run, tmp_path, arguments, _PROGRAM)
    try:
        wait_for(lambda: "step 4/30" in first.told, first.popen)
        time.sleep(random.Random(moment).uniform(0, 3))
        first.popen.send_signal(signal.SIGSTOP)
        second = Process(run, tmp_path, arguments, _PROGRAM)
        assert second.end(600) == 0, second.told
        assert "waiting up to 4 s for a sign of life" in second.told
        left = contents(run)
        assert json.loads(left[f"{run}/end.json"])["step"] == 30
        first.popen.send_signal(signal.SIGCONT)
        assert first.end(300) == OUTAGE, first.told
    finally:
        first.popen.kill()
    assert "switch-tf train: " in first.lines[-1] and (
        "taken the run folder" in first.lines[-1] or "was removed or replaced" in first.lines[-1]), first.lines[-3:]
    assert contents(run) == left


@pytest.mark.slow
def test_an_output_that_was_taken_meanwhile_stays_as_its_new_owner_left_it(bucket, tmp_path):
    folder = places.at(bucket.new_folder())
    assert Process(tmp_path / "run", tmp_path, (*ON_ONE_DEVICE, "--gin.TRAIN_STEPS=2")).end(300) == 0
    (tmp_path / "lines.txt").write_text("".join(f"line {index} <extra_id_0>.\n" for index in range(400)))
    command = [sys.executable, *_PROGRAM, "infer", "--run=run", "--input=lines.txt", f"--output={folder / 'out.jsonl'}",
               "--batch_size=4"]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: f"{folder / 'out.jsonl'}" in places.urls_of(folder), first)
    first.send_signal(signal.SIGSTOP)
    try:
        subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
        left = contents(folder)
        assert left[f"{folder / 'out.jsonl'}"].count(b"\n") == 400
        first.send_signal(signal.SIGCONT)
        _, told = first.communicate(timeout=300)
    finally:
        first.kill()
    assert first.returncode == OUTAGE and "was removed or replaced" in told, told
    assert contents(folder) == left
