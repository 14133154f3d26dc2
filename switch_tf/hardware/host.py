"""Memory and accelerators of this machine, found with the standard library alone."""

import glob
import itertools
import os
import pathlib

from switch_tf import environment


def memory(entry: str) -> int:
    """Returns an entry of Linux's memory statistics in bytes, such as "MemTotal" or "MemAvailable"."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{entry}:"))


# Files of TPU chips: through Google's driver, or through VFIO, through which other devices may be passed on as well.
_ACCELERATORS, _VFIO = "/dev/accel[0-9]*", "/dev/vfio/[0-9]*"
_PCI_DEVICES = "/sys/bus/pci/devices/*"
_GOOGLE = "0x1ae0"
_DISK, _NETWORK = "0x01", "0x02"  # classes of Google's other devices


def tpu_files() -> list[str]:
    """Returns the device files of the TPU chips attached to this machine."""
    if files := sorted(glob.glob(_ACCELERATORS)):
        return files
    files = sorted(glob.glob(_VFIO))
    return files if files and any(map(_is_tpu, map(pathlib.Path, glob.glob(_PCI_DEVICES)))) else []


def _is_tpu(device):
    return ((device / "vendor").read_text().strip() == _GOOGLE
            and (device / "class").read_text().strip()[:4] not in (_DISK, _NETWORK))


def has_tpu() -> bool:
    """Returns whether a TPU chip is attached to this machine."""
    return bool(tpu_files())


def gpus() -> list[str]:
    """Returns the names of CUDA_VISIBLE_DEVICES, or the number of each GPU if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return list(itertools.takewhile(lambda name: not name.startswith("-"), names))  # as CUDA reads it
    numbers = (file.removeprefix("/dev/nvidia") for file in glob.glob("/dev/nvidia[0-9]*"))
    return sorted(filter(str.isdecimal, numbers), key=int)


def has_gpu_of_jax() -> bool:
    """Returns whether this machine has GPUs and JAX's client for them, which a run uses if it names no back end."""
    return bool(gpus()) and environment.cuda_plugin() is not None


def skip_tpu_metadata_query() -> None:
    """Keeps libtpu from querying the cloud's metadata server on a machine without a TPU, which takes minutes."""
    if not has_tpu():
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
