"""Processes of the pjrt back end train as one does, and end in order when one is lost, fails or never comes."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from switch_tf import data
from switch_tf.checkpoints import folders
from switch_tf.partitioning import cluster
from switch_tf.tasks import docs_corpus  # noqa: F401  registers them
from switch_tf.training import processes

ARGUMENTS = [
    "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin", "--gin_file=gin/runs/pretrain.gin",
    "--gin.SwitchConfig.d_model=32", "--gin.SwitchConfig.d_ff=64", "--gin.SwitchConfig.num_encoder_layers=1",
    "--gin.SwitchConfig.num_decoder_layers=1", "--gin.SwitchConfig.encoder_sparse_step=1", "--gin.DROPOUT_RATE=0.1",
    "--gin.BATCH_SIZE=8", "--gin.LOG_PERIOD=1", "--gin.EVAL_PERIOD=0", "--gin.RsqrtDecay.warmup_steps=100",
    "--gin.SwitchConfig.vocab_size=4096", "--gin.SwitchConfig.num_experts=4", "--gin.MODEL_DIR='run'",
    "--gin.CHECKPOINT_PERIOD=2", "--gin.USE_CACHED_TASKS=True", "--gin.CACHE_DIR='../cache'", "--gin.CACHE_PARTS=4",
    "--gin.Run.keep_checkpoints=20"]
FOUR_PROCESSES = ["--gin_file=gin/layouts/expert.gin", "--devices=4", "--processes=4", "--backend=pjrt"]
TWO_PROCESSES = ["--gin_file=gin/layouts/fully_sharded.gin", "--devices=2", "--processes=2", "--backend=pjrt"]
# Two processes without a model. The arguments are the index of the one that fails, its action, what the other one
# does meanwhile, the patience, and the seconds after which a silent process is lost.
MEETING = """
import ctypes, os, resource, signal, sys, time
from switch_tf.training.processes import CommonEnd, one_of_several

with one_of_several("train"):
    from switch_tf.partitioning import Layout
    from switch_tf.partitioning.backends import create_partitioner, pjrt_client
    from switch_tf.refusals import Refusal

    failing, action, waiting = int(sys.argv[1]), *sys.argv[2:4]
    pjrt_client._START_SECONDS, pjrt_client._HEARTBEAT_SECONDS = map(int, sys.argv[4:])
    partitioner = create_partitioner(Layout("data=2", (("mlp", "data"),), backend="pjrt"))
    with CommonEnd(partitioner, "train"):
        partitioner.barrier()
        print("met", flush=True)
        if partitioner.process_index == failing:
            exec(action)
        while waiting:
            exec(waiting)
"""
COLLECTIVE, ASLEEP, FINISHED = "partitioner.barrier()", "time.sleep(1)", ""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
REFUSED = "raise Refusal('The disk is full.')"
# A failed check in a thread of C++.
ABORTED = """
libc = ctypes.CDLL(None)
thread = ctypes.c_ulong()
os.write(2, b"Check failed: size > 0\\n")
libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
"""
# Both save twice. The second time one cannot write more than a few bytes to a file.
SAVING = """
import keras, pathlib, types
import numpy as np
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.partitioning.axes import with_axes

if not hasattr(partitioner, "variable"):
    with partitioner.creates_variables():
        partitioner.variable = with_axes((None, "mlp"), keras.Variable, np.ones([1000, 4]))
    batches = types.SimpleNamespace(save=lambda folder, index: (folder / f"position_{index}").write_text("0"))
    step, checkpointer = 1, Checkpointer(pathlib.Path("run"), {"model/kernel": partitioner.variable}, batches,
                                         partitioner, keep=5)
