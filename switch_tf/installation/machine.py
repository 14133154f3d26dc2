"""Checks of the machine: TensorBoard, accelerators, folders, cores and memory."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.installation.findings import OK, PROBLEM, WARNING, Finding
from switch_tf.installation.packages import requirements_file, tensorflow_distribution

IMPORT_TIMEOUT = 300  # seconds
DATA_TIMEOUT = 60

_DEVICES = """
import json, tensorflow, tensorflow_text
print(json.dumps([device.device_type for device in tensorflow.config.list_physical_devices()]))
"""

_LOWERING = """
import tensorflow as tf
for kind in ("GPU", "TPU"):
    tf.config.set_visible_devices([], kind)
from switch_tf.partitioning import lowering
total = tf.Variable(1.0)
lowering.lower(lambda number: total.assign_add(number), [tf.TensorSpec([], tf.float32)], [total])
"""


_LISTING = """
import os, tensorflow
print(len(tensorflow.io.gfile.listdir(os.environ["TFDS_DATA_DIR"])))
"""


# A bucket has no folders, so a file may have any name in it.
_WRITING = """
import secrets
from switch_tf.storage import lock, places, whole_file
folder = places.at({!r})
while places.is_local(folder) and not folder.is_dir():
    folder = folder.parent
file = folder / f".doctor.{{secrets.token_hex(4)}}"
with lock.held(file, "--model_dir"):
    whole_file.put(file, "a")
    assert file.read_text() == "a"
file.unlink()
"""


def check_tensorboard() -> Iterator[Finding]:
    """Checks that TensorBoard starts. Version 2.20 needs a setuptools that still brings pkg_resources."""
    output, error = run_python("import tensorboard.main")
    if output is not None:
        yield Finding("tensorboard starts", OK, "look at a run with: tensorboard --logdir RUN/events")
    else:
        wanted = "'setuptools<81'" if "pkg_resources" in error else "tensorboard"
        yield Finding("tensorboard starts", PROBLEM, error, f"{environment.pip()} install --no-deps {wanted}")


def check_accelerators() -> Iterator[Finding]:
    """Checks that TensorFlow imports and sees the accelerators, in a new process, which a wrong libtpu aborts."""
    host.skip_tpu_metadata_query()
    output, error = run_python(_DEVICES)
    if output is None:
        reinstall = f"{environment.pip()} install --no-deps --force-reinstall -r {requirements_file()}"
        cure = f"what is said above first; if nothing is, {reinstall}"
        yield Finding("accelerators", PROBLEM, f"TensorFlow does not import: {error}", cure)
        return
    devices = json.loads(output)
    counts = {kind: devices.count(kind) for kind in ("TPU", "GPU") if kind in devices}
    if counts:
        yield Finding("accelerators", OK, ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    elif host.has_tpu() and tensorflow_distribution() == "tensorflow-tpu":
        cure = "end the process that holds the TPU (only one can), or check that libtpu is the version above"
        yield Finding("accelerators", PROBLEM, "a TPU chip is attached and TensorFlow does not see it", cure)
    elif shutil.which("nvidia-smi") and environment.cuda_plugin():
        yield Finding("accelerators", OK, "none of TensorFlow's; JAX has a client for NVIDIA's GPUs")
    elif shutil.which("nvidia-smi"):
        cure = (f"{environment.pip()} install 'jax[cuda12]=={environment.installed_version('jax')}', or run without "
                "the GPU")
        yield Finding("accelerators", WARNING, "an NVIDIA driver is installed and TensorFlow sees no GPU", cure)
    else:
        yield Finding("accelerators", OK, "none of TensorFlow's; it imports and runs on the CPU")


def check_pjrt() -> Iterator[Finding]:
    """Checks that jaxlib reads a program that TensorFlow writes, and that JAX has a client for the accelerators."""
    version, flavour = environment.installed_version("jax"), tensorflow_distribution()
    pair = f"{flavour} {environment.installed_version(flavour)} and jaxlib {environment.installed_version('jaxlib')}"
    output, error = run_python(_LOWERING)
    if output is None:
        wanted = " ".join(f"{name}=={environment.KNOWN_GOOD[flavour][name]}" for name in (flavour, "jax", "jaxlib"))
        yield Finding("pjrt", WARNING, f"{pair} do not go together, so --backend=pjrt fails: {error}",
                      f"{environment.pip()} install --no-deps {wanted}")
    elif host.gpus() and not environment.cuda_plugin():
        yield Finding("pjrt", WARNING, "this machine has a GPU, and JAX has no client for it",
                      f"{environment.pip()} install 'jax[cuda12]=={version}', or leave --backend=pjrt")
    elif host.gpus():
        yield from _cuda_plugin(version)
    else:
        yield Finding("pjrt", OK, f"{pair} go together")


def _cuda_plugin(version):
    name = environment.cuda_plugin()
    found = environment.installed_version(name)
    if found == version:
        yield Finding("pjrt", OK, f"{name} {found} is JAX's client of this machine's GPUs")
    else:
        extra = name.split("-")[1]
        yield Finding("pjrt", PROBLEM, f"{name} is {found} and jax {version}, and the two must agree",
                      f"{environment.pip()} install 'jax[{extra}]=={version}'")


def check_data() -> Iterator[Finding]:
    """Checks that TensorFlow reads TFDS_DATA_DIR, such as gs://BUCKET/FOLDER, if the variable is set."""
    folder = os.environ.get("TFDS_DATA_DIR")
    if not folder:
        return
    output, error = run_python(_LISTING, DATA_TIMEOUT)
    if output is None:
        cure = "name a folder or bucket that this machine may read: TFDS_DATA_DIR=gs://BUCKET/FOLDER"
        yield Finding("TFDS_DATA_DIR", PROBLEM, f"{folder} cannot be read: {error}", cure)
    else:
        yield Finding("TFDS_DATA_DIR", OK, f"{folder} can be read, entries: {output.strip()}")


