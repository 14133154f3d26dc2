"""Memory and accelerators of this machine, and a Google Cloud VM's metadata. Needs only the standard library."""

import functools
import glob
import itertools
import os
import pathlib

from switch_tf import environment

# From Google's driver or VFIO. The latter also serves other devices.
_ACCELERATORS, _VFIO = "/dev/accel[0-9]*", "/dev/vfio/[0-9]*"
_PCI_DEVICES = "/sys/bus/pci/devices/*"
_GOOGLE = "0x1ae0"
_DISK, _NETWORK = "0x01", "0x02"  # classes of other devices

# metadata.google.internal: looking up an unknown name may take long.
_SERVER = "169.254.169.254"
_TIMEOUT = 1  # seconds; the server is on the same host
_TRIES = 3


def memory(entry: str) -> int:
    """Returns an entry of /proc/meminfo in bytes."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{entry}:"))


def tpu_files() -> list[str]:
    """Returns the device files of this machine's TPU chips."""
    if files := sorted(glob.glob(_ACCELERATORS)):
        return files
    files = sorted(glob.glob(_VFIO))
    is_tpu = files and any((device / "vendor").read_text().strip() == _GOOGLE
                           and (device / "class").read_text().strip()[:4] not in (_DISK, _NETWORK)
                           for device in map(pathlib.Path, glob.glob(_PCI_DEVICES)))
    return files if is_tpu else []


def has_tpu() -> bool:
    """Returns whether this machine has a TPU."""
    return bool(tpu_files())


def gpus() -> list[str]:
    """Returns the names in CUDA_VISIBLE_DEVICES, or all GPUs' numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return list(itertools.takewhile(lambda name: not name.startswith("-"), names))  # as CUDA reads it
    numbers = (file.removeprefix("/dev/nvidia") for file in glob.glob("/dev/nvidia[0-9]*"))
    return sorted(filter(str.isdecimal, numbers), key=int)


def has_gpu_of_jax() -> bool:
    """Returns whether this machine has GPUs and JAX's client for them."""
    return bool(gpus()) and environment.cuda_plugin() is not None


def skip_tpu_metadata_query() -> None:
    """Keeps libtpu from querying the metadata server for minutes without a TPU."""
    if not has_tpu():
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def accelerator_type() -> str:
    """Returns the TPU's type as gcloud spells it, "v5litepod-8", or ""."""
    # GKE sets the variable. TPU VMs have it only on the metadata server.
    return os.environ.get("TPU_ACCELERATOR_TYPE") or (vm_attribute("accelerator-type") if has_tpu() else "")


@functools.cache
def vm_attribute(name: str) -> str:
    """Returns an attribute of this VM, or ""."""
    return vm_entry(f"attributes/{name}")


def vm_entry(name: str) -> str:
    """Returns an entry of this VM's metadata, such as "preempted", or ""."""
    import http.client  # lazy: 37 ms
    import urllib.error
    import urllib.request

    server = os.environ.get("GCE_METADATA_HOST", _SERVER)
    request = urllib.request.Request(f"http://{server}/computeMetadata/v1/instance/{name}",
                                     headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(_TRIES):
        try:
            with opener.open(request, timeout=_TIMEOUT) as answer:
                return answer.read().decode().strip()
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Retries only a busy server. Otherwise the entry or the server is missing.
            is_busy = (error.code >= 500 if isinstance(error, urllib.error.HTTPError) else
                       isinstance(getattr(error, "reason", error), TimeoutError))
            if not is_busy:
                break
    return ""
