"""Checks for `switch-tf doctor`."""

import collections
import glob
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple, TypeAlias

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal

OK, WARNING, PROBLEM = "ok", "warning", "problem"
IMPORT_TIMEOUT = 300  # seconds
DATA_TIMEOUT = 60

# Each row's distributions write the same files. `import switch_tf` refuses two more nightlies.
SAME_FILES = (
    ("tensorflow", "tensorflow-tpu", "tensorflow-cpu", "tf-nightly"),
    ("keras", "keras-nightly"),
    ("tensorboard", "tb-nightly"),
)
# With CUDA's assembler, for CUDA 12 and 13.
_ASSEMBLERS = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")
# t5 requires them; switch_tf does not.
NEVER_INSTALLED = {"seqio-nightly", "tfds-nightly", "mesh-tensorflow", "transformers"}

# libtpu keeps it while a process has the chips.
_LOCK = pathlib.Path("/tmp/libtpu_lockfile")

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

_CHIPS = """
import json, jax
jax.config.update("jax_platforms", "tpu")
print(json.dumps([device.device_kind for device in jax.local_devices()]))
"""

_LISTING = """
import os, tensorflow
print(len(tensorflow.io.gfile.listdir(os.environ["TFDS_DATA_DIR"])))
"""


# A bucket has no folders.
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


class Finding(NamedTuple):
    """A line of the report. `cure` is a command or a change, or empty."""

    check: str
    found: str
    cure: str = ""
    is_warning: bool = False

    @property
    def status(self) -> str:
        """The status: "ok", "warning" or "problem"."""
        return WARNING if self.is_warning and self.cure else PROBLEM if self.cure else OK


Findings: TypeAlias = Iterator[Finding]


def check_all(model_dir: str | None) -> Findings:
    """Does all checks in order."""
    for check in (check_python, check_versions, check_double_distributions, check_requirements, check_variables,
                  check_tensorboard, check_accelerators, check_pjrt, check_tpu, check_data, check_folders,
                  check_machine):
        yield from check()
    if model_dir:
        yield from check_model_dir(model_dir)


def check_python() -> Findings:
    """Checks for Python 3.11 or 3.12, as editdistance's wheels need."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding("Python", f"{version} at {sys.executable}")
    else:
        yield Finding("Python", version, "install again under Python 3.11 or 3.12")


def check_versions() -> Findings:
    """Compares versions that only work together with the tests' versions."""
    flavour = tensorflow_distribution()
    for name, wanted in (*environment.KNOWN_GOOD[flavour].items(), environment.T5.split("==")):
        version = environment.installed_version(name)
        cure = f"{environment.pip()} install --no-deps {name}=={wanted}"
        # libtpu belongs to TensorFlow if tensorflow-tpu is installed, else to jaxlib.
        partner = flavour if name != "libtpu" or flavour == "tensorflow-tpu" else "jaxlib"
        pair = f"{version} beside {partner} {environment.installed_version(partner)}"
        if version is None and name == "libtpu" and partner == "jaxlib" and not host.has_tpu():
            yield Finding(name, "absent; only the extra `aot` needs it")
        elif version is None and name == "t5":
            yield Finding(name, f"absent; only downstream tasks such as GLUE need it: {cure}")
        elif version is None:
            yield Finding(name, "not installed", f"{cure}; for all of them: -r {requirements_file()}")
        elif name == "libtpu" and environment.goes_with(version, wanted):
            yield Finding(name, pair + (": `switch-tf compile` works here" if partner == "jaxlib" else ""))
        elif name == "libtpu":
            fault = ("TensorFlow aborts at import" if partner != "jaxlib" else
                     "JAX may not start the TPU" if host.has_tpu() else "`switch-tf compile` refuses it")
            yield Finding(name, f"{pair}: {fault}, {wanted} is the one that goes with it", cure)
        elif version == wanted:
            yield Finding(name, version)
        elif name == "tensorflow-text" and version.split(".")[:2] != (
                environment.installed_version(flavour) or "").split(".")[:2]:
            yield Finding(name, f"{pair}: the first two numbers must agree", cure)
        else:
            yield Finding(name, f"{version}; the tests run with {wanted}", cure, is_warning=True)


