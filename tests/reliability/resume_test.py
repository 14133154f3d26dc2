"""The shortest real run, straight and killed: `switch-tf train` from an empty folder, on the docs corpus."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from switch_tf.checkpoints import folders
from switch_tf.storage import places
from tests.reliability.small_run import ARGUMENTS, ON_ONE_DEVICE, STEPS, lines_of

PERIODS = ("--gin.LOG_PERIOD=4", "--gin.EVAL_PERIOD=30", "--gin.CHECKPOINT_PERIOD=7", "--gin.Run.shown_examples=2")

# A thread that takes seconds for a checkpoint, while the run takes many steps.
SLOW_WRITER = """
import sys, time
from switch_tf.checkpoints import bundles
from switch_tf.cli import main

write = bundles.write

def slow(*args):
    time.sleep(2)
    written = write(*args)
    time.sleep(2)
    return written

bundles.write = slow
sys.exit(main.main(sys.argv[1:]))
"""


def _start(folder, run, steps=STEPS, program=("-m", "switch_tf.cli")):
    command = [sys.executable, *program, "train", *ARGUMENTS, *ON_ONE_DEVICE, *PERIODS, f"--gin.MODEL_DIR='{run}'",
               f"--gin.TRAIN_STEPS={steps}", "--json"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run: its folder, summary, messages and seconds."""
    folder = tmp_path_factory.mktemp("straight")
    started = time.monotonic()
    process = _start(folder, "run")
    out, err = process.communicate()
    assert process.returncode == 0, err
    return folder / "run", json.loads(out.splitlines()[-1]), err, time.monotonic() - started


@pytest.mark.slow
def test_the_shortest_real_run_learns_and_reports(straight):
    run, summary, told, elapsed = straight
    assert "what the model fills in: [model | truth]" in told and re.search(r"^2\. .*\S", told, re.MULTILINE)
    loss = summary["eval/docs_corpus_span_corruption/loss"]
    assert summary["step"] == STEPS
    assert loss["last"] < 0.8 * loss["first"]
    assert {"operative_config.gin", "checkpoints", "events", "metrics.jsonl", "report.html", "loss.png"} <= set(
        os.listdir(run))
    (start,) = [line for line in _lines_so_far(run) if "seconds/start/first_step" in line]
    assert {f"seconds/{cause}" for cause in ("start/import", "start/devices", "start/data", "start/build", "evaluate",
                                             "compile")} < start.keys()
    assert start["step"] == 0 and "First step after " in told
    # The report is written, and examples are shown, after the last line.
    assert 0.5 * elapsed < sum(summary["time"].values()) < elapsed
    assert summary["time"].keys() == {"start", "compile", "input", "evaluate", "save", "steps", "log"}


@pytest.mark.exhaustive  # `make faults` kills more often
@pytest.mark.parametrize("num_kills", [1, 3])
def test_kills_at_random_steps_leave_every_logged_number_as_in_the_straight_run(num_kills, straight, tmp_path):
    expected = lines_of(straight[0])
    run = tmp_path / "run"
    seed = time.time_ns()
    kills = sorted(random.Random(seed).sample(range(8, STEPS - 4), num_kills))
    for kill_after in kills:
        process = _start(tmp_path, "run")
        while process.poll() is None and max([line["step"] for line in _lines_so_far(run)], default=0) < kill_after:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = _start(tmp_path, "run")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "Going on from step" in err
    assert lines_of(run) == expected, f"killed after {kills} (seed {seed})"


@pytest.mark.slow
def test_a_kill_while_a_thread_saves_leaves_whole_checkpoints_and_the_numbers_of_the_straight_run(straight, tmp_path):
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    process = _start(tmp_path, "run", program=("-c", SLOW_WRITER))
    while process.poll() is None and not (folders.steps(checkpoints) and [*checkpoints.glob("tmp.step_*/state.index")]):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    (unfinished,) = checkpoints.glob("tmp.step_*")
    saved = folders.steps(checkpoints)
    assert saved and all(folders.is_whole(folders.path_of(checkpoints, step)) for step in saved)
    assert max(saved) < int(unfinished.name.removeprefix("tmp.step_"))
    logged = max(line["step"] for line in _lines_so_far(run))
    process = _start(tmp_path, "run")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert f"Going on from step {max(saved)}" in err and not unfinished.exists()
    assert lines_of(run) == lines_of(straight[0]), logged


@pytest.mark.slow
def test_a_run_on_a_bucket_killed_while_it_saves_ends_as_the_straight_run_and_all_commands_read_it(straight, bucket,
                                                                                                   tmp_path):
    run = places.at(bucket.new_folder()) / "run"
    process = _start(tmp_path, run, program=("-c", SLOW_WRITER))
    while process.poll() is None and not folders.steps(run / "checkpoints"):
        time.sleep(0.05)
    time.sleep(1)  # into the next checkpoint
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    (saved,) = folders.steps(run / "checkpoints")
    process = _start(tmp_path, run)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert f"Going on from step {saved} ({run}/checkpoints/" in err
    assert lines_of(run) == lines_of(straight[0])
    last = [folders.path_of(folder / "checkpoints", STEPS) for folder in (run, straight[0])]
    assert folders.hash_of_weights(last[0]) == folders.hash_of_weights(last[1])

    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    out = run.parent
    for words in (["inspect", run, "--verify"], ["eval", "--run", run, "--examples", "4"],
                  ["infer", "--run", run, "--input", "texts.txt", "--output", out / "answers.jsonl"],
                  ["export", "--run", run, "--output", out / "exported"],
                  ["compare", "--runs", run, straight[0], "--output", out / "comparison"],
                  ["convert", "--input", run, "--output", out / "weights", "--to", "switch_tf"]):
        done = subprocess.run([sys.executable, "-m", "switch_tf.cli", *map(str, words)], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
    assert len((out / "answers.jsonl").read_text().splitlines()) == 2
    for file in ("run/eval/scores.jsonl", "exported/saved_model.pb", "comparison/comparison.html",
                 "weights/checkpoint.json", "run/report.html"):
        assert (out / file).is_file(), file
    assert [entry.name for entry in tmp_path.iterdir()] == ["texts.txt"]


def _lines_so_far(run):
    """Complete lines of a file that another process is writing."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@pytest.mark.slow  # processes_test.py stops a run by SIGTERM, to which the same is done
def test_ctrl_c_saves_reports_and_says_how_to_go_on(tmp_path):
    steps = 100 * STEPS  # a busy machine does not finish before the signal
    process = _start(tmp_path, "run", steps)
    while process.poll() is None and not any("train/loss" in line for line in _lines_so_far(tmp_path / "run")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    stopped = re.search(r"Stopped by SIGINT at step (\d+)\.", err)[1]
    assert f"\nStep {stopped}.\n" in err and f"step {stopped}/{steps}  loss" in err
    assert "the same command goes on from there" in err
    assert json.loads(out.splitlines()[-1])["interrupted"] is True
    assert (tmp_path / "run" / "report.html").exists()
