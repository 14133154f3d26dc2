"""Several processes of this machine that train together, and their common end."""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from etils import epy

import switch_tf
from switch_tf import checks, environment
from switch_tf.hardware import host
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal
from switch_tf.statuses import BUG, INTERRUPTED, OUTAGE, of_all
from switch_tf.storage import outputs
from switch_tf.training import stopping
from switch_tf.training.stopping import SIGNALS, Ending, not_ignored

with epy.lazy_imports():  # imports JAX
    from switch_tf.partitioning.backends import pjrt_client

if TYPE_CHECKING:
    from switch_tf.partitioning.partitioner import Partitioner  # imports TensorFlow

# For the rest to end by themselves after a failure.
GRACE_SECONDS = 30
_MOST = 64
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def devices_of_this_process(num_devices: int | None, count: int | None = None) -> int | None:
    """Divides `--devices` by `count`, by default the number of processes in TF_CONFIG."""
    count = count or len(cluster.members().addresses)
    if num_devices is None:
        return None
    if num_devices < 1 or num_devices % count:
        raise Refusal(f"--devices must be a positive multiple of the {count} process{'es' * (count > 1)}, not "
                      f"{num_devices}.")
    return num_devices // count


def say_who_is_awaited() -> None:
    """Prints, in the first process, that it waits for the rest."""
    members = cluster.members()
    if len(members.addresses) > 1 and members.index == 0:
        print(f"Waiting for the other processes of this run: {', '.join(members.addresses[1:])} ...", file=sys.stderr,
              flush=True)


@contextlib.contextmanager
def one_of_several(command: str) -> Iterator[None]:
    """Lets a signal end this process while C++ code waits for other processes, and hides JAX's collective log lines."""
    if len(cluster.members().addresses) == 1:
        yield
    else:
        with Ending(command), outputs.drop_lines(b"[Gloo] "):
            yield


def agree(partitioner: "Partitioner", entries: dict[str, Any]) -> None:
    """Raises Refusal if `entries`, JSON values by name, differ between processes. All processes call it together.

    Otherwise they would hang in each other's collectives, or train inconsistent weights.
    """
    if partitioner.num_processes == 1:
        return
    entries = {**entries, "versions": {"switch_tf": switch_tf.__version__, **{
        name: environment.installed_version(name) for name in ("tensorflow", "keras", "jax", "numpy", "seqio")}}}
    text = json.dumps(entries, default=repr)
    sums = partitioner.gather_texts(hashlib.sha256(text.encode()).hexdigest())
    if len(set(sums)) == 1:
        return
    first, *following = map(json.loads, partitioner.gather_texts(text))
    for index, other in enumerate(following, 1):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise Refusal("All processes of a run need the same configuration, and "
                              f"{_different(name, first, other)} in processes 0 and {index}; give all of them the "
                              "same command, files and versions.")


def _different(name, first, other):
    """Describes two values, of tables and lists only the first difference."""
    first, other = first.get(name, "missing"), other.get(name, "missing")
    if isinstance(first, dict) and isinstance(other, dict):
        key = next(key for key in [*first, *other] if first.get(key) != other.get(key))
        name, first, other = f"{name}, {key},", first.get(key, "missing"), other.get(key, "missing")
    elif isinstance(first, list) and isinstance(other, list):
        first, other = ([value for value in one if value not in two] for one, two in ((first, other), (other, first)))
        first, other = (", ".join(map(str, one[:1])) or "missing" for one in (first, other))
    return f"{name} is {checks.shown(first)} and {checks.shown(other)}"


class CommonEnd:
    """A context that ends this process with a message if another is lost, and quickly if it fails itself.

    `message` returns the message for a cause, half a sentence.
    """

    def __init__(self, partitioner: "Partitioner", command: str):
        self._partitioner, self._command = partitioner, command
        self._gone = f"Another of the {partitioner.num_processes} processes is gone"
        self._watching = pjrt_client.watching(lambda: self._text(self._gone))
        self.message: Callable[[str], str] = lambda cause: (
            f"{cause}; start all processes again with the same command.")

    def __enter__(self):
        self._watching.__enter__()
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None and self._partitioner.is_lost_process(error):
            # Exit handlers would wait for the lost process.
            outputs.end(OUTAGE, self._text(f"{self._gone} ({_reason(str(error))})"))
        self._watching.__exit__(kind, error, traceback)
        if isinstance(error, Refusal):
            stopping.classify(error, is_running=False)
        if error is None:
            pjrt_client.end_together(f"switch-tf {self._command}: {self._gone}, after this one had finished; "
                                     "start all processes again with the same command.")
        else:
            pjrt_client.end_soon(error.exit_status if isinstance(error, Refusal) else
                                 INTERRUPTED if isinstance(error, KeyboardInterrupt) else BUG)

    def _text(self, cause):
        return f"switch-tf {self._command}: {self.message(cause)}"


