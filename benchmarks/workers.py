"""Counterpart of `contenders/worker.py`: starts contenders, requests timings, measures memory."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from switch_tf.hardware import host

WORKER = pathlib.Path(__file__).parent / "contenders" / "worker.py"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program that may take part.

    Args:
        name: Name, unique in its comparison.
        python: Interpreter that runs it; None leaves it out.
        job: "build" ("file:function") and the arguments of that function.
        note: Reason for leaving it out.
        environment: Variables of its process.
        on_accelerator: Whether its process sees this machine's accelerator.
        flops: Model FLOPs of one run, None if they are not counted.
    """

    name: str
    python: str | None
    job: dict
    note: str = ""
    environment: dict = dataclasses.field(default_factory=dict)
    on_accelerator: bool = False
    flops: float | None = None


class LeftOut(Exception):
    """A contender cannot run; the message is the sentence for the table."""


class Worker:
    """A running contender, built and warm. Must be stopped.

    Args:
        contender: Contender.

    Raises:
        LeftOut: It cannot be built, or (from `time`) it failed later.
    """

    def __init__(self, contender):
        self.contender = contender
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  `stop` closes it
        try:
            self._process = subprocess.Popen(
                [contender.python, str(WORKER), json.dumps(contender.job)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=self._log, text=True,
                env=_environment(contender.on_accelerator) | contender.environment)
        except OSError as error:
            raise LeftOut(f"left out: {contender.python} cannot be run ({error.strerror})") from error
        try:
            self.facts = self._answer()
        except BaseException:
            self.stop()
            raise
        self.ready_mib = self.peak_mib

    def time(self) -> float:
        """Runs it once; returns the seconds."""
        try:
            self._process.stdin.write("time\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LeftOut(self._epitaph()) from error
        return self._answer()["seconds"]

    def stop(self):
        """Ends the process."""
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise LeftOut(self._epitaph())
        answer = json.loads(line)
        self.peak_mib = answer.pop("peak_mib")
        if "left_out" in answer:
            self._show_log()
            raise LeftOut(answer["left_out"])
        return answer

    def _epitaph(self):
        status = self._process.wait()
        self._show_log()
        killed = " (killed, most likely because the machine ran out of memory)" if status == -9 else ""
        return f"failed: its process ended with status {status}{killed}"

    def _show_log(self):
        """Prints the end of the process's standard error."""
        self._log.seek(0)
        for line in self._log.read().splitlines()[-12:]:
            print(f"  {self.contender.name}| {line}", file=sys.stderr)


def measure_memory(contender: Contender, fields: dict) -> dict:
    """Runs one contender alone; returns its peak memory, also relative to its process before the build.

    Args:
        contender: Contender.
        fields: Copied into the result.
    """
    result = {**fields, "contender": contender.name}
    if contender.note:
        return {**result, "note": contender.note}
    print(f"[measuring the memory of {contender.name}]", file=sys.stderr, flush=True)
    worker = None
    try:
        worker = Worker(contender)
        worker.time()
        return {**result, **worker.facts, "peak_mib": worker.peak_mib,
                "over_start_mib": round(worker.peak_mib - worker.facts["before_build_mib"], 1)}
    except LeftOut as reason:
        return {**result, "note": str(reason)}
    finally:
        if worker:
            worker.stop()


def available_mib() -> float:
    """Returns the memory available without swapping (Linux)."""
    return host.memory("MemAvailable") / 2**20


def total_mib() -> float:
    """Returns the machine's memory (Linux)."""
    return host.memory("MemTotal") / 2**20


def _environment(on_accelerator):
    """Returns the environment of a contender: all cores of the CPU, and the accelerator if it is wanted."""
    cores = str(len(os.sched_getaffinity(0)))
    variables = {**os.environ, "OMP_NUM_THREADS": cores, "TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1"}
    if on_accelerator:  # whose memory all contenders share
        return {**variables, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {**variables, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
