"""Names variables, and restores checkpoints under any layout and number of processes."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from switch_tf.checkpoints import bundles, folders
from switch_tf.checkpoints.folders import BrokenCheckpoint
from switch_tf.data.batches import Batches
from switch_tf.partitioning.variables import PjrtVariable, Unfolding, assign, slice_text, stored, unfolding_of
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places

Variables = dict[str, keras.Variable]
_PORTION = 2**28  # bytes of whole variables to read at a time
# Errors of TensorFlow (AssertionError for a missing variable), and of a checkpoint that its run has removed.
_DAMAGES = (tf.errors.OpError, AssertionError, FileNotFoundError)
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def state_variables(model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None) -> Variables:
    """Returns path -> Keras variable of the model's weights and, if given, the optimizer."""
    variables = {f"{folders.MODEL}{variable.path.partition('/')[2]}": variable for variable in model.variables}
    return variables if optimizer is None else variables | optimizer_variables(optimizer)


def optimizer_variables(optimizer: keras.optimizers.Optimizer) -> Variables:
    """Returns path -> Keras variable of an optimizer."""
    # Without Keras's number of the optimizer within a process, as in "adam_1".
    return {"optimizer/" + re.sub(r"^([^/]*)_\d+(?=/|$)", r"\1", variable.path): variable
            for variable in optimizer.variables if not _is_learning_rate(variable.path)}


def _is_learning_rate(path):
    """A constant learning rate is a Keras variable that the configuration decides."""
    return path.endswith("/learning_rate")


def restore(checkpoint: Any, variables: Variables, batches: Batches | None = None) -> dict:
    """Restores variables and, if given, the data position from a checkpoint.

    Args:
        variables: See `state_variables`.

    Returns: The description of the checkpoint, see `folders.describe`.

    Raises:
        BrokenCheckpoint, Refusal: See `check_readable`.
    """
    description = check_readable(checkpoint, variables)
    _read(checkpoint, description["variables"], variables)
    try:
        if batches is not None:
            batches.restore(checkpoint)
    except (tf.errors.OpError, AssertionError) as error:
        places.raise_failure(error, checkpoint)
        raise BrokenCheckpoint(f"The position of {checkpoint} in the data is damaged, or is one in other data, "
                               "or of a version of switch_tf that read them in another order; start anew in another "
                               f"folder, from its weights if they are wanted ({first_line(error)}).") from error
    return description


def check_readable(checkpoint: Any, variables: Mapping[str, Any]) -> dict:
    """Returns the description of a checkpoint if it has these variables. Uses only their shapes.

    Raises:
        BrokenCheckpoint: Files are missing or damaged. Values are checked when read.
        Refusal: The checkpoint is of another model or optimizer.
    """
    description = folders.describe(checkpoint)
    _check_same(checkpoint, description["variables"], variables)
    folders.check_positions(checkpoint, description)
    _check_indices(checkpoint, description)
    return description


def _check_indices(checkpoint, description):
    for name in sorted({"state.index", *description["files"]}):
        if name.endswith(".index"):
            try:
                bundles.check(checkpoint / name)
            except (ValueError, FileNotFoundError) as error:
                raise BrokenCheckpoint(f"{checkpoint} is damaged: {name} cannot be read ({error}).") from error


class InitialWeights:
    """Weights of a checkpoint that a new run starts from. Classes for other formats have the same methods.

    Args:
        source: Run folder or checkpoint.

    Attributes:
        description: See `folders.describe`.
    """

    def __init__(self, source: folders.Folder):
        self.path = folders.resolve(source)
        self.description = folders.describe(self.path)

    def fill(self, variables: Variables) -> None:
        """Reads variables that the checkpoint has with the same shape.

        Raises:
            BrokenCheckpoint: Files are missing or damaged.
        """
        _check_indices(self.path, self.description)
        _read(self.path, self.description["variables"], variables)


def start(initial: Any, variables: Variables, is_matching: bool = False) -> list[str]:
    """Restores variables from initial weights; returns the paths that were not restored.

    Args:
        initial: InitialWeights, or `conversion.formats.Opened`.
        is_matching: Whether to read only weights with the same path and shape, also of another model.

    Raises:
        BrokenCheckpoint: Files are missing or damaged.
    """
    saved, matching = initial.description["variables"], variables
    if is_matching:
        matching = {path: variable for path, variable in variables.items()
                    if path in saved and saved[path]["shape"] == list(variable.shape)}
        if not matching:
            raise Refusal(f"{initial.path} has no variable with the name and the shape of one of this model; use "
                          "another INITIAL_CHECKPOINT, or None.")
    else:
        _check_same(initial.path, saved, variables)
    initial.fill(matching)
    return [path for path in variables if path not in matching]


