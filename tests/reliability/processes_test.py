"""Two processes on this machine train as one does; when one is killed or told to stop, the other ends in order."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from switch_tf.checkpoints import folders
from switch_tf.partitioning import cluster
from switch_tf.training import processes

# Each starts up to five processes, which take a minute of CPU time to import and trace.
pytestmark = pytest.mark.slow

ARGUMENTS = [
    "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin", "--gin_file=gin/runs/pretrain.gin",
    "--gin.SwitchConfig.d_model=32", "--gin.SwitchConfig.d_ff=64", "--gin.SwitchConfig.num_encoder_layers=1",
    "--gin.SwitchConfig.num_decoder_layers=1", "--gin.SwitchConfig.encoder_sparse_step=1", "--gin.DROPOUT_RATE=0.1",
    "--gin.BATCH_SIZE=8", "--gin.LOG_PERIOD=1", "--gin.Run.eval_batches=1", "--gin.RsqrtDecay.warmup_steps=100",
    "--gin.SwitchConfig.vocab_size=4096", "--gin.MODEL_DIR='run'"]
# The second of two processes dies after the barrier's collective, while the first one waits.
WAITING = """
import os, signal, time
from tensorflow.python.eager import context
from switch_tf.partitioning import Layout
from switch_tf.partitioning.backends import create_partitioner

partitioner = create_partitioner(Layout("data=2", backend="dtensor"))
partitioner.barrier()
service = context.context()
wait = service.wait_at_barrier
if partitioner.process_index == 1:
    service.wait_at_barrier = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

def lost(call):
    try:
        call()
    except Exception as error:
        print(partitioner.is_lost_process(error), error, flush=True)
        return str(error)

assert lost(partitioner.barrier)
attempts = iter(range(100))
while "Agent must be" not in lost(lambda: wait(f"barrier {next(attempts)}", 60_000)):
    time.sleep(0.1)
