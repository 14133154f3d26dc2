"""Two hosts of a TPU slice find each other by the metadata server, and train as one process does.

The hosts are processes, each with a metadata server and one device of JAX's client for CPUs, which they take for a TPU.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from switch_tf.training import processes

# The arguments are the port at which the hosts meet, and those of switch-tf.
HOST = """
import sys
from switch_tf.hardware import host
from switch_tf.partitioning import cluster
host.has_tpu = lambda: True
cluster.TPU_PORT = int(sys.argv.pop(1))
from switch_tf.partitioning.backends import pjrt_client
pjrt_client._PLATFORMS["TPU"] = pjrt_client._NAMES["TPU"] = "cpu"
from switch_tf.cli import main
sys.exit(main.main(sys.argv[1:]))
"""
TINY = [
    "train", "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus_bytes.gin",
    "--gin_file=gin/runs/pretrain.gin", "--gin.SwitchConfig.num_encoder_layers=1",
    "--gin.SwitchConfig.num_decoder_layers=1", "--gin.SwitchConfig.encoder_sparse_step=1",
    "--gin.SwitchConfig.decoder_sparse_step=0", "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}",
    "--gin.BATCH_SIZE=8", "--gin.TRAIN_STEPS=2", "--gin.LOG_PERIOD=1", "--gin.EVAL_PERIOD=0",
    "--gin.ACTIVATION_DTYPE='float32'", "--gin.MODEL_DIR='run'"]


def _environment(programs, **variables):
    """Environment variables of a host. What JAX compiles for its CPU is no TPU's, and stays out of the user's cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "MEGASCALE_"))}
    return {**inherited, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_COMPILATION_CACHE_DIR": str(programs), **variables}


def _losses(folder):
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def _start(folder, index, port, server, *arguments):
    environ = _environment(folder / str(index), GCE_METADATA_HOST=server)
    (folder / "two").mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, "-c", HOST, str(port), *TINY, *arguments], cwd=folder / "two", env=environ,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_hosts_without_variables_train_the_run_of_one_process(metadata_server, tmp_path):
    port, endpoints = processes.free_ports(1)[0], "a:8470:127.0.0.1,b:8470:127.0.0.2"
    started = []
    for index in range(2):
        address, _ = metadata_server(agent_worker_number=str(index), worker_network_endpoints=endpoints, tpu_env="",
                                     accelerator_type="v5litepod-16")
        started.append(_start(tmp_path, index, port, address, "--gin.CACHE_PARTS=2"))  # each reads half of the text
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert f"Waiting for the other processes of this run: 127.0.0.2:{port} ..." in errors[0]
    assert "so 2 devices use gin/layouts/fully_sharded.gin, mesh data=2." in errors[0]
    (tmp_path / "one").mkdir()
    subprocess.run([sys.executable, "-m", "switch_tf.cli", *TINY, "--backend=pjrt", "--gin.CACHE_PARTS=2"],
                   cwd=tmp_path / "one", check=True, env=_environment(tmp_path / "programs"), capture_output=True)
    assert _losses(tmp_path / "two") == pytest.approx(_losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_a_maintenance_event_of_one_host_stops_both_at_one_step_with_everything_saved(metadata_server, tmp_path):
    port, endpoints, metrics = processes.free_ports(1)[0], "127.0.0.1,127.0.0.2", tmp_path / "two" / "run/metrics.jsonl"

    def state():
        has_steps = metrics.exists() and metrics.read_text().count("\n") >= 3
        return "TERMINATE_ON_HOST_MAINTENANCE" if has_steps else "NONE"

    states = [{"maintenance_event": "NONE"}, {"maintenance_event": state}]
    servers = [metadata_server(agent_worker_number=str(index), worker_network_endpoints=endpoints, tpu_env="",
                               accelerator_type="v5litepod-16", preempted="FALSE", **states[index])[0]
               for index in range(2)]
    started = [_start(tmp_path, index, port, servers[index], "--gin.TRAIN_STEPS=100000") for index in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [130, 130], errors
    stopped = re.search(r"Stopped by a signal or notice to another process at step (\d+)\.", errors[0])
    assert stopped, errors
    assert "every process reads the whole batch; with CACHE_PARTS=2 each would read its own rows" in errors[0]
    assert (tmp_path / "two" / "run/checkpoints" / f"step_{int(stopped[1]):08d}" / "checkpoint.json").exists()
