"""What must be true of the Python environment, and which versions are known to work together.

Read by `import switch_tf` (the one check that cannot wait) and by `switch-tf doctor` (everything else). Imports only
the standard library.
"""

import glob
import os
import pathlib
import shlex
import shutil
import sys
from importlib import metadata

# Distribution -> (the version to put back, the nightly build that writes the same files). t5 requires the nightlies.
NIGHTLIES = {
    "seqio": ("0.0.20", "seqio-nightly"),
    "tensorflow-datasets": ("4.9.10", "tfds-nightly"),
}

# Downstream tasks take their preprocessors and metrics from it. Its own requirements would overwrite seqio and
# tensorflow-datasets, so no distribution of ours can require it.
T5 = "t5==0.9.4"

# The pass of DTensor after which a program says what it sends between devices.
DTENSOR_STAGE = "DTensorSPMDExpansion"

# What the tests run with, by the distribution that brings TensorFlow: anywhere, and on a Cloud TPU VM.
KNOWN_GOOD = {
    "tensorflow": {
        "tensorflow": "2.21.0",
        "tensorflow-text": "2.21.1",
        "keras": "3.15.1",
        "tensorboard": "2.21.0",
        "libtpu": "0.0.42.1",
    },
    "tensorflow-tpu": {
        "tensorflow-tpu": "2.20.0",
        "tensorflow-text": "2.20.1",
        "keras": "3.15.1",
        "tensorboard": "2.20.0",
        "libtpu": "0.0.21",
    },
}


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, None if it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def goes_with(libtpu: str, known_good: str) -> bool:
    """Whether a version of libtpu is the known good one but for its last number, which counts builds: 0.0.42.1."""
    return libtpu.split(".")[:3] == known_good.split(".")[:3]


def check_single_distributions() -> None:
    """Refuses an environment in which a nightly build lies over seqio or tensorflow-datasets.

    Raises:
        ImportError: one sentence that ends with the command that cures it.
    """
    found = {name: nightly for name, (_, nightly) in NIGHTLIES.items() if installed_version(nightly)}
    if found:
        nightlies = list(found.values())
        wanted = " ".join(f"{name}=={NIGHTLIES[name][0]}" for name in found)
        raise ImportError(
            f"switch_tf needs one seqio and one tensorflow-datasets, but {' and '.join(nightlies)} "
            f"{'lie' if len(nightlies) > 1 else 'lies'} over them (t5 without --no-deps brings them); "
            f"run: {pip()} uninstall -y {' '.join(nightlies)} && {pip()} install --no-deps --force-reinstall {wanted}"
        )


def pip() -> str:
    """Returns what to type for the pip of this interpreter: `pip` where that is the one on the path."""
    found = shutil.which("pip")
    if found and pathlib.Path(found).parent == pathlib.Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def install_t5() -> str:
    """Returns what to type for the tasks that use t5."""
    return f"{pip()} install --no-deps {T5}"


def cache_folder() -> pathlib.Path:
    """Returns where switch_tf keeps what it can make again: prepared corpora, tokenised tasks."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "switch_tf"


def memory(entry: str) -> int:
    """Returns bytes from Linux's statistics: "MemTotal", or "MemAvailable", what programs can take without swapping."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{entry}:"))


def has_tpu() -> bool:
    """Returns whether a TPU chip is attached to this machine."""
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def gpus() -> list[str]:
    """Returns what CUDA_VISIBLE_DEVICES may hold: what it does hold or, where it is not set, the number of each GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    numbers = (file.removeprefix("/dev/nvidia") for file in glob.glob("/dev/nvidia[0-9]*"))
    return sorted(filter(str.isdecimal, numbers), key=int)


def dump_partitioned_programs(folder) -> None:
    """Has TensorFlow write every program that DTensor cuts into a folder; to be called before it is imported."""
    os.environ.update(TF_CPP_VMODULE="dtensor_mlir_passes=1", TF_DUMP_GRAPH_PREFIX=str(folder),
                      MLIR_BRIDGE_LOG_PASS_FILTER=DTENSOR_STAGE)


def skip_tpu_metadata_query() -> None:
    """Keeps libtpu from asking the cloud's metadata server where there is no TPU: it would retry for minutes."""
    if not has_tpu():
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