def check_double_distributions() -> Findings:
    """Finds distributions that overwrite each other's files."""
    doubles = [present for group in SAME_FILES
               if len(present := list(filter(environment.installed_version, group))) > 1]
    for present in doubles:
        keep = "tensorflow-tpu" if "tensorflow-tpu" in present else present[0]
        drop = " ".join(name for name in present if name != keep)
        yield Finding(
            "double packages", f"{' and '.join(present)} write the same files",
            f"{environment.pip()} uninstall -y {drop} && {environment.pip()} install --no-deps --force-reinstall "
            f"{keep}=={environment.installed_version(keep)}")
    if not doubles:
        yield Finding("double packages",
                      "one each of tensorflow, seqio, tensorflow-datasets, keras, tensorboard")


def check_requirements() -> Findings:
    """Checks that each direct or indirect requirement has an accepted version."""
    try:
        from packaging.requirements import Requirement  # may be missing
    except ImportError:
        yield Finding("requirements", "packaging is not installed", f"{environment.pip()} install packaging")
        return
    seen, waiting, unmet = set(), [("switch-tf", "")], {}
    while waiting:
        owner, extra = waiting.pop()
        if (owner, extra) in seen:
            continue
        seen.add((owner, extra))
        for line in metadata.requires(owner) or ():
            requirement = Requirement(line)
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if name == "tensorflow":
                name = tensorflow_distribution()
            if name in NEVER_INSTALLED or requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            version = environment.installed_version(name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                wanted = f"{name}{requirement.specifier}"
                unmet[name] = Finding(name, f"{owner} wants {wanted}, installed is {version or 'none'}",
                                      f"{environment.pip()} install --no-deps {shlex.quote(wanted)}")
            else:
                waiting += [(name, extra) for extra in ("", *requirement.extras)]
    yield from unmet.values()
    if not unmet:
        yield Finding("requirements", f"all of {len({name for name, _ in seen}) - 1} distributions agree")


def check_variables() -> Findings:
    """Lists environment variables that change a run."""
    found = environment.changed_by_variables()
    if not found:
        yield Finding("variables", "none of KERAS_*, TF_*, XLA_* and JAX_* changes a run")
        return
    names = [name for name in found if name.isupper()]
    files = [name for name in found if name not in names]
    cures = ([f"unset {' '.join(names)}"] if names else []) + [f"correct {file}" for file in files]
    keras_backend = "; commands compute with TensorFlow, whatever Keras' back end" if "KERAS_BACKEND" in found or any(
        "backend" in found[file] for file in files) else ""
    yield Finding("variables", ", ".join(f"{name}={value}" for name, value in found.items()) + keras_backend,
                  f"{' and '.join(cures)}, unless you mean it", is_warning=True)


def check_tensorboard() -> Findings:
    """Checks that TensorBoard starts. Version 2.20 needs a setuptools with pkg_resources."""
    output, error = run_python("import tensorboard.main")
    if output is not None:
        yield Finding("tensorboard starts", "look at a run with: tensorboard --logdir RUN/events")
    else:
        wanted = "'setuptools<81'" if "pkg_resources" in error else "tensorboard"
        yield Finding("tensorboard starts", error, f"{environment.pip()} install --no-deps {wanted}")


def check_accelerators() -> Findings:
    """Checks that TensorFlow sees the accelerators, in a new process: a wrong libtpu aborts it."""
    host.skip_tpu_metadata_query()
    output, error = run_python(_DEVICES)
    counts = collections.Counter(json.loads(output or "[]"))
    found, cure, is_warning = "none of TensorFlow's; it imports and runs on the CPU", "", False
    if output is None:
        found = f"TensorFlow does not import: {error}"
        cure = ("what is said above first; if nothing is, "
                f"{environment.pip()} install --no-deps --force-reinstall -r {requirements_file()}")
    elif counts["TPU"] or counts["GPU"]:
        found = ", ".join(f"{counts[kind]} {kind}" for kind in ("TPU", "GPU") if counts[kind])
    elif host.has_tpu() and tensorflow_distribution() == "tensorflow-tpu":
        found = "a TPU chip is attached and TensorFlow does not see it"
        cure = "end the process that holds the TPU (only one can), or check that libtpu is the version above"
    elif shutil.which("nvidia-smi") and environment.cuda_plugin():
        found = "none of TensorFlow's; JAX has a client for NVIDIA's GPUs"
    elif shutil.which("nvidia-smi"):
        found, is_warning = "an NVIDIA driver is installed and TensorFlow sees no GPU", True
        cure = (f"{environment.pip()} install 'jax[cuda12]=={environment.installed_version('jax')}', or run without "
                "the GPU")
    yield Finding("accelerators", found, cure, is_warning)


def check_pjrt() -> Findings:
    """Checks that jaxlib reads TensorFlow's programs, and JAX has the accelerators' client."""
    version, flavour = environment.installed_version("jax"), tensorflow_distribution()
    pair = f"{flavour} {environment.installed_version(flavour)} and jaxlib {environment.installed_version('jaxlib')}"
    output, error = run_python(_LOWERING)
    plugin = environment.cuda_plugin()
    if output is None:
        wanted = " ".join(f"{name}=={environment.KNOWN_GOOD[flavour][name]}" for name in (flavour, "jax", "jaxlib"))
        yield Finding("pjrt", f"{pair} do not go together, so --backend=pjrt fails: {error}",
                      f"{environment.pip()} install --no-deps {wanted}", is_warning=True)
    elif not host.gpus():
        yield Finding("pjrt", f"{pair} go together")
    elif plugin is None:
        yield Finding("pjrt", "this machine has a GPU, and JAX has no client for it",
                      f"{environment.pip()} install 'jax[cuda12]=={version}', or leave --backend=pjrt", is_warning=True)
    elif (found := environment.installed_version(plugin)) == version:
        yield Finding("pjrt", f"{plugin} {found} is JAX's client of this machine's GPUs")
    else:
        yield Finding("pjrt", f"{plugin} is {found} and jax {version}, and the two must agree",
                      f"{environment.pip()} install 'jax[{plugin.split('-')[1]}]=={version}'")


def check_tpu() -> Findings:
    """Checks that the chips are free, a slice's hosts know each other, and JAX starts."""
    files = host.tpu_files()
    if not files or tensorflow_distribution() == "tensorflow-tpu":
        return
    # One process of a host can open the chips. Other users' processes cannot be inspected.
    holders = {}
    for process in map(pathlib.Path, glob.glob("/proc/[0-9]*")):
        try:
            if process.name != str(os.getpid()) and any(os.readlink(file) in files for file in process.glob("fd/*")):
                holders[process.name] = (process / "comm").read_text().strip()
        except OSError:  # it has ended, or is another user's
            continue
    if closed := [file for file in files if not os.access(file, os.R_OK | os.W_OK)]:
        chips = Finding("TPU chips", f"this user cannot read and write {', '.join(closed)}",
                        f"sudo chmod a+rw {' '.join(closed)}")
    elif holders:
        chips = Finding("TPU chips", "they belong to " + ", ".join(
            f"process {number} ({name})" for number, name in holders.items()), f"kill {' '.join(holders)}")
    elif _LOCK.exists() and not os.access(_LOCK, os.W_OK):
        chips = Finding("TPU chips", f"{_LOCK} belongs to another user, whose process may have the chips",
                        f"end that process, then sudo rm {_LOCK}")
    else:
        chips = Finding("TPU chips", f"{len(files)} attached, which no other process of this user has")
    yield chips
    try:
        members = cluster.members()
        is_alone = len(members.addresses) == 1
        if not is_alone and members.index == 0:
            cluster.listening_address(members.addresses[0])
    except Refusal as error:
        yield Finding("TPU hosts", str(error), "docs/cloud_tpu.md, section 5")
        return
    yield Finding("TPU hosts", "this one alone" if is_alone else
                  f"{members.index} of {len(members.addresses)}, which meet at {members.addresses[0]}")
    if chips.cure:
        return
    if not is_alone:  # a slice's chips start on all hosts at once
        yield Finding("TPU starts", "not tried on one of several hosts; train a few steps on all of them")
        return
    output, error = run_python(_CHIPS)
    if output is None:
        known_good = environment.KNOWN_GOOD["tensorflow"]
        wanted = " ".join(f"{name}=={known_good[name]}" for name in ("jax", "jaxlib", "libtpu"))
        yield Finding("TPU starts", f"JAX cannot use the TPU: {error}",
                      f"end any process of another user that has the chips (sudo lsof {files[0]}); else "
                      f"{environment.pip()} install --no-deps {wanted}")
    else:
        counts = collections.Counter(json.loads(output))
        yield Finding("TPU starts", "JAX has " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))


