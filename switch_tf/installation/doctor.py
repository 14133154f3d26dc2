"""Checks for `switch-tf doctor`."""

import contextlib
import glob
import itertools
import os
import pathlib
import platform
import shutil
import subprocess
import sys
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

# Each row's distributions write the same files; the first is kept. `import switch_tf` refuses two more nightlies.
SAME_FILES = (
    ("tensorflow-tpu", "tensorflow", "tensorflow-cpu", "tf-nightly"),
    ("keras", "keras-nightly"),
    ("tensorboard", "tb-nightly"),
)
# With CUDA's assembler, for CUDA 12 and 13.
_ASSEMBLERS = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")

# libtpu keeps it while a process has the chips.
_LOCK = "/tmp/libtpu_lockfile"

_DEVICES = """
import collections, tensorflow, tensorflow_text
kinds = collections.Counter(device.device_type for device in tensorflow.config.list_physical_devices())
print(*(f"{count} {kind}" for kind, count in kinds.items()), sep=", ")
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
import jax
jax.config.update("jax_platforms", "tpu")
devices = jax.local_devices()
print(len(devices), devices[0].device_kind)
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
    return itertools.chain(
        check_machine(), check_versions(), check_double_distributions(), check_requirements(), check_variables(),
        check_tensorboard(), check_accelerators(), check_tpu(), check_folders(model_dir))


def check_machine() -> Findings:
    """Checks Python's version and the memory, and counts this process's cores."""
    # The wheels of editdistance and the pins need one of the two.
    yield Finding("Python", f"{platform.python_version()} at {sys.executable}",
                  "" if sys.version_info[:2] in ((3, 11), (3, 12)) else "install again under Python 3.11 or 3.12")
    memory = host.memory("MemTotal") / 1e9
    yield Finding("machine", f"{len(os.sched_getaffinity(0))} cores, {memory:.1f} GB of memory",
                  "start with gin/models/switch_tiny.gin and a small BATCH_SIZE" if memory < 4 else "", is_warning=True)


def check_versions() -> Findings:
    """Compares versions that only work together with the tests' versions."""
    flavour = tensorflow_distribution()
    users = {"t5": "downstream tasks such as GLUE need it"}
    if flavour != "tensorflow-tpu" and not host.has_tpu():
        users["libtpu"] = "`switch-tf compile` needs it"
    for name, wanted in (*environment.KNOWN_GOOD[flavour].items(), environment.T5.split("==")):
        version, cure = environment.installed_version(name), f"{environment.pip()} install --no-deps {name}=={wanted}"
        if version is None and name in users:
            yield Finding(name, f"absent; only {users[name]}: {cure}")
        elif version is None:
            yield Finding(name, "not installed", f"{cure}; for all of them: -r {requirements_file()}")
        elif version == wanted or name == "libtpu" and environment.goes_with(version, wanted):
            yield Finding(name, version)
        elif name == "libtpu":
            yield Finding(name, f"{version} does not go with {_pair()}", cure)
        else:
            yield Finding(name, f"{version}; the tests run with {wanted}", cure, is_warning=True)


def check_double_distributions() -> Findings:
    """Finds distributions that overwrite each other's files."""
    for group in SAME_FILES:
        present = list(filter(environment.installed_version, group))
        if len(present) > 1:
            yield Finding(
                "double packages", f"{' and '.join(present)} write the same files",
                f"{environment.pip()} uninstall -y {' '.join(present[1:])} && {environment.pip()} install --no-deps "
                f"--force-reinstall {present[0]}=={environment.installed_version(present[0])}")


