"""Starts JAX's client of this machine's devices, and watches for lost processes.

Otherwise a process would wait in a collective for a lost neighbour, or JAX's client would abort it.
"""

import atexit
import contextlib
import ctypes
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

import jax
from jax._src import distributed  # jax 0.10.2: the client through which processes exchange texts and meet
from tensorflow.experimental import dtensor

from switch_tf import environment
from switch_tf.hardware import chips, devices, host
from switch_tf.partitioning.cluster import Cluster, listening_address
from switch_tf.refusals import Refusal, first_line
from switch_tf.statuses import OUTAGE
from switch_tf.storage import outputs

# JAX's names of clients and devices.
_PLATFORMS = {"CPU": "cpu", "GPU": "cuda", "TPU": "tpu"}
_NAMES = {"CPU": "cpu", "GPU": "gpu", "TPU": "tpu"}
# To start, until a silent process is lost, and to end. JAX sends two heartbeats in the second time, so a process may
# sleep for half of it.
_START_SECONDS = 300
_HEARTBEAT_SECONDS = 60
_END_SECONDS = 10
_PERIOD = 1.0  # seconds between queries
_LONGEST_WAIT = 24 * 3600  # seconds until all have finished


def start(members: Cluster) -> None:
    """Starts JAX on this machine's accelerators or, without any, on TensorFlow's number of CPU devices."""
    if devices.are_jax():
        return
    kind = "TPU" if host.has_tpu() else "GPU" if host.gpus() else "CPU"
    if jax.config.jax_disable_jit:
        raise Refusal("The pjrt back end compiles the step with JAX, which JAX_DISABLE_JIT forbids; unset it.")
    jax.config.update("jax_enable_x64", True)  # Keras counts steps in 64 bits
    jax.config.update("jax_platforms", ",".join(dict.fromkeys([_PLATFORMS[kind], "cpu"])))
    if kind != "CPU" and not jax.config.jax_compilation_cache_dir:  # CPU programs fit only one kind of CPU
        jax.config.update("jax_compilation_cache_dir", own_programs())
    if kind == "CPU":
        count = dtensor.num_local_devices("CPU")
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError as error:  # JAX has started
            if (num_devices := len(jax.local_devices(backend="cpu"))) < count:
                raise Refusal(f"JAX was started with {num_devices} CPU devices before the back end, which needs "
                              f"{count}; choose the back end first.") from error
    elif kind == "TPU" and environment.installed_version("tensorflow-tpu"):
        raise Refusal("The pjrt back end needs the libtpu that goes with JAX, and tensorflow-tpu another one; install "
                      "requirements-tpu.txt in a fresh environment (docs/cloud_tpu.md), or use backend='tpu'.")
    if kind == "TPU":
        chips.set_compiler_flags(host.accelerator_type())
    if len(members.addresses) > 1:
        _meet(members)
    first = _first_device(kind)
    if (count := len({device.process_index for device in jax.devices()})) != len(members.addresses):
        raise Refusal(f"{count} process{'es' * (count > 1)} came together, but process {members.index} knows of "
                      f"{len(members.addresses)}; give all of them the same list in TF_CONFIG or "
                      "TPU_WORKER_HOSTNAMES.")
    devices.use_jax(kind, first.device_kind)


def own_programs() -> str:
    """Returns the default folder for compiled programs on this machine."""
    return str(environment.cache_folder() / "xla")


def _first_device(kind):
    try:
        first = jax.local_devices()[0]
    except RuntimeError as error:
        fault, cause = f"cannot use it ({first_line(error)})", error
    else:
        if first.platform == _NAMES[kind]:
            return first
        fault, cause = f"has devices of {first.platform} alone", None  # no client, or it started earlier
    extra = "cuda12" if kind == "GPU" else "tpu"
    raise Refusal(f"This machine has a {kind}, but JAX {fault}; let `switch-tf doctor` look for the cause, install "
                  f"jax[{extra}]=={jax.__version__}, or use another back end, and in Python create the partitioner "
                  "before anything else uses JAX.") from cause


