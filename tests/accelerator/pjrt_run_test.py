"""Runs of the pjrt back end on this machine's accelerator beside TensorFlow's on its CPU: losses, scores, predictions.

`make accelerator` runs these on a machine with a GPU or TPU. NVIDIA's libraries multiply float32 numbers exactly here,
not in TensorFloat-32, which has as many digits as float16.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from switch_tf.hardware import host

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not (host.gpus() or host.has_tpu()), reason="this machine has no accelerator")]

STEPS, SAVED = 6, 3
TASK = "docs_corpus_span_corruption"
RUN = [
    "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin", "--gin_file=gin/runs/pretrain.gin",
    "--gin.SwitchConfig.vocab_size=4096", "--gin.RsqrtDecay.warmup_steps=100", "--gin.BATCH_SIZE=8",
    "--gin.LOG_PERIOD=3", "--gin.EVAL_PERIOD=0", f"--gin.CHECKPOINT_PERIOD={SAVED}", "--gin.Run.keep_checkpoints=20"]
ON_CPU, ON_ACCELERATOR = ["--gin_file=gin/layouts/single.gin"], ["--gin_file=gin/layouts/single.gin", "--backend=pjrt"]
FLOAT32, BFLOAT16 = "--gin.ACTIVATION_DTYPE='float32'", "--gin.ACTIVATION_DTYPE='bfloat16'"
# Settings -> arguments and the relative tolerance of losses.
SETTINGS = {
    "plain": ([FLOAT32], 1e-4),
    "dropout": ([FLOAT32, "--gin.DROPOUT_RATE=0.1"], 1e-4),
    "einsum": ([FLOAT32, "--gin.SwitchConfig.dispatch='einsum'"], 1e-4),
    "index": ([FLOAT32, "--gin.SwitchConfig.dispatch='index'"], 1e-4),
    "microbatches": ([FLOAT32, "--gin.StepSettings.num_microbatches=2"], 1e-4),
    "steps_per_call": ([FLOAT32, "--gin.StepSettings.steps_per_call=3"], 1e-4),
    "remat": ([FLOAT32, "--gin.SwitchConfig.remat=True"], 1e-4),
    "clipped": ([FLOAT32, "--gin.StepSettings.clip_norm=0.1"], 1e-4),
    "top2": ([FLOAT32, "--gin.SwitchConfig.routing_policy='top2'",
              "--gin.SwitchConfig.decoder_routing_policy='switch'"], 1e-4),
    "bfloat16": ([BFLOAT16], 1e-2),
}
EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}


def _command(folder, words, accelerator, **variables):
    """Runs switch-tf with this machine's accelerator or without it, and returns what it printed."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **variables}
    environment.pop("JAX_PLATFORMS", None)  # conftest.py's
    if not accelerator:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-m", "switch_tf.cli", *words], cwd=folder, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def _answers(folder, words, accelerator):
    return [json.loads(line) for line in _command(folder, words, accelerator, **EXACT).stdout.splitlines()]


def _train(folder, run, arguments, steps=STEPS, accelerator=True, **variables):
    layout = ON_ACCELERATOR if accelerator else ON_CPU
    return _command(folder, ["train", *RUN, *arguments, *layout, f"--gin.MODEL_DIR='{run}'",
                             f"--gin.TRAIN_STEPS={steps}"], accelerator, **variables)


def _losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_those_of_the_cpu(name, tmp_path):
    arguments, tolerance = SETTINGS[name]
    _train(tmp_path, "cpu", arguments, accelerator=False)
    printed = _train(tmp_path, "accelerator", arguments, **EXACT).stderr
    expected, found = _losses(tmp_path / "cpu"), _losses(tmp_path / "accelerator")
    assert re.search(r"; training on 1 x (NVIDIA|TPU)", printed), printed
    assert list(expected) == [3, 6] and found == pytest.approx(expected, rel=tolerance)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of STEPS steps on the accelerator."""
    folder = tmp_path_factory.mktemp("trained")
    _train(folder, "run", [FLOAT32], **EXACT)
    return folder


def test_a_run_that_visits_the_cpu_has_the_losses_of_one_that_never_moved(trained, tmp_path):
    first, cpu, last = SAVED, 2 * SAVED, 3 * SAVED
    shutil.copytree(trained / "run", tmp_path / "unmoved")
    _train(tmp_path, "unmoved", [FLOAT32], last, **EXACT)
    _train(tmp_path, "moved", [FLOAT32], first, **EXACT)
    _train(tmp_path, "moved", [FLOAT32], cpu, accelerator=False)
    _train(tmp_path, "moved", [FLOAT32], last, **EXACT)
    found, expected = _losses(tmp_path / "moved"), _losses(tmp_path / "unmoved")
    assert list(expected) == [first, cpu, last] and found == pytest.approx(expected, rel=1e-4)


def test_a_resumed_run_has_the_losses_of_one_that_never_stopped(trained, tmp_path):
    _train(tmp_path, "run", [FLOAT32], SAVED, **EXACT)
    _train(tmp_path, "run", [FLOAT32], STEPS, **EXACT)
    found, expected = _losses(tmp_path / "run"), _losses(trained / "run")
    assert found == pytest.approx(expected, rel=1e-6)  # the same device and programs, but sums of many threads


def test_an_evaluation_has_the_losses_of_the_cpu(trained, tmp_path):
    found = {}
    for name, backend in (("accelerator", ["--backend=pjrt"]), ("cpu", [])):
        words = ["eval", f"--run={trained / 'run'}", f"--output={tmp_path / name}", "--json", *backend]
        (line,) = _command(tmp_path, words, name == "accelerator", **EXACT).stdout.splitlines()
        found[name] = json.loads(line)["results"][0]["tasks"][TASK]["loss"]
    assert found["accelerator"] == pytest.approx(found["cpu"], rel=1e-4)


@pytest.mark.parametrize("sampler", [[], ["--sampler=beam"]], ids=["greedy", "beam"])
def test_predictions_are_those_of_the_cpu(sampler, trained, tmp_path):
    (tmp_path / "lines.txt").write_text("The router sends each token\nto one\nof the <extra_id_0> experts\n")
    words = ["infer", f"--run={trained / 'run'}", "--input=lines.txt", "--max_length=16", *sampler]
    found = _answers(tmp_path, [*words, "--backend=pjrt"], True)
    expected = _answers(tmp_path, [*words, "--backend=auto"], False)
    assert [answer["output"] for answer in found] == [answer["output"] for answer in expected]
    assert [answer["score"] for answer in found] == pytest.approx([answer["score"] for answer in expected], rel=1e-5)