checkpointer.save(step)
checkpointer.wait()
if partitioner.process_index == failing:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
assert step == 1
step = 2
"""
GONE = (r"switch-tf train: Another of the 2 processes is gone(?: \(.+\)|, after this one had finished)?; start all "
        r"processes again")


def _start(addresses, index, failing=2, action="", waiting=COLLECTIVE, patience=300, silence=60, folder=None):
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    cluster.put(environ, addresses, index)
    return subprocess.Popen([sys.executable, "-c", MEETING, str(failing), action, waiting, str(patience), str(silence)],
                            env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ended(process):
    output, errors = process.communicate(timeout=120)
    return process.returncode, errors


def _command(*words):
    return [sys.executable, "-m", "switch_tf.cli", *words]


def _train(folder, *arguments):
    done = subprocess.run(_command("train", *ARGUMENTS, *arguments), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Gloo" not in done.stdout + done.stderr and "client.h" not in done.stderr
    return _losses(folder)


def _losses(folder):
    path = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def _kill_one(folder, after, *arguments):
    """Trains in several processes and kills the last of them once step `after` is logged and there is a checkpoint."""
    process = subprocess.Popen(_command("train", *ARGUMENTS, *arguments), cwd=folder, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (after in _losses(folder) and folders.steps(folder / "run" / "checkpoints")):
        time.sleep(0.02)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    os.kill(int(children.split()[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert "ended by SIGKILL" in errors and "The last good checkpoint is run/checkpoints/step_" in errors, errors


def _evaluate(folder, *arguments, count=1):
    """Returns the losses of `switch-tf eval` in one process or several."""
    addresses = [f"127.0.0.1:{port}" for port in processes.free_ports(count)]
    started = []
    for index in range(count):
        environ = dict(os.environ)
        cluster.put(environ, addresses, index)
        words = ["eval", "--run=run", f"--output=scores_{count}", "--step=all", "--json", *arguments]
        started.append(subprocess.Popen(_command(*words), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        env=environ if count > 1 else None, text=True))
    ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    assert [status for *_, status in ended] == [0] * count, ended
    (line,) = ended[0][0].splitlines()
    return {one["step"]: one["tasks"]["docs_corpus_span_corruption"]["loss"] for one in json.loads(line)["results"]}


@pytest.mark.slow
def test_a_run_that_changes_its_processes_and_is_killed_has_the_losses_of_one_that_never_did(tmp_path):
    """Four processes until one is killed, two under another layout, and one, beside one device; then evaluations."""
    for split in ("train", "validation"):
        shards = data.plan_cache("docs_corpus_span_corruption", split, None, str(tmp_path / "cache"), num_shards=None,
                                 overwrite=False)
        for shard in shards:
            data.write_shard(shard)
        data.finish_cache(shards)
    one, changing = tmp_path / "one", tmp_path / "changing"
    one.mkdir(), changing.mkdir()
    expected = _train(one, "--gin.TRAIN_STEPS=14")
    checkpoints = changing / "run" / "checkpoints"
    _kill_one(changing, 3, *FOUR_PROCESSES, "--gin.TRAIN_STEPS=12")
    assert len([*(checkpoints / "step_00000002").glob("state.data*")]) == 4
    assert not (checkpoints / "step_00000012").exists()
    losses = _train(changing, *TWO_PROCESSES, "--gin.TRAIN_STEPS=12")
    positions = (checkpoints / "step_00000012").glob("data_position*.index")
    assert {file.name[:21] for file in positions} == {f"data_position_0000{part}_{part // 2}" for part in range(4)}
    assert list(losses) == list(range(1, 13))
    losses = _train(changing, "--gin.TRAIN_STEPS=14")
    # Sums over the processes are taken in another order, so the last digits of float32 differ.
    assert losses == pytest.approx(expected, rel=2e-6)
    for run in (one, changing):
        for path in folders.newest_first(run / "run" / "checkpoints"):
            if path.name not in ("step_00000002", "step_00000012"):  # of four processes and of two
                shutil.rmtree(path)
    scores = _evaluate(one)
    assert list(scores) == [2, 12]
    assert _evaluate(changing) == pytest.approx(scores, rel=2e-6)
    layout = ["--gin.Layout.rules=(('batch', 'data'), ('group', 'data'), ('expert', 'data'))",
              "--gin.Layout.mesh_shape='data=2'", "--devices=2"]
    assert _evaluate(changing, *layout, "--backend=pjrt", count=2) == pytest.approx(scores, rel=2e-6)


@pytest.fixture
def addresses():
    return [f"127.0.0.1:{port}" for port in processes.free_ports(2)]


@pytest.mark.slow
@pytest.mark.parametrize("failing, action, waiting, status", [
    pytest.param(0, KILLED, ASLEEP, -signal.SIGKILL, id="0-killed"),
    pytest.param(1, KILLED, FINISHED, -signal.SIGKILL, id="1-killed-at-the-end"),
    pytest.param(0, KILLED, FINISHED, -signal.SIGKILL, id="0-killed-at-the-end", marks=pytest.mark.exhaustive),
    pytest.param(1, REFUSED, COLLECTIVE, 2, id="1-refused"),
    pytest.param(1, ABORTED, COLLECTIVE, -signal.SIGABRT, id="1-aborted"),
    pytest.param(1, KILLED, COLLECTIVE, -signal.SIGKILL, id="1-killed", marks=pytest.mark.exhaustive),
    pytest.param(0, REFUSED, COLLECTIVE, 2, id="0-refused", marks=pytest.mark.exhaustive)])
def test_a_process_that_is_killed_or_fails_ends_the_other_with_a_message(failing, action, waiting, status, addresses):
    started = [_start(addresses, index, failing, action, waiting) for index in range(2)]
    ended = [_ended(process) for process in started]
    assert ended[failing][0] == status
    assert ended[1 - failing][0] == 4 and re.search(GONE, ended[1 - failing][1]), ended
    if waiting == FINISHED:
        assert "after this one had finished" in ended[1 - failing][1] and "client.h" not in ended[1 - failing][1], ended
    if action == ABORTED:  # which is no loss of another process
        assert "Check failed: size > 0\n" in ended[failing][1] and "is gone" not in ended[failing][1], ended


@pytest.mark.slow
@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_disk_that_is_full_for_one_process_ends_all_and_leaves_the_last_checkpoint(failing, addresses, tmp_path):
    started = [_start(addresses, index, failing, waiting=SAVING, folder=tmp_path) for index in range(2)]
    ended = [_ended(process) for process in started]
    assert [status for status, _ in ended] == [2, 2], ended
    refusal = r"FailedSave: The checkpoint of step 2 could not be written to run \({}\); the older ones are as they"
    assert re.search(refusal.format(".*File too large"), ended[failing][1]), ended
    assert re.search(refusal.format("another process could not .*"), ended[1 - failing][1]), ended
    assert [path.name for path in tmp_path.joinpath("run").iterdir()] == ["step_00000001"]
    assert folders.is_whole(tmp_path / "run" / "step_00000001")


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_host_may_be_silent_for_a_while_and_is_lost_later(addresses, frozen):
    started = [_start(addresses, index, silence=12) for index in range(2)]
    assert [process.stdout.readline() for process in started] == ["met\n"] * 2
    started[frozen].send_signal(signal.SIGSTOP)
    time.sleep(5)
    started[frozen].send_signal(signal.SIGCONT)
    time.sleep(2)
    assert [process.poll() for process in started] == [None, None]
    started[frozen].send_signal(signal.SIGSTOP)  # its connections stay open, as when a machine is lost
    status, errors = _ended(started[1 - frozen])
    started[frozen].kill()
    assert status == 4 and re.search(GONE, errors), errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_a_signal_ends_a_process_that_waits_for_another_to_start(number, addresses):
    process = _start(addresses, 0)
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(addresses[0].split(":")):
            break  # it waits in C++ for the other one
        time.sleep(0.1)
    process.send_signal(number)
    signalled = time.monotonic()
    status, errors = _ended(process)
    assert status == -number and errors.endswith(f"switch-tf train: interrupted by {number.name}.\n"), errors
    assert time.monotonic() - signalled < 10


@pytest.mark.slow
def test_a_process_that_waits_in_vain_for_another_ends_with_a_sentence(addresses):
    status, errors = _ended(_start(addresses, 0, patience=5))
    assert status == 4
    assert f"switch-tf: Process 0 did not meet all of the 2 processes at {addresses[0]} within 5 s (" in errors
    assert "client.h" not in errors


@pytest.mark.slow
@pytest.mark.exhaustive
def test_processes_that_name_different_numbers_of_processes_are_refused(addresses):
    started = [_start(addresses, 0), _start([*addresses, "127.0.0.1:1"], 1)]
    ended = [_ended(process) for process in started]
    assert "2 processes came together, but process 1 knows of 3; give all of them the same list in" in ended[1][1]
    assert ended[0][0] == 4 and re.search(GONE, ended[0][1]), ended