def _reason(error):
    match = re.search(r"(Collective ops is aborted by: [^\n]*|Task \S+ heartbeat timeout|Connection [^\n]*|"
                      r"failed to connect[^\n]*)", error)
    return match[1] if match else error.strip().partition("\n")[0]


def run(words: list[str], count: int, num_devices: int | None = None) -> int:
    """Runs `switch-tf` with `words` in `count` processes and prints the output of the first process.

    They get SIGTERM when this process ends in any way, and share the GPUs equally.

    Returns:
        The exit status of the process that ended the rest, see `statuses`.
    """
    if not 1 <= count <= _MOST:
        raise Refusal(f"--processes must be from 1 to {_MOST}, as they share one machine, not {count}.")
    if os.environ.get("TF_CONFIG"):
        raise Refusal("TF_CONFIG names the processes already, so this is one of them; leave out --processes, or unset "
                      "TF_CONFIG.")
    if host.has_tpu() and count > 1:
        raise Refusal("The chips of a TPU belong to one process of their host; leave out --processes.")
    devices_of_this_process(num_devices, count)
    gpus = host.gpus()
    if len(gpus) % count:
        raise Refusal(f"--processes must divide the {len(gpus)} GPU{'s' * (len(gpus) > 1)} of this machine, not "
                      f"{count}; set CUDA_VISIBLE_DEVICES to fewer, or to nothing for the CPU.")
    share = len(gpus) // count
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    children, parent, prctl = [], os.getpid(), ctypes.CDLL(None, use_errno=True).prctl

    def end_with_parent():
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # sent by the kernel; the child then saves
        if os.getppid() != parent:  # the parent has ended already
            os._exit(INTERRUPTED)

    for index in range(count):
        environ = dict(os.environ)
        cluster.put(environ, addresses, index)
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * share:(index + 1) * share])
        output: dict[str, Any] = {} if index == 0 else {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        # The last --processes wins.
        command = [sys.executable, "-m", "switch_tf.cli", *words, "--processes=1"]
        # In its own session, or it would get this process group's signals twice.
        children.append(subprocess.Popen(command, env=environ, start_new_session=True,
                                         preexec_fn=end_with_parent, **output))
    relays = [threading.Thread(target=_relay, args=(child.stderr, index), daemon=True)
              for index, child in enumerate(children[1:], 1)]
    for relay in relays:
        relay.start()
    signals: list[int] = []

    def pass_on(number, _):
        signals.append(number)
        for child in children:
            child.send_signal(number)  # ignored if it has ended

    previous = {number: signal.signal(number, pass_on) for number in not_ignored()}
    try:
        return _wait(children, signals)
    finally:
        for relay in relays:
            relay.join(timeout=GRACE_SECONDS)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(children, signals=()):
    """Waits for all children. After a failure, the rest get some time to end by themselves.

    `signals`: Passed on to all children so far.
    """
    deadline, killed = None, set()
    while True:
        running = [child for child in children if child.poll() is None]
        failed = [index for index, child in enumerate(children) if child.poll() not in (None, 0, INTERRUPTED)]
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
            # An outage may be the reaction to another process's failure.
            first = min(failed, key=lambda index: children[index].returncode == OUTAGE)
            status = children[first].returncode
            if -status not in signals:
                print(f"Process {first} of {len(children)} ended {_describe(status)}"
                      + (f"; the others end too, within {GRACE_SECONDS} s." if running else "."), file=sys.stderr)
                if -status in SIGNALS:  # the running ones may wait for it
                    for child in running:
                        child.send_signal(-status)
        if not running:
            break
        if deadline is not None and time.monotonic() > deadline:
            for child in running:
                killed.add(child)
                child.kill()
        time.sleep(0.1)
    # A return code is negative after a signal. The kernel sends SIGKILL if memory is short.
    return of_all([INTERRUPTED if -code in SIGNALS else OUTAGE if code == -signal.SIGKILL else BUG if code < 0 else code
                   for code in (child.returncode for child in children if child not in killed)])


def _describe(status):
    return f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"


def _relay(stream, index):
    for line in stream:
        sys.stderr.write(f"[process {index}] {line.decode(errors='replace')}")
        sys.stderr.flush()


def free_ports(count: int) -> list[int]:
    """Returns different free ports."""
    with contextlib.ExitStack() as stack:  # sockets stay open, so that the ports differ
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [bound.getsockname()[1] for bound in sockets]
