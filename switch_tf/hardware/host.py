"""Memory and accelerators of this machine, found with the standard library alone."""

import glob
import itertools
import os


def memory(entry: str) -> int:
    """Returns an entry of Linux's memory statistics in bytes, such as "MemTotal" or "MemAvailable"."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{entry}:"))


def has_tpu() -> bool:
    """Returns whether a TPU chip is attached to this machine."""
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def gpus() -> list[str]:
    """Returns the names of CUDA_VISIBLE_DEVICES, or the number of each GPU if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return list(itertools.takewhile(lambda name: not name.startswith("-"), names))  # as CUDA reads it
    numbers = (file.removeprefix("/dev/nvidia") for file in glob.glob("/dev/nvidia[0-9]*"))
    return sorted(filter(str.isdecimal, numbers), key=int)


def skip_tpu_metadata_query() -> None:
    """Keeps libtpu from querying the cloud's metadata server on a machine without a TPU, which takes minutes."""
    if not has_tpu():
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
