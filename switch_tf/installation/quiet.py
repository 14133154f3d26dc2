"""Imports TensorFlow without its libraries' lines on standard error. No setting silences them."""

import os
import sys
import warnings

from etils import epy

from switch_tf.installation.keras_registration import ImportHook
from switch_tf.storage.outputs import held_back

with epy.lazy_imports():  # imports Keras
    from switch_tf.hardware import devices


def import_tensorflow(num_cpu_devices: int | None = None) -> None:
    """Imports TensorFlow. Its output is shown only if the import fails.

    Args:
        num_cpu_devices: Number of devices to make of the CPU, unless None.
    """
    expect_tensorflow(num_cpu_devices)
    import tensorflow  # not in the scope below: it would withhold "Importing TensorFlow"
    with held_back():
        _prepare(tensorflow, num_cpu_devices)


def expect_tensorflow(num_cpu_devices: int | None = None, prepares_devices: bool = True) -> None:
    """Makes the next import of TensorFlow, by any module, do what `import_tensorflow` does.

    Args:
        prepares_devices: Whether it also looks for devices. This can take a TPU's.
    """
    def execute_quietly(module, execute):
        print("Importing TensorFlow ...", file=sys.stderr, flush=True)
        with held_back():
            execute(module)
            if prepares_devices:
                _prepare(module, num_cpu_devices)

    def format_once(message, category, filename, lineno, line=None):
        """Formats a warning as one sentence, and only once."""
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
    tensorflow.config.list_physical_devices()  # prints that there is no GPU
    if num_cpu_devices is not None:
        devices.split_cpu(num_cpu_devices)