def check_data() -> Findings:
    """Checks that TensorFlow reads TFDS_DATA_DIR."""
    folder = os.environ.get("TFDS_DATA_DIR")
    if not folder:
        return
    output, error = run_python(_LISTING, DATA_TIMEOUT)
    if output is None:
        yield Finding("TFDS_DATA_DIR", f"{folder} cannot be read: {error}",
                      "name a folder or bucket that this machine may read: TFDS_DATA_DIR=gs://BUCKET/FOLDER")
    else:
        yield Finding("TFDS_DATA_DIR", f"{folder} can be read, entries: {output.strip()}")


def check_model_dir(folder: str) -> Findings:
    """Checks that a run's folder or bucket can be written."""
    output, error = run_python(_WRITING.format(folder), DATA_TIMEOUT)
    if output is None:
        yield Finding("MODEL_DIR", f"{folder} cannot be written and read: {error}",
                      "name a folder or a bucket that this machine may read and write: --model_dir gs://BUCKET/FOLDER")
    else:
        yield Finding("MODEL_DIR", f"a file can be written, read and removed in {folder}")


def check_folders() -> Findings:
    """Checks that the current folder and the cache folder are writable and have room."""
    for check, folder in (("current folder", pathlib.Path.cwd()), ("cache folder", environment.cache_folder())):
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            yield Finding(check, f"{existing} is not writable: {error.strerror}", "choose one that you own")
            continue
        free = shutil.disk_usage(existing).free / 1e9
        yield Finding(check, f"{folder} is writable, {free:.1f} GB free",
                      "make room: a run keeps several checkpoints" if free < 5 else "", is_warning=free >= 0.5)