def check_requirements() -> Findings:
    """Checks that each direct or indirect requirement has an accepted version."""
    try:
        from packaging.requirements import Requirement  # may be missing
        from packaging.utils import canonicalize_name
    except ImportError:
        yield Finding("requirements", "packaging is not installed", f"{environment.pip()} install packaging")
        return
    owners, unmet = [("switch-tf", "")], {}
    for owner, extra in owners:  # grows meanwhile
        for requirement in map(Requirement, metadata.requires(owner) or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            if name == "tensorflow":
                name = tensorflow_distribution()
            version, wanted = environment.installed_version(name), f"{name}{requirement.specifier}"
            if version and requirement.specifier.contains(version, prereleases=True):
                owners += [pair for one in ("", *requirement.extras) if (pair := (name, one)) not in owners]
            else:
                unmet[name] = Finding(name, f"{owner} wants {wanted}, installed is {version or 'none'}",
                                      f"{environment.pip()} install --no-deps '{wanted}'")
    yield from unmet.values() or [Finding("requirements", "all are installed, in accepted versions")]


def check_variables() -> Findings:
    """Lists environment variables that change a run."""
    text = ", ".join(f"{name}={value}" for name, value in environment.changed_by_variables().items())
    if "backend" in text.lower():
        text += "; commands compute with TensorFlow, whatever Keras' back end"
    yield Finding("variables", text or "none of KERAS_*, TF_*, XLA_* and JAX_* changes a run",
                  text and "unset or correct them, unless you mean it", is_warning=True)


def check_tensorboard() -> Findings:
    """Checks that TensorBoard starts. Version 2.20 needs a setuptools with pkg_resources."""
    yield run_python("tensorboard starts", "import tensorboard.main",
                     "look at a run with: tensorboard --logdir RUN/events", "it does not import",
                     f"{_install('tensorboard')} 'setuptools<81'")


def check_accelerators() -> Findings:
    """Checks that TensorFlow sees the accelerators, jaxlib reads its programs, and JAX has a client of GPUs.

    In new processes: a wrong libtpu aborts them.
    """
    host.skip_tpu_metadata_query()
    flavour = tensorflow_distribution()
    seen = run_python("accelerators", _DEVICES, "TensorFlow imports and sees ", "TensorFlow does not import",
                      "what is said above first; if nothing is, "
                      f"{environment.pip()} install --no-deps --force-reinstall -r {requirements_file()}")
    if not seen.cure and flavour == "tensorflow-tpu" and host.has_tpu() and "TPU" not in seen.found:
        seen = Finding("accelerators", "a TPU chip is attached and TensorFlow does not see it", "end the process that "
                       "holds the TPU (only one can), or check that libtpu is the version above")
    yield seen
    yield run_python("pjrt", _LOWERING, f"{_pair()} go together",
                     f"{_pair()} do not go together, so --backend=pjrt fails",
                     _install(flavour, "jax", "jaxlib"))._replace(is_warning=True)
    if host.gpus():
        plugin, wanted = environment.cuda_plugin() or "jax-cuda12-plugin", environment.installed_version("jax")
        version = environment.installed_version(plugin)
        cure = f"{environment.pip()} install 'jax[{plugin.split('-')[1]}]=={wanted}'"
        yield Finding("GPU", f"--backend=pjrt needs {plugin} {wanted}, installed is {version or 'none'}",
                      "" if version == wanted else cure, is_warning=version is None)


def check_tpu() -> Findings:
    """Checks that the chips are free, a slice's hosts know each other, and JAX starts."""
    files = host.tpu_files()
    if not files or tensorflow_distribution() == "tensorflow-tpu":
        return
    is_alone = False
    try:
        addresses, index = cluster.members()
        is_alone = len(addresses) == 1
        if not is_alone and index == 0:
            cluster.listening_address(addresses[0])
        yield Finding("TPU hosts", "this one alone" if is_alone else
                      f"{index} of {len(addresses)}, which meet at {addresses[0]}")
    except Refusal as error:
        yield Finding("TPU hosts", str(error), "docs/cloud_tpu.md, section 5")
    # Only one process of a host can open the chips. Other users' processes cannot be inspected.
    holders = {}
    for link in map(pathlib.Path, glob.glob("/proc/[0-9]*/fd/*")):
        with contextlib.suppress(OSError):  # the process has ended
            if os.readlink(link) in files:
                holders[link.parts[2]] = (link.parents[1] / "comm").read_text().strip()
    closed = [file for file in (*files, _LOCK) if os.path.exists(file) and not os.access(file, os.R_OK | os.W_OK)]
    unseen = f"any process of another user that has the chips (sudo lsof {files[0]})"
    if closed:
        yield Finding("TPU chips", f"this user cannot read and write {', '.join(closed)}",
                      f"end {unseen}, then sudo rm -f {_LOCK} && sudo chmod a+rw {' '.join(files)}")
    elif holders:
        yield Finding("TPU chips", "they belong to " + ", ".join(
            f"process {number} ({name})" for number, name in holders.items()), f"kill {' '.join(holders)}")
    elif is_alone:
        yield run_python("TPU chips", _CHIPS, "JAX has ", "JAX cannot use them",
                         f"end {unseen}; else {_install('jax', 'jaxlib', 'libtpu')}")
    else:  # the chips of a slice start on all hosts at once
        yield Finding("TPU chips", f"{len(files)}; to try them, train a few steps on all hosts")


def check_folders(model_dir: str | None = None) -> Findings:
    """Checks the current folder, the cache folder, TFDS_DATA_DIR and `model_dir`."""
    for check, folder in (("current folder", pathlib.Path.cwd()), ("cache folder", environment.cache_folder())):
        existing = next(filter(pathlib.Path.is_dir, (folder, *folder.parents)))
        free, is_writable = shutil.disk_usage(existing).free / 1e9, os.access(existing, os.W_OK)
        yield Finding(check, f"{folder} is {'' if is_writable else 'not '}writable, {free:.1f} GB free",
                      "" if is_writable and free >= 5 else "choose one that you own, with room for several checkpoints",
                      is_warning=is_writable and free >= 0.5)
    if data := os.environ.get("TFDS_DATA_DIR"):
        yield run_python("TFDS_DATA_DIR", _LISTING, f"{data} can be read, entries: ", f"{data} cannot be read",
                         "name a folder or bucket that this machine may read: TFDS_DATA_DIR=gs://BUCKET/FOLDER",
                         DATA_TIMEOUT)
    if model_dir:
        yield run_python("MODEL_DIR", _WRITING.format(model_dir),
                         f"a file can be written, read and removed in {model_dir}",
                         f"{model_dir} cannot be written and read", "name a folder or a bucket that this machine may "
                         "read and write: --model_dir gs://BUCKET/FOLDER", DATA_TIMEOUT)


def run_python(check: str, code: str, found: str, fault: str, cure: str, timeout: float = IMPORT_TIMEOUT) -> Finding:
    """Runs code in a new process. Returns `found` with its output, or `fault` with the error's last line."""
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout,
                                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})
    except subprocess.TimeoutExpired:
        return Finding(check, f"{fault}: no answer within {timeout} seconds", cure)
    if not result.returncode:
        return Finding(check, found + result.stdout.strip())
    error = result.stderr.strip() or f"ended with status {result.returncode}"
    return Finding(check, f"{fault}: {error.splitlines()[-1]}", cure)