@contextlib.contextmanager
def _reading(checkpoint, damages=_DAMAGES):
    try:
        yield
    except damages as error:
        places.raise_failure(error, checkpoint)
        if not folders.is_complete(checkpoint):
            raise Refusal(f"{checkpoint} was removed by its run before it was read; keep more checkpoints with "
                          "Run.keep_checkpoints, or wait for the end of the run.") from error
        if isinstance(error, Refusal):
            raise
        raise BrokenCheckpoint(f"{checkpoint} is damaged ({first_line(error)}).") from error


def _stored_as(saved, dtype):
    """Converts only float dtypes, because a description may come from a stranger."""
    return (Unfolding(tuple(saved["shape"]), tuple(map(tuple, saved.get("unfolded", ())))),
            saved["dtype"] if saved["dtype"] in _FLOATS else dtype)


def _read(checkpoint, saved, variables):
    """Reads variables in pieces if stored in the same form and dtype, else one by one through the host."""
    prefix, held, waiting, num_bytes = checkpoint / "state", {}, {}, 0
    with _reading(checkpoint):
        for path, variable in variables.items():
            (unfolding, dtype), target = _stored_as(saved[path], variable.dtype), stored(variable)
            if unfolding != unfolding_of(variable) or dtype != variable.dtype:
                (values,) = bundles.read(prefix, [(path, dtype, "")])
                if values.shape != tuple(unfolding.stored_shape):
                    raise BrokenCheckpoint(f"{checkpoint} is damaged: {path} has shape {values.shape}.")
                assign(variable, unfolding.fold(values, np))
            elif isinstance(target, PjrtVariable):
                waiting[path] = target
                num_bytes += target.array.nbytes
                if num_bytes > _PORTION:
                    _load(prefix, waiting)
                    waiting, num_bytes = {}, 0
            else:
                held[path] = target
        _load(prefix, waiting)
        literal = places.Literal(prefix)
        with _reading(checkpoint, (ValueError,)):  # a variable of another shape
            status = tf.train.Checkpoint(state=held).read(str(literal))
        status.assert_existing_objects_matched()
        status.expect_partial()  # no warning about unread optimizer slots


def _load(prefix, variables):
    """Reads slices in one call, because each call takes six requests to a bucket."""
    slices = [(path, variable.dtype, text) for path, variable in variables.items() for text in variable.slices()]
    if slices:
        values = dict(zip(((path, text) for path, _, text in slices), bundles.read(prefix, slices), strict=True))
        for path, variable in variables.items():
            shape = variable.array.shape
            variable.load(lambda index, path=path, shape=shape: values[path, slice_text(shape, index)])


def _check_same(checkpoint, saved, variables):
    way_out = "Start it with the configuration it was saved with (operative_config.gin), or use another MODEL_DIR."
    parts = {path.partition("/")[0] for path in variables}  # "model", or also "optimizer"
    for path in saved:
        if path not in variables and path.partition("/")[0] in parts and not _is_learning_rate(path):
            raise Refusal(f"{checkpoint} has {path}, which this model or optimizer lacks. {way_out}")
    for path, variable in variables.items():
        if path not in saved:
            raise Refusal(f"{checkpoint} has no {path}, so it is of another model or optimizer. {way_out}")
        if saved[path]["shape"] != list(variable.shape):
            raise Refusal(f"{path} has shape {saved[path]['shape']} in {checkpoint} but {list(variable.shape)} in "
                          f"this model. {way_out}")


class StoredWeights:
    """The weights of a checkpoint, read one at a time without a model.

    Raises:
        BrokenCheckpoint: Files are missing or damaged.
        Refusal: The run has removed the checkpoint.
    """

    def __init__(self, checkpoint: Any):
        self._checkpoint = checkpoint
        with _reading(checkpoint, (*_DAMAGES, ValueError)):
            self._variables = folders.describe(checkpoint)["variables"]
            bundles.check(checkpoint / "state.index")
            self._literal = places.Literal(checkpoint / "state")  # kept as long as the reader
            self._reader = tf.train.load_checkpoint(str(self._literal))

    def read(self, path: str, rows: slice = slice(None)) -> np.ndarray:
        """Returns a variable, or rows of it, in its stored dtype, by a path of `state_variables`.

        Rows of an unfolded variable, or one written in one piece, take the whole variable's memory.
        """
        saved = self._variables.get(path)
        if saved is None:
            raise BrokenCheckpoint(f"{self._checkpoint} has no {path}, which a model of its configuration has.")
        unfolding, dtype = _stored_as(saved, "float32")
        index = [rows, *[slice(None)] * len(unfolding.shape)][:len(unfolding.shape)]
        text = "" if unfolding.first else slice_text(unfolding.shape, index)
        with _reading(self._checkpoint, (*_DAMAGES, ValueError)):
            # Opening files in a bucket takes six requests.
            values = None if text else self._reader.get_tensor(bundles.key_of(path))
            if values is None or values.dtype.name != dtype:
                (values,) = bundles.read(self._checkpoint / "state", [(path, dtype, text)])
            return unfolding.fold(values, np)[rows] if unfolding.first else values
