"""The command on a real run: its numbers, its cache, what does not fit, what it refuses."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")

from switch_tf import environment
from switch_tf.cli import compile as command
from switch_tf.cli.main import Mistake

RUN = ["--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/c4.gin", "--gin_file=gin/runs/pretrain.gin",
       "--gin.BATCH_SIZE=32", "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 32}"]


def _compile(tmp_path, *arguments):
    done = subprocess.run([sys.executable, "-m", "switch_tf.cli", "compile", *RUN, *arguments, "--json"], cwd=tmp_path,
                          capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    return done, (json.loads(done.stdout.splitlines()[-1]) if done.stdout else None)


def test_a_run_is_compiled_once_and_answered_from_then_on(tmp_path):
    arguments = ["--gin_file=gin/layouts/expert.gin", "--topology=v5e:2x2"]
    done, result = _compile(tmp_path, *arguments, f"--save={tmp_path / 'kept'}")
    assert done.returncode == 0, done.stderr
    assert result["fits"] and result["mesh"] == {"data": 4}
    assert result["layers"] == [2, 2] and result["compiled_layers"] == [[2, 2]]
    assert result["collectives"]["all-to-all"]["count"] == 8  # two sparse layers
    assert "all-gather" not in result["collectives"] and result["warnings"] == []
    memory = result["bytes_per_device"]
    assert 0 < memory["arguments"] < 4 * result["num_parameters"]  # experts in pieces
    assert memory["needed"] < result["chip_bytes"] == 16 * 2**30
    low, high = result["predicted"]["step_seconds"]
    assert 0 < low < high
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "step_2_2.optimized.hlo", "step_2_2.stablehlo.mlir"]
    again, same = _compile(tmp_path, *arguments)
    assert again.returncode == 0, again.stderr
    assert same == result
    assert "The compiler was asked before" in again.stderr and "Lowering" not in again.stderr


def test_a_run_that_does_not_fit_ends_with_advice(tmp_path):
    # Logits of 2^20 tokens, 2^20 words: far beyond a chip.
    done, result = _compile(tmp_path, "--gin_file=gin/layouts/data.gin", "--topology=v5e:2x2",
                            "--gin.BATCH_SIZE=8192", "--gin.SwitchConfig.vocab_size=262144",
                            "--gin.TASK_FEATURE_LENGTHS={'inputs': 128, 'targets': 128}")
    assert done.returncode == 1, done.stderr
    assert not result["fits"]
    assert any("num_microbatches=2" in line for line in result["advice"])
    assert "It does not fit." in done.stderr


@pytest.mark.parametrize("arguments, message", [
    (["--topology=v5e"], "A topology reads like v5e:4x4"),
    (["--topology=v5e:2x4", "--gin_file=gin/layouts/expert.gin", "--gin.MESH_SHAPE='data=4'"],
     "MESH_SHAPE 'data=4' is for 4 devices, but there are 8 (TPU); make the product of its sizes 8."),
    (["--topology=v5e:4x4", "--gin_file=gin/layouts/expert.gin"], "num_experts ('expert', 8) over the 16 devices")])
def test_what_cannot_be_asked_is_one_sentence(arguments, message, tmp_path):
    done, _ = _compile(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(environment, "installed_version", lambda name: None)
    with pytest.raises(Mistake, match=r"The TPU compiler is not installed; run: .* --no-deps libtpu==0\.0\.42\.1"):
        command._check_compiler()
