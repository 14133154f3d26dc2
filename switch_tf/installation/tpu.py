"""Checks of a machine with a TPU that JAX has a client for."""

import collections
import glob
import json
import os
import pathlib
from collections.abc import Iterator

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.installation import machine
from switch_tf.installation.findings import OK, PROBLEM, Finding
from switch_tf.installation.packages import tensorflow_distribution
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal

# libtpu keeps this file while a process has the chips.
_LOCK = pathlib.Path("/tmp/libtpu_lockfile")
_PROCESSES = "/proc/[0-9]*"

_CHIPS = """
import json, jax
jax.config.update("jax_platforms", "tpu")
print(json.dumps([device.device_kind for device in jax.local_devices()]))
"""


def check_tpu() -> Iterator[Finding]:
    """Checks that the chips are free, that the hosts of a slice know each other, and that JAX starts the chips."""
    if not host.has_tpu() or tensorflow_distribution() == "tensorflow-tpu":
        return
    chips = _chips()
    yield chips
    hosts, is_alone = _hosts()
    yield hosts
    if OK == chips.status == hosts.status:
        yield _start(is_alone)


def _chips():
    """Finds what keeps a new process from the chips, which only one process of a host can have."""
    files = host.tpu_files()
    if closed := [file for file in files if not os.access(file, os.R_OK | os.W_OK)]:
        return Finding("TPU chips", PROBLEM, f"this user cannot read and write {', '.join(closed)}",
                       f"sudo chmod a+rw {' '.join(closed)}")
    if holders := _holders(set(files)):
        return Finding("TPU chips", PROBLEM, "they belong to " + ", ".join(
            f"process {number} ({name})" for number, name in holders.items()), f"kill {' '.join(holders)}")
    if _LOCK.exists() and not os.access(_LOCK, os.W_OK):
        return Finding("TPU chips", PROBLEM, f"{_LOCK} belongs to another user, whose process may have the chips",
                       f"end that process, then sudo rm {_LOCK}")
    return Finding("TPU chips", OK, f"{len(files)} attached, which no other process of this user has")


def _holders(files):
    """Returns number -> name of the other processes that have a file open. Those of other users cannot be looked at."""
    holders = {}
    for process in map(pathlib.Path, glob.glob(_PROCESSES)):
        try:
            if process.name != str(os.getpid()) and any(os.readlink(file) in files for file in process.glob("fd/*")):
                holders[process.name] = (process / "comm").read_text().strip()
        except OSError:  # it has ended, or is another user's
            continue
    return holders


def _hosts():
    """Returns the finding about the hosts of the slice, and whether this one is alone."""
    try:
        members = cluster.members()
        if len(members.addresses) == 1:
            return Finding("TPU hosts", OK, "this one alone"), True
        if members.index == 0:
            cluster.listening_address(members.addresses[0])
    except Refusal as error:
        return Finding("TPU hosts", PROBLEM, str(error), "docs/cloud_tpu.md, section 5"), False
    return Finding("TPU hosts", OK, f"{members.index} of {len(members.addresses)}, which meet at "
                                    f"{members.addresses[0]}"), False


def _start(is_alone):
    if not is_alone:  # the chips of a slice start on all hosts at once
        return Finding("TPU starts", OK, "not tried on one of several hosts; train a few steps on all of them")
    output, error = machine.run_python(_CHIPS)
    if output is None:
        known_good = environment.KNOWN_GOOD["tensorflow"]
        wanted = " ".join(f"{name}=={known_good[name]}" for name in ("jax", "jaxlib", "libtpu"))
        return Finding("TPU starts", PROBLEM, f"JAX cannot use the TPU: {error}",
                       f"end any process of another user that has the chips (sudo lsof {host.tpu_files()[0]}); else "
                       f"{environment.pip()} install --no-deps {wanted}")
    counts = collections.Counter(json.loads(output))
    return Finding("TPU starts", OK, "JAX has " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
