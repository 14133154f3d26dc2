"""Requirements of the Python environment, and versions known to work together.

`import switch_tf` runs only the urgent check. Imports only the standard library.
"""

import json
import os
import pathlib
import shlex
import shutil
import sys
import time
from importlib import metadata

# Distribution -> (version to reinstall, nightly build that overwrites it). t5 requires the nightlies.
NIGHTLIES = {
    "seqio": ("0.0.20", "seqio-nightly"),
    "tensorflow-datasets": ("4.9.10", "tfds-nightly"),
}

# Downstream tasks use it. switch_tf cannot require it: its requirements would overwrite seqio and tensorflow-datasets.
T5 = "t5==0.9.4"

# Distribution -> versions of TensorFlow and TensorBoard (equal), tensorflow-text, libtpu. tensorflow-tpu has its own
# client of TPUs.
_TENSORFLOW = {"tensorflow": ("2.21.0", "2.21.1", "0.0.42.1"), "tensorflow-tpu": ("2.20.0", "2.20.1", "0.0.21")}
# Without NVIDIA's part, for JAX's client.
_TENSORFLOW["tensorflow-cpu"] = _TENSORFLOW["tensorflow"]
# Tested versions.
KNOWN_GOOD = {name: {name: version, "tensorflow-text": text, "keras": "3.15.1", "jax": "0.10.2", "jaxlib": "0.10.2",
                     "tensorboard": version, "libtpu": libtpu}
              for name, (version, text, libtpu) in _TENSORFLOW.items()}

# Variables that change a run's computation.
_PREFIXES = ("KERAS_", "TF_", "XLA_", "JAX_", "NVIDIA_TF32_OVERRIDE")
OF_USER = dict(os.environ)  # the user's variables, before any change

# JAX's clients of NVIDIA's GPUs.
_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def installed_version(distribution: str) -> str | None:
    """Returns an installed distribution's version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cuda_plugin() -> str | None:
    """Returns the installed distribution of JAX's client of NVIDIA's GPUs."""
    return next(filter(installed_version, _CUDA_PLUGINS), None)


def goes_with(libtpu: str, known_good: str) -> bool:
    """Returns whether two versions of libtpu differ at most in their build: 0.0.42.1."""
    return libtpu.split(".")[:3] == known_good.split(".")[:3]


def compute_with_tensorflow() -> None:
    """Sets Keras' back end to TensorFlow. Call it before Keras is imported."""
    os.environ["KERAS_BACKEND"] = "tensorflow"


def changed_by_variables() -> dict[str, str]:
    """Returns the user's environment variables that change what Keras, TensorFlow, XLA or JAX compute.

    Keras' settings have the name of their file, `~/.keras/keras.json`.
    """
    variables = {name: value for name, value in OF_USER.items()
                 if name.startswith(_PREFIXES) and not name.startswith(("TF_CPP_", "KERAS_HOME")) and value
                 and (name, value) != ("KERAS_BACKEND", "tensorflow")}
    file = pathlib.Path(OF_USER.get("KERAS_HOME") or pathlib.Path.home() / ".keras") / "keras.json"
    try:
        chosen = json.loads(file.read_text())
    except (OSError, ValueError):  # Keras rewrites it
        chosen = None
    chosen = chosen if isinstance(chosen, dict) else {}
    settings = {name: chosen[name] for name, usual in (("backend", "tensorflow"), ("floatx", "float32"))
                if chosen.get(name, usual) != usual}
    return variables | ({str(file): json.dumps(settings)} if settings else {})


def check_single_distributions() -> None:
    """Refuses an environment in which a nightly build overwrote seqio or tensorflow-datasets.

    Raises:
        ImportError: Ends with the command to repair it.
    """
    overwritten = {name: nightly for name, (_, nightly) in NIGHTLIES.items() if installed_version(nightly)}
    if overwritten:
        nightlies = list(overwritten.values())
        wanted = " ".join(f"{name}=={NIGHTLIES[name][0]}" for name in overwritten)
        raise ImportError(
            f"switch_tf needs one seqio and one tensorflow-datasets, but {' and '.join(nightlies)} "
            f"{'lie' if len(nightlies) > 1 else 'lies'} over them (t5 without --no-deps brings them); "
            f"run: {pip()} uninstall -y {' '.join(nightlies)} && {pip()} install --no-deps --force-reinstall {wanted}"
        )


def pip() -> str:
    """Returns the command for this interpreter's pip."""
    on_path = shutil.which("pip")
    if on_path and pathlib.Path(on_path).parent == pathlib.Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def install_t5() -> str:
    """Returns the command that installs t5."""
    return f"{pip()} install --no-deps {T5}"


def cache_folder() -> pathlib.Path:
    """Returns the folder of files that switch_tf can recreate."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "switch_tf"


def visible_processes() -> str:
    """Identifies the processes visible to this one by boot and container. Fresh machines often share host names."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def process_age() -> float:
    """Returns the seconds since this process started, to 0.01 s."""
    started = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # field 22 of proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Returns whether a visible process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True