def _meet(members):
    first, count = members.addresses[0], len(members.addresses)
    bind = listening_address(first) if members.index == 0 else None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, the run's signal to save
    jax.config.update("jax_enable_recoverability", True)  # `_Watch` reports a lost process; JAX would abort
    # C++ code that aborts this process first sleeps for 6 s, so that a thread can report the cause: `sleep` takes
    # SIGABRT's number as seconds. A Python handler would wait for Python's lock.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    message = (f"switch-tf: Process {members.index} did not meet all of the {count} processes at {first} within "
               f"{_START_SECONDS} s ({{}}); start the same command on every host of a TPU slice, and elsewhere each "
               "with the same list of addresses and an index of its own in TF_CONFIG.")
    with outputs.held_back() as written, _ending_on_status(written, message):
        # Cluster detection would choose devices on Slurm and query the cloud's metadata for minutes.
        jax.distributed.initialize(
            first, count, members.index, cluster_detection_method="deactivate", coordinator_bind_address=bind,
            initialization_timeout=_START_SECONDS, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
    _Watch.of_this_process = _Watch(count)
    atexit.register(_leave)


def _leave():
    """Waits at exit for the other processes, because they take a process that leaves early for a lost one."""
    # A command has disconnected already. Other processes should report an uncaught error.
    if not _Watch.of_this_process.is_over and not hasattr(sys, "last_value"):
        with outputs.held_back():
            _all_came("ended", _END_SECONDS)
            _disconnect()


@contextlib.contextmanager
def _ending_on_status(written: IO[bytes], message: str) -> Iterator[None]:
    """Ends this process with `message`, formatted with the cause, when JAX's client logs why it aborts."""
    is_over = threading.Event()

    def look():
        while not is_over.wait(0.2):
            text = os.pread(written.fileno(), 2**20, 0)
            if match := re.search(rb"absl::Status: ([^\n]*)\n", text):
                outputs.end(OUTAGE, message.format(match[1].decode(errors="replace")))

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class _Watch:
    """Two threads that end this process with `message()` when another process is lost.

    One queries the coordination service for live processes, and the second watches the first: if the service is gone,
    JAX's client aborts while it holds the lock that the query waits for. The query needs all processes, so the threads
    run until their process ends in order (`is_over`).
    """

    of_this_process: "_Watch | None" = None  # None with one process

    def __init__(self, count: int):
        self.message: Callable[[], str] = lambda: f"switch-tf: Another of the {count} processes is gone."
        self.is_over = False
        self._everyone = list(range(count))
        self._num_answers = 0
        for function in (self._ask, self._look):
            threading.Thread(target=function, name="watch", daemon=True).start()

    def _ask(self):
        while not self.is_over:
            try:
                is_lost = len(distributed.global_state.client.get_live_nodes(self._everyone)) < len(self._everyone)
            except (jax.errors.JaxRuntimeError, AttributeError):  # first process gone, or this one disconnected
                is_lost = True
            if is_lost:
                self._end()
            self._num_answers += 1
            time.sleep(_PERIOD)

    def _look(self):
        while not self.is_over:
            before = self._num_answers
            time.sleep(1.5 * _PERIOD)
            if self._num_answers == before and _is_aborting():
                self._end()

    def _end(self):
        time.sleep(_PERIOD)  # the main thread may know the cause and end this process
        if not self.is_over:
            outputs.end(OUTAGE, self.message())


def _is_aborting():
    """Returns whether a thread is in the handler of SIGABRT, with the signal blocked."""
    abort, segv = (1 << (number - 1) for number in (signal.SIGABRT, signal.SIGSEGV))
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            blocked = re.search(r"^SigBlk:\s*(\w+)$", task.joinpath("status").read_text(), re.MULTILINE)
            if blocked and int(blocked[1], 16) & (abort | segv) == abort:  # jemalloc's thread blocks all signals
                return True
    return False


@contextlib.contextmanager
def watching(message: Callable[[], str]) -> Iterator[None]:
    """Ends this process with `message()` if another JAX process is lost in this scope."""
    watch = _Watch.of_this_process
    if watch is None:
        yield
        return
    before, watch.message = watch.message, message
    try:
        yield
    finally:
        watch.message = before


def end_together(message: str) -> None:
    """Makes this process wait at exit for all processes, and end with `message` if one is lost."""
    if _Watch.of_this_process is None:
        return

    @atexit.register
    def end():
        _Watch.of_this_process.message = lambda: message
        with outputs.held_back():
            if not _all_came("finished", _LONGEST_WAIT):
                outputs.end(OUTAGE, message)
            _disconnect()


def end_soon(status: int) -> None:
    """Ends this failed process with a status. It waits for the other processes for at most _END_SECONDS."""
    if _Watch.of_this_process is None:
        return

    @atexit.register
    def end():
        # If all processes failed alike, no loss is reported.
        with outputs.held_back():
            _all_came("failed", _END_SECONDS)
            _disconnect()
        outputs.end(status)


def _all_came(place, seconds):
    """Returns whether all processes came to a named barrier."""
    try:
        distributed.global_state.client.wait_at_barrier(f"switch_tf: {place}", 1000 * seconds)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _disconnect():
    _Watch.of_this_process.is_over = True
    if jax.process_index() == 0:
        time.sleep(1)  # it hosts the service; connected clients would abort
    jax.distributed.shutdown()
