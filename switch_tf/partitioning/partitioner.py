"""The interface between a training step and its devices, and its implementation for one device.

A step is two functions. `compute(features)` returns `(gradients, totals, metrics, is_finite)`, and
`apply(gradients, totals)` updates the variables. `totals` is a nest of tensors. A partitioner creates the variables,
brings batches to the devices, and compiles both as one step, without update if `is_finite` is False.
"""

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from switch_tf import context
from switch_tf.hardware import devices
from switch_tf.partitioning import cluster
from switch_tf.partitioning.axes import axes_of, with_axes
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.variables import Piece, host_tensor, stored
from switch_tf.refusals import Refusal

# Feature name -> <int32>[batch, length], or with steps first for `Partitioner.place`.
Features = dict[str, Any]
FLAGS = "flags"  # a placed feature, <int32>[devices, flags]: those of each device's process
_exchanges = itertools.count()
# Phrases of a lost process in error classes with other causes: a collective, a waiting barrier, a later barrier.
_LOST_PROCESS = ("Collective ops is aborted", "tensorflow.CoordinationServiceError",
                 "Agent must be in CONNECTED state")
# Phrases of failed buckets in the same classes.
_BUCKET = ("retry attempts failed", "Error executing an HTTP request", "HTTP response code", "libcurl", "gs://")


