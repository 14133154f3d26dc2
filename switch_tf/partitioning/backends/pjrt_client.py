"""Starts JAX's client of this machine's devices, in one process or several."""

import atexit
import re
import threading

import jax

from switch_tf import environment
from switch_tf.hardware import devices, host
from switch_tf.partitioning.backends import aborts
from switch_tf.partitioning.cluster import Cluster, check_port
from switch_tf.refusals import Refusal, first_line
from switch_tf.statuses import OUTAGE
from switch_tf.storage import outputs

# JAX's name of the client, and of its devices.
_PLATFORMS = {"CPU": "cpu", "GPU": "cuda", "TPU": "tpu"}
_NAMES = {"CPU": "cpu", "GPU": "gpu", "TPU": "tpu"}
# Seconds to wait for the other processes at the start, without a sign of one of them, and for them to end.
_START_SECONDS = 300
_HEARTBEAT_SECONDS = 30
_END_SECONDS = 10


def start(members: Cluster) -> None:
    """Has JAX take the accelerators of this machine or, without any, as many CPU devices as TensorFlow has.

    Raises:
        Refusal: JAX has no client for the accelerators, or was started with other devices; or the processes name
            different numbers of processes.
    """
    if devices.are_jax():
        return
    kind = "TPU" if host.has_tpu() else "GPU" if host.gpus() else "CPU"
    jax.config.update("jax_enable_x64", True)  # Keras counts steps in 64 bits
    jax.config.update("jax_platforms", ",".join(dict.fromkeys([_PLATFORMS[kind], "cpu"])))
    if kind != "CPU" and not jax.config.jax_compilation_cache_dir:  # a CPU's programs are for that CPU alone
        jax.config.update("jax_compilation_cache_dir", str(environment.cache_folder() / "xla"))
    if kind == "CPU":
        _divide_cpu()
    elif kind == "TPU" and environment.installed_version("tensorflow-tpu"):
        raise Refusal("The pjrt back end needs the libtpu that goes with JAX, and tensorflow-tpu another one; install "
                      "requirements-tpu.txt in a fresh environment (docs/cloud_tpu.md), or use another back end.")
    if len(members.addresses) > 1:
        _meet(members)
    first = _first_device(kind)
    if (count := len({device.process_index for device in jax.devices()})) != len(members.addresses):
        raise Refusal(f"{count} process{'es' * (count > 1)} came together, but process {members.index} knows of "
                      f"{len(members.addresses)}; give all of them the same list in TF_CONFIG or "
                      "TPU_WORKER_HOSTNAMES.")
    devices.use_jax(kind, first.device_kind)


def _first_device(kind):
    """Starts JAX's client of the devices of a kind and returns the first one.

    Raises:
        Refusal: JAX has other devices.
    """
    try:
        first = jax.local_devices()[0]
    except RuntimeError as error:
        found, cause = f"cannot use it ({first_line(error)})", error
    else:
        if first.platform == _NAMES[kind]:
            return first
        found, cause = f"has devices of {first.platform} alone", None  # its client is missing, or it started earlier
    extra = "cuda12" if kind == "GPU" else "tpu"
    raise Refusal(f"This machine has a {kind}, but JAX {found}; let `switch-tf doctor` look for the cause, install "
                  f"jax[{extra}]=={jax.__version__}, or use another back end, and in Python create the partitioner "
                  "before anything else uses JAX.") from cause


def _meet(members):
    """Connects this process to the others.

    Raises:
        Refusal: The address of the first process cannot be used.
    """
    first, count = members.addresses[0], len(members.addresses)
    if members.index == 0:
        check_port(first)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, on which a run saves
    with outputs.held_back() as written:

        def message():
            written.seek(0)
            found = re.search(rb"absl::Status: ([^\n]*)", written.read())
            return (f"switch-tf: Process {members.index} did not meet all of the {count} processes at {first} within "
                    f"{_START_SECONDS} s ({found[1].decode() if found else 'JAX aborted'}); start the same command on "
                    "every host of a TPU slice, and elsewhere each with the same list of addresses and an index of its "
                    "own in TF_CONFIG.")

        with aborts.ending_with(message):
            # Without detection of the cluster, which would choose devices on Slurm and query the cloud's metadata for
            # minutes; `members` knows the hosts of a TPU slice from the same attributes.
            jax.distributed.initialize(
                first, count, members.index, cluster_detection_method="deactivate",
                initialization_timeout=_START_SECONDS, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)


def end_together(message: str) -> None:
    """Has this process wait at its exit for the others, and end with a message as an outage if one is lost."""
    atexit.register(_end_together, message)


def _end_together(message):
    with outputs.held_back(), aborts.ending_with(lambda: message):
        try:
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError:  # the client aborts in another thread, or this one hears of it first
            outputs.end(OUTAGE, message)


def end_soon(status: int) -> None:
    """Has this process, which failed, exit with a status, without waiting long for others that wait for it."""
    atexit.register(_end_soon, status)


def _end_soon(status):
    # If all processes failed alike, a common shutdown keeps each from reporting the others as lost.
    leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    leaving.start()
    leaving.join(_END_SECONDS)
    outputs.end(status)


def _divide_cpu():
    """Gives JAX as many CPU devices as TensorFlow has."""
    count = devices.num_local_devices("CPU")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # JAX has started
        if (found := len(jax.local_devices(backend="cpu"))) < count:
            raise Refusal(f"JAX was started with {found} CPU devices before the back end, which needs {count}; choose "
                          "the back end first.") from error
