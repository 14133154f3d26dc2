"""Imports TensorFlow without the lines its libraries write to standard error, which no setting silences."""

import contextlib
import os
import sys
import tempfile
import warnings


def import_tensorflow(num_cpu_devices: int | None = None) -> None:
    """Imports TensorFlow; what it writes meanwhile is shown only if the import fails.

    Args:
        num_cpu_devices: how many devices to make of the CPU, None to leave it as it is.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "tensorflow" not in sys.modules:
        print("Importing TensorFlow ...", file=sys.stderr, flush=True)
    warnings.formatwarning = _OneLine()
    with held_back():
        import tensorflow
        tensorflow.config.list_physical_devices()  # says that there is no GPU, too
        if num_cpu_devices is not None:
            from switch_tf.hardware import devices
            devices.split_cpu(num_cpu_devices)


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


@contextlib.contextmanager
def held_back():
    """Within this scope what is written to standard error is kept, and shown only if the scope fails.

    A ValueError is not a failure: it says itself what a user did wrong.
    """
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except ValueError:
            raise
        except BaseException:
            written.seek(0)
            os.write(original, written.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)