def check_machine() -> Findings:
    """Counts this process's cores, and checks the memory."""
    yield Finding("cores", str(len(os.sched_getaffinity(0))))
    memory = host.memory("MemTotal") / 1e9
    yield Finding("memory", f"{memory:.1f} GB",
                  "start with gin/models/switch_tiny.gin and a small BATCH_SIZE" if memory < 4 else "", is_warning=True)


def run_python(code: str, timeout: float = IMPORT_TIMEOUT) -> tuple[str | None, str]:
    """Runs code in a new process. Returns (standard output, "") or (None, the error's last line)."""
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout,
                                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout} seconds"
    if result.returncode:
        return None, (result.stderr.strip().splitlines() or [f"ended with status {result.returncode}"])[-1]
    return result.stdout, ""


def tensorflow_distribution() -> str:
    """Returns TensorFlow's distribution."""
    return next(filter(environment.installed_version, ("tensorflow-tpu", "tensorflow", "tensorflow-cpu")), "tensorflow")


def requirements_file() -> str:
    """Returns this machine's pinned list."""
    if tensorflow_distribution() == "tensorflow-tpu":
        return "requirements-tensorflow-tpu.txt"
    return "requirements-tpu.txt" if host.has_tpu() else "requirements.txt"


def check_gpu_compiler() -> None:
    """Refuses a machine without CUDA's assembler or a CUDA plugin in jaxlib's version."""
    wanted, plugin = environment.installed_version("jaxlib"), environment.cuda_plugin()
    version = plugin and environment.installed_version(plugin)
    if version != wanted:
        fault = f"is {plugin} {version}, which jaxlib {wanted} does not go with" if plugin else "is not installed"
        raise Refusal(f"The compiler for NVIDIA's GPUs {fault}; run: {environment.pip()} install "
                      f"jax-cuda12-plugin=={wanted} nvidia-cuda-nvcc-cu12")
    if not shutil.which("ptxas") and not any(map(environment.installed_version, _ASSEMBLERS)):
        raise Refusal("The compiler for NVIDIA's GPUs needs ptxas of CUDA, which is not installed; run: "
                      f"{environment.pip()} install {_ASSEMBLERS['13' in plugin]}")


def check_tpu_compiler() -> None:
    """Refuses a machine without a TPU compiler that fits jaxlib."""
    wanted, version = environment.KNOWN_GOOD["tensorflow"]["libtpu"], environment.installed_version("libtpu")
    if environment.installed_version("tensorflow-tpu"):
        raise Refusal("The TPU compiler for machines without a TPU does not go with tensorflow-tpu; run this where "
                      "tensorflow is installed (docs/install.md).")
    if version is None or not environment.goes_with(version, wanted):
        fault = "is not installed" if version is None else f"is libtpu {version}, which jaxlib does not go with"
        raise Refusal(f"The TPU compiler {fault}; run: {environment.pip()} install --no-deps libtpu=={wanted}")