def check_model_dir(folder: str) -> Iterator[Finding]:
    """Checks that a file can be written, read and removed where a run is to be kept, such as gs://BUCKET/FOLDER."""
    output, error = run_python(_WRITING.format(folder), DATA_TIMEOUT)
    if output is None:
        cure = "name a folder or a bucket that this machine may read and write: --model_dir gs://BUCKET/FOLDER"
        yield Finding("MODEL_DIR", PROBLEM, f"{folder} cannot be written and read: {error}", cure)
    else:
        yield Finding("MODEL_DIR", OK, f"a file can be written, read and removed in {folder}")


def check_folders() -> Iterator[Finding]:
    """Checks that the current folder, where runs are written, and the cache folder are writable and have room."""
    for check, folder in (("current folder", pathlib.Path.cwd()), ("cache folder", environment.cache_folder())):
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            yield Finding(check, PROBLEM, f"{existing} is not writable: {error.strerror}", "choose one that you own")
            continue
        free = shutil.disk_usage(existing).free / 1e9
        status = PROBLEM if free < 0.5 else WARNING if free < 5 else OK
        cure = "" if status == OK else "make room: a run keeps several checkpoints"
        yield Finding(check, status, f"{folder} is writable, {free:.1f} GB free", cure)


def check_machine() -> Iterator[Finding]:
    """Counts the cores that this process may use, and checks the memory."""
    yield Finding("cores", OK, str(len(os.sched_getaffinity(0))))
    memory = host.memory("MemTotal") / 1e9
    if memory < 4:
        cure = "start with gin/models/switch_tiny.gin and a small BATCH_SIZE"
        yield Finding("memory", WARNING, f"{memory:.1f} GB", cure)
    else:
        yield Finding("memory", OK, f"{memory:.1f} GB")


def run_python(code: str, timeout: float = IMPORT_TIMEOUT) -> tuple[str | None, str]:
    """Runs code in a new process; returns (standard output, "") or (None, last line of the error)."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout} seconds"
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"ended with status {result.returncode}"]
        return None, lines[-1]
    return result.stdout, ""