os._exit(0)
"""
EXPERTS = ["--gin_file=gin/layouts/expert.gin", "--devices=2"]
WORKERS = ["--gin_file=gin/layouts/data.gin", "--backend=pjrt"]


def _command(*arguments):
    return [sys.executable, "-m", "switch_tf.cli", "train", *ARGUMENTS, *arguments]


def _train(folder, *arguments):
    folder.mkdir(exist_ok=True)
    done = subprocess.run(_command(*arguments), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return _losses(folder)


def _losses(folder):
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], name): value for line in lines for name, value in line.items() if name.endswith("/loss")}


@pytest.mark.parametrize(("backend", "changed", "difference"), [
    ("pjrt", "--gin.CHECKPOINT_PERIOD=2", "CHECKPOINT_PERIOD is 1000 and 2"),
    ("dtensor", "--gin.MESH_SHAPE='data=1,model=2'", "layout, mesh_shape, is 'model=1,data=2' and 'data=1,model=2'"),
    ("pjrt", "--gin.VOCABULARY='source_corpus'", "vocabulary is 'SentencePieceVocabulary of 4096")])
def test_processes_that_differ_are_refused_by_name(backend, changed, difference, tmp_path):
    layout = "data_model" if backend == "dtensor" else "data"
    addresses = [f"127.0.0.1:{port}" for port in processes.free_ports(2)]
    started = []
    for index, more in enumerate(([], [changed])):
        environ = dict(os.environ)
        cluster.put(environ, addresses, index)
        started.append(subprocess.Popen(
            _command(f"--gin_file=gin/layouts/{layout}.gin", "--gin.MESH_SHAPE='data=2'", "--devices=2",
                     f"--backend={backend}", "--gin.TRAIN_STEPS=4", "--gin.EVAL_PERIOD=0", *more),
            env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, told = process.communicate(timeout=120)
        assert process.returncode == 2
        assert f"All processes of a run need the same configuration, and {difference}" in told
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return _train(tmp_path_factory.mktemp("one"), "--gin.TRAIN_STEPS=4", "--gin.EVAL_PERIOD=2")


def test_two_processes_log_the_losses_of_one_and_one_goes_on_from_them(one_process, tmp_path):
    _train(tmp_path, *EXPERTS, "--processes=2", "--gin.TRAIN_STEPS=2", "--gin.EVAL_PERIOD=2",
           "--gin.CHECKPOINT_PERIOD=2")
    losses = _train(tmp_path, "--gin.TRAIN_STEPS=4", "--gin.EVAL_PERIOD=2")  # the rest in one process, on one device
    assert losses.keys() == one_process.keys()
    assert losses == pytest.approx(one_process, rel=1e-5)


@pytest.mark.exhaustive  # pjrt_processes_test.py does the same on another back end
def test_processes_read_their_own_rows_of_a_cache_and_others_go_on_where_they_stopped(tmp_path):
    """Two of DTensor, then two of PJRT, and the losses of one process that reads all."""
    cache = ["cache", "docs_corpus_span_corruption", f"--output={tmp_path / 'cache'}"]
    subprocess.run([sys.executable, "-m", "switch_tf.cli", *cache], check=True, capture_output=True)
    arguments = ["--gin.USE_CACHED_TASKS=True", f"--gin.CACHE_DIR='{tmp_path / 'cache'}'", "--gin.CACHE_PARTS=2",
                 "--gin.EVAL_PERIOD=0"]
    _train(tmp_path / "two", *arguments, *EXPERTS, "--processes=2", "--gin.TRAIN_STEPS=2")
    position = tmp_path / "two" / "run" / "checkpoints" / "step_00000002"
    assert {file.name[:21] for file in position.glob("data_position*.index")} == {
        "data_position_00000_0", "data_position_00001_1"}
    losses = _train(tmp_path / "two", *arguments, *WORKERS, "--processes=2", "--gin.TRAIN_STEPS=4")
    expected = _train(tmp_path / "one", *arguments, "--gin.TRAIN_STEPS=4")
    assert losses.keys() == expected.keys() and (4, "train/loss") in losses
    assert losses == pytest.approx(expected, rel=1e-5)


def _start(folder, *arguments):
    """Starts two processes and waits until they have taken a few steps and have a checkpoint."""
    process = subprocess.Popen(_command(*arguments, "--processes=2", "--gin.TRAIN_STEPS=100000", "--gin.EVAL_PERIOD=0",
                                        "--gin.CHECKPOINT_PERIOD=2"),
                               cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 4
                                          and folders.steps(folder / "run" / "checkpoints")):
        time.sleep(0.1)
    return process


def _children(process):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    return [int(pid) for pid in listed.split()]


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.exhaustive), 0])
def test_when_one_process_is_killed_the_other_ends_with_a_message_within_a_minute(victim, tmp_path):
    process = _start(tmp_path, *EXPERTS)
    os.kill(_children(process)[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed_at < 60
    assert process.returncode == 4
    assert f"Process {victim} of 2 ended by SIGKILL" in errors
    found = re.search(r"Another of the 2 processes is gone \(.+\), so process (\d) ends at step \d+\. The last good "
                      r"checkpoint is .*step_\d+; start all processes again with the same command", errors)
    assert found and int(found[1]) == 1 - victim, errors


def test_a_process_that_dies_while_the_other_waits_for_it_is_known_as_lost():
    addresses = [f"127.0.0.1:{port}" for port in processes.free_ports(2)]
    started = []
    for index in range(2):
        environ = dict(os.environ)
        cluster.put(environ, addresses, index)
        started.append(subprocess.Popen([sys.executable, "-c", WAITING], env=environ, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True))
    said, _ = started[0].communicate(timeout=120)
    assert started[1].wait(timeout=10) == -signal.SIGKILL
    assert "True Barrier failed" in said and "True Agent must be" in said and "False" not in said, said


def test_a_signal_to_one_process_stops_both_at_one_step_with_everything_saved(tmp_path):
    process = _start(tmp_path, *EXPERTS)
    os.kill(_children(process)[1], signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    stopped = int(re.search(r"Stopped by .* at step (\d+)\. Everything up to it is saved", errors)[1])
    assert (tmp_path / "run" / "checkpoints" / f"step_{stopped:08d}" / "checkpoint.json").exists()


def test_when_the_parent_is_killed_both_processes_save_and_end(tmp_path):
    process = _start(tmp_path, *EXPERTS)
    children = _children(process)
    assert len(children) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(pathlib.Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if pathlib.Path(f"/proc/{child}").exists()]
    steps = folders.steps(tmp_path / "run" / "checkpoints")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert steps[-1] >= last
