"""Imports TensorFlow without the lines its libraries write to standard error, which no setting silences."""

import importlib.util
import os
import sys
import warnings

from etils import epy

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
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.formatwarning = _OneLine()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Quietly)]
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _Quietly(num_cpu_devices, prepares_devices))


def _prepare(tensorflow, num_cpu_devices):
    tensorflow.config.list_physical_devices()  # writes that there is no GPU
    if num_cpu_devices is not None:
        devices.split_cpu(num_cpu_devices)


class _Quietly:
    """Finds TensorFlow as Python does; the import prints one line, and the devices are ready before any use."""

    def __init__(self, num_cpu_devices, prepares_devices):
        self._num_cpu_devices, self._prepares_devices = num_cpu_devices, prepares_devices

    def find_spec(self, name, path=None, target=None):
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # a caller may only look whether it is there
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_quietly(module):
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                print("Importing TensorFlow ...", file=sys.stderr, flush=True)
                with held_back():
                    execute(module)
                    if self._prepares_devices:
                        _prepare(module, self._num_cpu_devices)

            spec.loader.exec_module = execute_quietly
        return spec


class _OneLine:
    """Formats a warning as one sentence, without the source of a library's line, and each sentence once."""

    def __init__(self):
        self._shown = set()

    def __call__(self, message, category, filename, lineno, line=None):
        text = " ".join(str(message).split())
        if text in self._shown:
            return ""
        self._shown.add(text)
        return f"Warning: {text}\n"
