"""Imports TensorFlow without the lines its libraries write to standard error, which no setting silences."""

import os
import sys
import warnings

from etils import epy

from switch_tf.installation.keras_registration import ImportHook
from switch_tf.storage.outputs import held_back

with epy.lazy_imports():  # imports Keras
    from switch_tf.hardware import devices


def import_tensorflow(num_cpu_devices: int | None = None) -> None:
    """Imports TensorFlow; what it writes meanwhile is shown only if the import fails.

    Args:
        num_cpu_devices: Number of devices to make of the CPU, None to leave it as it is.
    """
    expect_tensorflow(num_cpu_devices)
    import tensorflow  # outside of the scope below, which would withhold the line that announces it
    with held_back():
        _prepare(tensorflow, num_cpu_devices)


def expect_tensorflow(num_cpu_devices: int | None = None, prepares_devices: bool = True) -> None:
    """Has the next import of TensorFlow, by whatever module, do what `import_tensorflow` does.

    Args:
        num_cpu_devices: See `import_tensorflow`.
        prepares_devices: Whether the import also looks for devices, which can take those of a TPU.
    """
    def execute_quietly(module, execute):
        print("Importing TensorFlow ...", file=sys.stderr, flush=True)
        with held_back():
            execute(module)
            if prepares_devices:
                _prepare(module, num_cpu_devices)

    def format_once(message, category, filename, lineno, line=None):
        """Formats a warning as one sentence, without the source of a library's line, and each sentence once."""
        text = f"Warning: {' '.join(str(message).split())}\n"
        is_new = text not in shown
        shown.add(text)
        return text if is_new else ""

    shown: set[str] = set()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.formatwarning = format_once
    sys.meta_path[:] = [finder for finder in sys.meta_path
                        if not (isinstance(finder, ImportHook) and finder.name == "tensorflow")]
    if "tensorflow" not in sys.modules:
        ImportHook("tensorflow", execute_quietly)


def _prepare(tensorflow, num_cpu_devices):
    tensorflow.config.list_physical_devices()  # writes that there is no GPU
    if num_cpu_devices is not None:
        devices.split_cpu(num_cpu_devices)
