"""What stands between a training step and the devices it runs on; here for one device, and how to get the others.

A step is two functions. `compute(features)` returns `(gradients, norm, metrics, is_finite)`, `apply(gradients, norm)`
updates the variables. A partitioner says in what scope variables are created, how a batch reaches the devices, and how
the two functions become one compiled step that updates nothing where `is_finite` is False.
"""

import contextlib

import tensorflow as tf

from switch_tf.hardware import devices
from switch_tf.partitioning import cluster
from switch_tf.partitioning.axes import axes_of, with_axes
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.unfolded import stored


class Partitioner:
    """One device, the first of its kind. Subclasses cut the step over many."""

    num_processes = 1
    process_index = 0
    # How many parts of the batch are computed by programs of their own: the replicas of tf.distribute.
    num_parts = 1
    # Whether each process holds variables that the others do not, and writes them to checkpoints.
    saves_in_every_process = False

    def __init__(self, layout: Layout | None = None):
        self.layout = layout or Layout()

    @property
    def num_processors(self) -> int:
        """What utilisation is measured against: so many times the rate of one device, or of this machine's CPU."""
        kind = devices.device_type()
        return cluster.num_hosts(cluster.members()) if kind == "CPU" else self.layout.num_devices

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what all processes share."""
        return self.process_index == 0

    def check(self, config, steps_per_call: int, use_xla: bool) -> None:
        """Raises Refusal where a model, by its SwitchConfig, or a step is not for these devices."""

    def creates_variables(self):
        """Scope in which model and optimizer create their variables."""
        return contextlib.nullcontext()

    def build(self, model, optimizer=None, select=lambda model: None) -> None:
        """Creates every variable of model and optimizer, laid out; slots like their weights.

        `select` freezes weights of the model before the optimizer asks which are trained.
        """
        with self.creates_variables():
            model.build()
            select(model)
            if optimizer is not None:
                self._adopt(optimizer)
                with _slots_like_weights(optimizer):
                    optimizer.build(model.trainable_variables)

    def _adopt(self, optimizer) -> None:
        """Lays out the variables that an optimizer made before there was a layout: its step, its learning rate."""

    def place(self, features):
        """Brings a batch to the devices: dict of <int32>[steps, batch, length] of the whole batch, in every process."""
        return features

    def rows(self, batch_size: int) -> tuple[int, int]:
        """The first row of a batch that `place` takes from this process, and the one behind the last."""
        return 0, batch_size

    def part_of_step(self, features, index):
        """Returns step `index` of placed features, for its shapes only: [batch or a part of it, length]."""
        return at_step(features, index)

    def sum_over_parts(self, tensors):
        """Adds up a nest of tensors over the parts of the batch, inside of `compute`."""
        return tensors

    def gather_rows(self, rows):
        """Brings the rows of all parts of the batch together, inside of what `results` takes."""
        return rows

    def current_part(self):
        """`(count, index)` of the part of the batch that `compute` sees."""
        return 1, 0

    def step(self, compute, apply, use_xla=False):
        """One training step, to be traced: a function of placed features and a step's index in them.

        With `use_xla` the update is compiled by itself on a CPU, where `compile` leaves the rest as it is.

        Returns:
            A function that returns `(metrics, is_finite)`.
        """
        if use_xla and devices.device_type() == "CPU":
            apply = tf.function(apply, jit_compile=True, autograph=False)

        def one_step(features, index):
            gradients, norm, measured, is_finite = compute(at_step(features, index))

            def update():
                apply(gradients, norm)
                return True

            tf.cond(is_finite, update, lambda: False)
            return measured, is_finite

        return one_step

    def results(self, call):
        """A function of one placed batch, [1, batch, length], to be traced.

        `call` takes features [batch, length], and returns a nest of tensors that are the same on every device.
        """
        return lambda features: call(at_step(features, 0))

    def compile(self, function, use_xla=False):
        """Compiles what `step` or `results` returned; on a CPU without XLA, whose products are slower there."""
        return tf.function(function, jit_compile=use_xla and devices.device_type() != "CPU", autograph=False)

    def trace(self, function, specs) -> None:
        """Traces what `compile` returned before it is first called, for the time it takes to be seen."""
        function.get_concrete_function(specs)

    def on_host(self, tensor):
        """A result that every device has, as an eager tensor of this process."""
        return tensor

    def is_finite(self, variable) -> bool:
        """Whether every number of a Keras variable is finite; all processes ask together."""
        value = stored(variable)
        return not value.dtype.is_floating or bool(self.on_host(tf.reduce_all(tf.math.is_finite(value))))

    def any_process(self, flag: bool) -> bool:
        """Whether `flag` holds in any process; all of them ask at the same time."""
        return flag

    def barrier(self) -> None:
        """Waits for all processes."""


# Errors of a lost process that are of other kinds: of a collective, of a barrier that waits, and of one that comes when
# all is known.
_OF_A_LOST_PROCESS = ("Collective ops is aborted", "tensorflow.CoordinationServiceError",
                      "Agent must be in CONNECTED state")
# Words in errors of TensorFlow's client for buckets, whose error classes are also those of a lost process.
_OF_A_BUCKET = ("retry attempts failed", "Error executing an HTTP request", "HTTP response code", "libcurl", "gs://")


def is_lost_process(error: Exception) -> bool:
    """Whether an error says that another process of the run cannot be reached any more, rather than a bucket."""
    if not isinstance(error, tf.errors.OpError):
        return False
    text = str(error)
    if any(words in text for words in _OF_A_LOST_PROCESS):
        return True
    lost = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
    return isinstance(error, lost) and not any(words in text for words in _OF_A_BUCKET)


@contextlib.contextmanager
def _slots_like_weights(optimizer):
    """Within this scope slots that an optimizer makes after a weight have its logical axes."""
    original = optimizer.add_variable_from_reference

    def add_variable_from_reference(reference_variable, *args, **kwargs):
        return with_axes(axes_of(reference_variable), original, reference_variable, *args, **kwargs)

    object.__setattr__(optimizer, "add_variable_from_reference", add_variable_from_reference)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "add_variable_from_reference")


def at_step(features, index):
    """Step `index` of a placed batch: [steps, batch, length] -> [batch, length]."""
    return {name: value[index] for name, value in features.items()}
