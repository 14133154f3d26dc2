"""A small run of `switch-tf train` in a process of its own, for tests that stop it."""

import json
import subprocess
import sys
import threading
from typing import Any

STEPS = 60
ARGUMENTS = (
    "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin",
    "--gin_file=gin/runs/pretrain.gin", "--gin.SwitchConfig.d_model=32", "--gin.SwitchConfig.d_ff=64",
    "--gin.SwitchConfig.num_heads=2", "--gin.SwitchConfig.num_encoder_layers=1",
    "--gin.SwitchConfig.num_decoder_layers=1", "--gin.SwitchConfig.encoder_sparse_step=1",
    "--gin.SwitchConfig.decoder_sparse_step=1", "--gin.DROPOUT_RATE=0.1", "--gin.EXPERT_DROPOUT_RATE=0.1",
    "--gin.BATCH_SIZE=8", "--gin.Run.eval_batches=1", "--gin.RsqrtDecay.warmup_steps=100",
    f"--gin.TRAIN_STEPS={STEPS}")
ON_ONE_DEVICE = ("--gin_file=gin/layouts/single.gin",)
_CLOCKS = ("per_second", "seconds_per_step", "utilization", "wait_fraction")


class Process:
    """A process that trains. Its lines on standard error are read as they come.

    Args:
        run: Path of the run folder.
        folder: Working directory.
        arguments: More arguments of the command.
        program: Arguments of Python that run the command line.
    """

    def __init__(self, run: Any, folder: Any, arguments: tuple[str, ...] = ON_ONE_DEVICE,
                 program: tuple[str, ...] = ("-m", "switch_tf.cli")):
        command = [sys.executable, *program, "train", *ARGUMENTS, *arguments, f"--gin.MODEL_DIR='{run}'"]
        self.popen = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.popen.stderr:
            self.lines.append(line)

    @property
    def told(self) -> str:
        """Its standard error so far."""
        return "".join(self.lines)

    def is_running(self) -> bool:
        return self.popen.poll() is None

    def end(self, timeout: float | None = None) -> int:
        """Waits for its end and returns its exit status."""
        status = self.popen.wait(timeout)
        self._reader.join()
        return status


def lines_of(run: Any) -> list[dict]:
    """Returns what a run has logged, without what a clock measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if not name.endswith(_CLOCKS)
              and not name.startswith("seconds/")} for line in lines]
    return [line for line in lines if len(line) > 1]
