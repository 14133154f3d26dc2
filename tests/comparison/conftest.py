"""Run folders that were never trained, with whatever losses a test needs."""

import json

import pytest

from switch_tf import SwitchConfig
from switch_tf.checkpoints import continuation
from switch_tf.configs.run import Run, StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.optim.adafactor import Adafactor

DENSE = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_encoder_layers": 2,
         "num_decoder_layers": 2}
PERIOD = 10


def record(num_experts=0, seed=0, changes=None, **sizes):
    """What a checkpoint keeps of a run's configuration."""
    config = SwitchConfig(**{**DENSE, **sizes, "num_experts": num_experts})
    run = Run("runs/x", "facts", {"inputs": 8, "targets": 4}, 100, 16, seed=seed)
    return {**continuation.record(config, run, StepSettings(), "float32", Adafactor(), Objective(), {"facts": "a"},
                                  {"facts": "b"}, ["bytes"], ["bytes"]), **(changes or {})}


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a run folder whose losses at steps 10, 20, ... are given; None for no number. Runs with
    a digit as `files` have a checkpoint of their own."""

    def make(name, losses, num_experts=0, seed=0, seconds_per_step=0.5, changes=None, files="", **sizes):
        folder = tmp_path / name
        checkpoint = folder / "checkpoints" / "step_00000100"
        checkpoint.mkdir(parents=True)
        for content in filter(None, [files]):
            (checkpoint / "state").write_text(content)
        (checkpoint / "checkpoint.json").write_text(json.dumps({
            "format_version": 3, "step": 100, "variables": {},
            "files": {"state": {"size": len(files), "sha256": 64 * files}} if files else {},
            "configuration": record(num_experts, seed, changes, **sizes)}))
        lines = [{"step": 0, "eval/facts/loss": 9.0, "eval/facts/unigram_loss": 5.0, "eval/facts/recall": 0.0}]
        for number, loss in enumerate(losses, 1):
            lines.append({"step": number * PERIOD, "train/loss": loss, "train/seconds_per_step": seconds_per_step,
                          "train/tokens_per_second": 100.0})
            lines.append({"step": number * PERIOD, "eval/facts/loss": loss, "eval/facts/recall": loss and 1 / loss})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make
