"""Imports TensorFlow without the lines its libraries write to standard error, which no setting silences."""

import os
import sys
import tempfile


def import_tensorflow() -> None:
    """Imports TensorFlow; what it writes meanwhile is shown only if the import fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            import tensorflow
            tensorflow.config.list_physical_devices()  # says that there is no GPU, too
        except BaseException:
            written.seek(0)
            os.write(original, written.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)
