"""Processes of the pjrt back end train as one does, and end in order when one is lost, fails or never comes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from switch_tf import data
from switch_tf.partitioning import cluster
from switch_tf.tasks import docs_corpus  # noqa: F401  registers them
from switch_tf.training import processes

ARGUMENTS = [
    "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin", "--gin_file=gin/runs/pretrain.gin",
    "--gin.SwitchConfig.d_model=32", "--gin.SwitchConfig.d_ff=64", "--gin.SwitchConfig.num_encoder_layers=1",
    "--gin.SwitchConfig.num_decoder_layers=1", "--gin.SwitchConfig.encoder_sparse_step=1", "--gin.DROPOUT_RATE=0.1",
    "--gin.BATCH_SIZE=8", "--gin.LOG_PERIOD=1", "--gin.EVAL_PERIOD=0", "--gin.RsqrtDecay.warmup_steps=100",
    "--gin.SwitchConfig.vocab_size=4096", "--gin.SwitchConfig.num_experts=4", "--gin.MODEL_DIR='run'",
    "--gin.CHECKPOINT_PERIOD=2", "--gin.USE_CACHED_TASKS=True", "--gin.CACHE_DIR='../cache'", "--gin.CACHE_PARTS=2"]
TWO_PROCESSES = ["--gin_file=gin/layouts/fully_sharded.gin", "--devices=2", "--processes=2",
                 "--gin.Layout.backend='pjrt'"]
# Two processes without a model. The arguments are the index of the one that fails, its action, and the patience.
MEETING = """
import os, signal, sys
from switch_tf.partitioning import Layout
from switch_tf.partitioning.backends import create_partitioner, pjrt_client
from switch_tf.refusals import Refusal
from switch_tf.training.processes import CommonEnd

failing, action, pjrt_client._START_SECONDS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
partitioner = create_partitioner(Layout("data=2", backend="pjrt"))
with CommonEnd(partitioner):
    partitioner.barrier()
    if partitioner.process_index == failing:
        exec(action)
    while True:
        partitioner.barrier()
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
REFUSED = "raise Refusal('The disk is full.')"
GONE = r"switch-tf train: Another of the 2 processes is gone \(.+\) before the first step; start all processes again"


def _start(addresses, index, failing=2, action="", patience=300):
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    cluster.put(environ, addresses, index)
    return subprocess.Popen([sys.executable, "-c", MEETING, str(failing), action, str(patience)], env=environ,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ended(process):
    output, errors = process.communicate(timeout=120)
    return process.returncode, errors


def _train(folder, *arguments):
    done = subprocess.run([sys.executable, "-m", "switch_tf.cli", "train", *ARGUMENTS, *arguments], cwd=folder,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Gloo" not in done.stdout + done.stderr and "client.h" not in done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines}


@pytest.mark.slow
def test_two_processes_go_on_from_one_and_one_from_two_with_the_same_losses(tmp_path):
    """One device, two processes that read their own rows of a cache, and one device again, beside one device alone."""
    shards = data.plan_cache("docs_corpus_span_corruption", "train", None, str(tmp_path / "cache"), num_shards=None,
                             overwrite=False)
    for shard in shards:
        data.write_shard(shard)
    data.finish_cache(shards)
    one, changing = tmp_path / "one", tmp_path / "changing"
    one.mkdir()
    expected = _train(one, "--gin.TRAIN_STEPS=6")
    shutil.copytree(one, changing)
    for step in (4, 6):
        shutil.rmtree(changing / "run" / "checkpoints" / f"step_{step:08d}")
    losses = _train(changing, *TWO_PROCESSES, "--gin.TRAIN_STEPS=4")
    positions = (changing / "run" / "checkpoints" / "step_00000004").glob("data_position*.index")
    assert {file.name[:21] for file in positions} == {"data_position_00000_0", "data_position_00001_1"}
    assert list(losses) == [1, 2, 3, 4]
    losses = _train(changing, "--gin.TRAIN_STEPS=6")
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def addresses():
    return [f"127.0.0.1:{port}" for port in processes.free_ports(2)]


@pytest.mark.slow
@pytest.mark.parametrize("failing, action, status", [
    pytest.param(0, KILLED, -signal.SIGKILL, id="0-killed"), pytest.param(1, REFUSED, 2, id="1-refused"),
    pytest.param(1, KILLED, -signal.SIGKILL, id="1-killed", marks=pytest.mark.exhaustive),
    pytest.param(0, REFUSED, 2, id="0-refused", marks=pytest.mark.exhaustive)])
def test_a_process_that_is_killed_or_fails_ends_the_other_with_a_message(failing, action, status, addresses):
    started = [_start(addresses, index, failing, action) for index in range(2)]
    ended = [_ended(process) for process in started]
    assert ended[failing][0] == status
    assert ended[1 - failing][0] == 2 and re.search(GONE, ended[1 - failing][1]), ended


@pytest.mark.slow
def test_a_process_that_waits_in_vain_for_another_ends_with_a_sentence(addresses):
    status, errors = _ended(_start(addresses, 0, patience=5))
    assert status == 2
    assert f"switch-tf: Process 0 did not meet all of the 2 processes at {addresses[0]} within 5 s (" in errors
    assert "client.h" not in errors


@pytest.mark.slow
@pytest.mark.exhaustive
def test_processes_that_name_different_numbers_of_processes_are_refused(addresses):
    started = [_start(addresses, 0), _start([*addresses, "127.0.0.1:1"], 1)]
    ended = [_ended(process) for process in started]
    assert "2 processes came together, but process 1 knows of 3; give all of them the same list in" in ended[1][1]
    assert ended[0][0] == 2 and re.search(GONE, ended[0][1]), ended
