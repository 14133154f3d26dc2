"""The weights of a checkpoint, read one at a time without a model."""

import contextlib
import pathlib

import numpy as np
import tensorflow as tf

from switch_tf.checkpoints import bundles, folders, index_files
from switch_tf.checkpoints.folders import BrokenCheckpoint
from switch_tf.partitioning.variables import Unfolding, slice_text
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places


class StoredWeights:
    """Opens the weights of a checkpoint.

    Args:
        checkpoint: Path of the checkpoint folder.

    Raises:
        BrokenCheckpoint: Files are missing or damaged.
        Refusal: The run of the checkpoint has removed it.
    """

    def __init__(self, checkpoint: pathlib.Path):
        self._checkpoint = checkpoint
        with self._refusing():
            self._variables = folders.describe(checkpoint)["variables"]
            index_files.check(places.at(checkpoint) / "state.index")
            self._literal = places.Literal(checkpoint / "state")  # for as long as the reader
            self._reader = tf.train.load_checkpoint(str(self._literal))
            self._dtypes = self._reader.get_variable_to_dtype_map()

    def read(self, path: str, rows: slice = slice(None)) -> np.ndarray:
        """Returns the values of a variable in its stored dtype, or rows of it, by a path of `tensors.state_variables`.

        Rows of an unfolded variable, or of one that was written in one piece, take the memory of all of it.
        """
        saved = self._variables.get(path)
        if saved is None:
            raise BrokenCheckpoint(f"{self._checkpoint} has no {path}, which a model of its configuration has.")
        unfolding = Unfolding(tuple(saved["shape"]), tuple(map(tuple, saved.get("unfolded", ()))))
        with self._refusing():
            if unfolding.first:
                return unfolding.fold(self._reader.get_tensor(bundles.key_of(path)), np)[rows]
            dtype = self._dtypes.get(bundles.key_of(path))
            is_float = dtype is not None and dtype.is_floating  # if not, TensorFlow says what is stored instead
            if is_float and (not saved["shape"] or rows.indices(saved["shape"][0]) == (0, saved["shape"][0], 1)):
                return self._reader.get_tensor(bundles.key_of(path))  # opens no file anew
            text = slice_text(unfolding.shape, (rows, *(slice(None) for _ in unfolding.shape[1:])))
            (values,) = bundles.read(self._checkpoint / "state", [(path, dtype if is_float else tf.float32, text)])
            return values

    @contextlib.contextmanager
    def _refusing(self):
        try:
            yield
        except (tf.errors.OpError, ValueError) as error:
            if places.is_failure(error, self._checkpoint):
                with places.os_errors(self._checkpoint):
                    raise
            if not folders.is_complete(self._checkpoint):
                raise Refusal(f"{self._checkpoint} was removed by its run before it was read; keep more checkpoints "
                              "with Run.keep_checkpoints, or wait for the end of the run.") from error
            if isinstance(error, Refusal):
                raise
            raise BrokenCheckpoint(f"{self._checkpoint} is damaged ({first_line(error)}).") from error