class Partitioner:
    """One device, the first of its kind. Subclasses cut the step over several.

    All processes call `pieces`, `are_finite`, `any_process`, `gather_texts` and `barrier` together.

    Attributes:
        layout: Layout with a complete mesh.
        num_parts: Parts of the batch with separate programs: the replicas of tf.distribute.
        has_fixed_shapes: Whether a compiled function has a program for each shape of its features, is ready after
            `trace`, and reads variables that TensorFlow's own functions cannot read.
        is_asynchronous: Whether a call of a compiled function returns before it ends.
        has_failed: With `is_asynchronous`, 1 after a step that was not finite, and then no step makes an update.
    """

    has_fixed_shapes = is_asynchronous = False
    num_processes = 1
    process_index = 0
    num_parts = 1
    has_failed: keras.Variable | None = None
    _create: Callable | None = None  # TensorFlow's variable creator

    def __init__(self, layout: Layout | None = None):
        if keras.backend.backend() != "tensorflow":
            raise Refusal(f"Models are trained, evaluated and exported with TensorFlow, and Keras computes with "
                          f"{keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow before Keras is imported.")
        if keras.config.floatx() != "float32":
            raise Refusal(f"Keras' floatx must be 'float32', not {keras.config.floatx()!r}; correct "
                          "~/.keras/keras.json, and choose a precision by the model's dtype (ACTIVATION_DTYPE).")
        self.layout = layout or Layout("data=1")

    @property
    def num_processors(self) -> int:
        """Number of devices, or of hosts on CPUs, for utilisation."""
        kind = devices.device_type()
        return cluster.members().num_hosts if kind == "CPU" else self.layout.num_devices

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the shared files."""
        return self.process_index == 0

    def check(self, config: Any, steps_per_call: int, use_xla: bool) -> None:
        """Raises Refusal if these devices cannot run the step or the model."""

    def creates_variables(self) -> AbstractContextManager:
        """Returns the scope in which model and optimizer create variables."""
        return tf.variable_creator_scope(self._create) if self._create else contextlib.nullcontext()

    def build(self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None,
              select: Callable[[keras.Model], None] = lambda model: None, draws_weights: bool = True) -> None:
        """Creates every variable of model and optimizer in its layout. Slots have the layout of their weights.

        Args:
            model: Unbuilt, or built within `creates_variables`.
            optimizer: Unbuilt.
            select: Freezes weights before the optimizer builds its slots.
            draws_weights: False if a checkpoint will replace all weights. They are zeros until then.
        """
        with self.creates_variables(), context.within(draws_weights=draws_weights):
            if not model.built:  # Keras builds functional models at creation
                model.build()
            select(model)
            if optimizer is not None:
                self._adopt(optimizer)
                create = optimizer.add_variable_from_reference
                object.__setattr__(  # slots get the logical axes of their weights
                    optimizer, "add_variable_from_reference", lambda reference_variable, *args, **kwargs: with_axes(
                        axes_of(reference_variable), create, reference_variable, *args, **kwargs))
                try:
                    optimizer.build(model.trainable_variables)
                finally:
                    object.__delattr__(optimizer, "add_variable_from_reference")
        for variable in [*model.variables, *(optimizer.variables if optimizer else ())]:
            if not self._is_laid_out(variable):
                raise Refusal(f"{variable.path} was created outside of the layout, so not all devices would update it "
                              "alike; create it in `build`, or use a layout of one TensorFlow device.")

    def _is_laid_out(self, variable) -> bool:
        return True

    def _adopt(self, optimizer) -> None:
        """Lays out the optimizer's step and learning rate, from its constructor."""

    def place(self, features: Features) -> Any:
        """Brings a whole batch, <int32>[steps, batch, length], to the devices."""
        return features

    def place_flags(self, flags: Sequence[bool]) -> Features:
        """Returns this process's flags as the feature `FLAGS`. A step takes their maximum over all processes.

        {} if `any_process` finds it instead.
        """
        return {}

    def flag_specs(self, count: int) -> dict[str, tf.TensorSpec]:
        """Returns the specs of `place_flags`."""
        return {}

    def keep_programs(self, folder: str) -> None:
        """Keeps compiled programs of accelerators in a folder that all processes see, unless the user chose one."""

    def rows(self, batch_size: int) -> list[tuple[int, int]]:
        """Returns the ranges of rows, first and last + 1, that `place` reads in this process."""
        return [(0, batch_size)]

    def sum_over_parts(self, tensors: Any) -> Any:
        """Sums tensors over the parts of the batch, in `compute`."""
        return tensors

    def gather_rows(self, rows: Any) -> Any:
        """Concatenates the rows of all parts, in a function of `results`."""
        return rows

    def current_part(self) -> tuple[int, Any]:
        """Returns `(count, index)` of the part that `compute` sees."""
        return 1, 0

    def step(self, compute: Callable, apply: Callable, use_xla: bool = False) -> Callable:
        """Returns one training step for `compile`: placed features, index of a step in them -> `(metrics, is_finite)`.

        Args:
            compute, apply: The two functions of a step.
            use_xla: Whether XLA compiles the update on a CPU, unlike the rest.
        """
        if use_xla and devices.device_type() == "CPU":
            apply = tf.function(apply, jit_compile=True, autograph=False)
        with self.creates_variables():
            has_failed = keras.Variable(0, trainable=False, dtype="int32", name="has_failed") if (
                self.is_asynchronous) else None
        self.has_failed = has_failed

        def one_step(features, index):
            gradients, totals, measured, is_good = compute(select_step(features, index))
            if has_failed is not None:
                is_good &= tf.convert_to_tensor(has_failed.value) == 0
                has_failed.assign(tf.where(is_good, 0, 1))

            def update():
                apply(gradients, totals)
                return True

            tf.cond(is_good, update, lambda: False)
            return measured, is_good

        return one_step

    def results(self, call: Callable) -> Callable:
        """Returns a function of one placed batch, [1, batch, length], for `compile`.

        Args:
            call: Features, [batch, length] -> a nest of tensors, equal on every device.
        """
        return lambda features: call(select_step(features, 0))

    def compile(self, function: Callable, use_xla: bool = False) -> Callable:
        """Compiles a function of `step` or `results`. On CPUs without XLA: its products are slower."""
        return tf.function(function, jit_compile=use_xla and devices.device_type() != "CPU", autograph=False)

    def trace(self, function: Any, specs: dict[str, tf.TensorSpec]) -> None:
        """Traces a compiled function ahead of its first call."""
        function.get_concrete_function(specs)

    @contextlib.contextmanager
    def profile(self, folder: pathlib.Path) -> Iterator[Callable[[int], AbstractContextManager]]:
        """Profiles the devices in this scope for TensorBoard. Yields number of a step -> its scope."""
        with tf.profiler.experimental.Profile(str(folder)):
            yield lambda number: tf.profiler.experimental.Trace("train", step_num=number, _r=1)

    def program_text(self, function: Any) -> str:
        """Returns XLA's text of a compiled function; "" if XLA did not cut it."""
        return ""

    def on_host(self, tensor: Any) -> tf.Tensor:
        """Returns a result held by every device as an eager tensor."""
        return tensor

    def pieces(self, state: dict[str, Any]) -> list[Piece]:
        """Returns copies of this process's pieces of variables for a checkpoint.

        Each number is in one piece of one process. No process holds more of a variable than it stores.

        Args:
            state: Path of a variable -> the `stored` variable.
        """
        if not self.is_chief:
            return []
        return [Piece(path, "", host_tensor(variable.numpy())) for path, variable in state.items()]

    def are_finite(self, variables: Sequence[keras.Variable]) -> list[bool]:
        """Returns whether each variable is finite."""
        values = [stored(variable) for variable in variables]
        floating = [value for value in values if value.dtype.is_floating]
        flags = iter(np.asarray(self.on_host(self._finite_flags(floating))).tolist() if floating else ())
        return [next(flags) if value.dtype.is_floating else True for value in values]

    def _finite_flags(self, values):
        """Returns <bool>[variable]."""
        # Eager: tracing takes longer than checking many checkpoints.
        return tf.stack([tf.reduce_all(tf.math.is_finite(value.read_value())) for value in values])

    def any_process(self, flag: bool) -> bool:
        """Returns whether `flag` is True in any process."""
        return flag

    def gather_texts(self, text: str) -> list[str]:
        """Returns the texts of all processes, in order."""
        if self.num_processes == 1:
            return [text]
        service, name = eager_context.context(), f"switch_tf/{next(_exchanges)}"
        service.set_config_key_value(f"{name}/{self.process_index}", text)
        return [service.get_config_key_value(f"{name}/{other}") for other in range(self.num_processes)]

    def barrier(self) -> None:
        """Waits for all processes."""

    def is_lost_process(self, error: BaseException) -> bool:
        """Returns whether an error means a lost process, not a failed bucket."""
        text, lost = str(error), (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
        return self.num_processes > 1 and isinstance(error, tf.errors.OpError) and (
            any(words in text for words in _LOST_PROCESS)
            or isinstance(error, lost) and not any(words in text for words in _BUCKET))


class InitialValue(NamedTuple):
    """A variable's initial value.

    Attributes:
        piece: Function from an index into it to numbers.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    piece: Callable[[tuple[slice, ...]], np.ndarray]


def initial_value(settings: dict[str, Any]) -> InitialValue:
    """Returns a variable's initial value from its creator's settings, without drawing it or filling memory."""
    value, dtype, asked = settings["initial_value"], settings.get("dtype"), []

    def note(initializer, shape):
        asked.append((initializer, shape))
        return 0.0  # of any dtype

    if callable(value):
        with context.within(initial=note), tf.Graph().as_default():
            symbolic = tf.convert_to_tensor(value(), dtype=dtype)
        if asked:
            ((initializer, shape),) = asked
            return InitialValue(shape, symbolic.dtype, lambda index: initializer.piece(shape, index))
        if symbolic.op.type == "Fill":
            shape, number = tuple(symbolic.shape), tf.get_static_value(symbolic.op.inputs[1])
            return InitialValue(shape, symbolic.dtype, lambda index: np.broadcast_to(number, shape)[index])
        value = value()
    whole = tf.convert_to_tensor(value, dtype=dtype)
    return InitialValue(tuple(whole.shape), whole.dtype, lambda index: whole.numpy()[index])


def select_step(features: Features, index: Any) -> Features:
    """Returns one step of a placed batch: [steps, batch, length] -> [batch, length]."""
    return {name: value[index] for name, value in features.items()}