def _install(*names):
    known_good = environment.KNOWN_GOOD[tensorflow_distribution()]
    return f"{environment.pip()} install --no-deps {' '.join(f'{name}=={known_good[name]}' for name in names)}"


def _pair():
    names = (tensorflow_distribution(), "jaxlib")
    return " and ".join(f"{name} {environment.installed_version(name)}" for name in names)


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
    wanted, plugin = environment.installed_version("jaxlib"), environment.cuda_plugin() or "jax-cuda12-plugin"
    version, assembler = environment.installed_version(plugin), _ASSEMBLERS["13" in plugin]
    if version != wanted:
        raise Refusal(f"The compiler for NVIDIA's GPUs needs {plugin} {wanted}, but installed is {version or 'none'}; "
                      f"run: {environment.pip()} install {plugin}=={wanted} {assembler}")
    if not shutil.which("ptxas") and not any(map(environment.installed_version, _ASSEMBLERS)):
        raise Refusal("The compiler for NVIDIA's GPUs needs ptxas of CUDA, which is not installed; run: "
                      f"{environment.pip()} install {assembler}")


def check_tpu_compiler() -> None:
    """Refuses a machine without a TPU compiler that fits jaxlib."""
    wanted, version = environment.KNOWN_GOOD["tensorflow"]["libtpu"], environment.installed_version("libtpu")
    if environment.installed_version("tensorflow-tpu"):
        raise Refusal("The TPU compiler for machines without a TPU does not go with tensorflow-tpu; run this where "
                      "tensorflow is installed (docs/install.md).")
    if not environment.goes_with(version or "", wanted):
        raise Refusal(f"The TPU compiler that goes with jaxlib is libtpu {wanted}, but installed is "
                      f"{version or 'none'}; run: {environment.pip()} install --no-deps libtpu=={wanted}")
