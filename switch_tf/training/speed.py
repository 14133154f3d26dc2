"""A run's time by cause, its training speed, the peak FLOPs per second of devices, and profiles of steps."""

import collections
import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from switch_tf.checkpoints.run_folder import SECONDS
from switch_tf.hardware.devices import are_jax, device_type, nominal_flops
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.storage import places

# Seconds until the rate is measured again, because a machine's load changes.
TRUSTED = 60
FOLDER = "profile"
_FIRST_CALL = 2  # after calls that compile and fill caches


class Peak:
    """Peak rate of several devices: the nominal rate of the first, or a measured rate of large products."""

    def __init__(self, dtype: str, count: int):
        self._nominal, self._count, self._fastest = nominal_flops(dtype), count, 0.0
        # TensorFlow's products would run on the host's CPU, for minutes on a TPU VM.
        is_out_of_reach = device_type() == "TPU" or device_type() == "GPU" and are_jax()
        self._rate_of_products = None
        if self._nominal is None and not is_out_of_reach:
            self._rate_of_products = measuring(dtype)
            self._measure()

    def flops(self, used: float) -> float | None:
        """Returns the FLOPs per second of all devices together, or None for an unknown accelerator.

        Without a nominal rate it is the largest measured rate, at least `used`, measured again after a minute.
        """
        if self._rate_of_products is None:
            return self._nominal and self._nominal * self._count
        if time.monotonic() - self._measured_at > TRUSTED or used > self._fastest * self._count:
            self._measure()
        # A faster run sets the peak, so that utilisation never exceeds 1.
        self._fastest = max(self._fastest, used / self._count)
        return self._fastest * self._count

    def _measure(self):
        self._fastest = max(self._fastest, self._rate_of_products())
        self._measured_at = time.monotonic()


def measuring(dtype: str) -> Callable[[], float]:
    """Returns a function that measures the FLOPs per second of large products for about 0.25 s."""
    size = 1024 if device_type() == "CPU" else 8192  # keeps a whole device busy
    run = compile_products(dtype, size)

    def timed(count):
        started = time.perf_counter()
        float(run(tf.constant(count)))
        return time.perf_counter() - started

    def measure():
        timed(1)  # traces the function
        count = math.ceil(0.25 / timed(1))
        return 2 * size**3 * count / timed(count)

    return measure


def compile_products(dtype: str, size: int) -> Callable:
    """Returns a function that chains square products: their number, an <int32> scalar -> one element of the last."""
    factor = tf.fill((size, size), tf.cast(1 / size, dtype))  # maps ones to ones

    @tf.function(autograph=False)
    def run(count):
        _, product = tf.while_loop(lambda index, _: index < count, lambda index, x: (index + 1, tf.matmul(x, factor)),
                                   (tf.constant(0), tf.ones_like(factor)))
        return tf.cast(product[0, 0], tf.float32)

    return run


class Profiling:
    """Records training steps, from the third call of the step in a process.

    `num_calls` is 0 for no recording.
    """

    def __init__(self, num_calls: int, folder: pathlib.Path, partitioner: Partitioner, say: Callable[[str], None]):
        self._calls = range(_FIRST_CALL, _FIRST_CALL + num_calls)
        self._folder, self._partitioner, self._say = folder / FOLDER, partitioner, say
        self._call = 0
        self._recording = contextlib.ExitStack()
        self._annotate: Callable | None = None

    @property
    def is_recording(self) -> bool:
        """Whether the next call of the step is recorded."""
        return self._call in self._calls

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Runs one call of the step after `number` steps, recorded if it is due."""
        if self.is_recording and self._annotate is None:
            folder = self._recording.enter_context(places.uploaded(self._folder))
            self._annotate = self._recording.enter_context(self._partitioner.profile(folder))
        with self._annotate(number) if self._annotate else contextlib.nullcontext():
            yield
        self._call += 1
        if self._call == self._calls.stop:
            self.close()

    def close(self) -> None:
        """Writes the recording."""
        if self._annotate:
            self._recording.close()
            count = min(self._call, self._calls.stop) - self._calls.start
            self._say(f"The profile of {count} call{'s' * (count != 1)} of the step is in {self._folder}; `pip install "
                      f"xprof` and `tensorboard --logdir {self._folder}` show it.")
        elif self._calls and self._call < self._calls.stop:
            self._say(f"The run ended before call {self._calls.start + 1} of the step, the first that PROFILE_STEPS "
                      "records.")
        self._annotate, self._calls = None, range(0)


class Clock:
    """Divides the time of a run in this process into causes, such as "compile", "steps" and parts of "start".

    At any time one cause counts, or none, as in the turns of other runs.

    `age`: Seconds of the process so far, for the cause "start/import".
    """

    def __init__(self, age: float = 0.0):
        self._seconds, self._taken = collections.Counter({"start/import": age}), collections.Counter[str]()
        self._cause: str | None = None
        self._changed = time.perf_counter()

    def enter(self, cause: str | None) -> str | None:
        """Counts for another cause from now on. Returns the one before."""
        now, earlier = time.perf_counter(), self._cause
        if earlier:
            self._seconds[earlier] += now - self._changed  # type: ignore[assignment]  # its type knows integers only
        self._cause, self._changed = cause, now
        return earlier

    @contextlib.contextmanager
    def counting(self, cause: str) -> Iterator[None]:
        """Counts for another cause within this scope."""
        earlier = self.enter(cause)
        try:
            yield
        finally:
            self.enter(earlier)

    def read(self) -> collections.Counter:
        """Returns cause -> seconds, up to now. An absent cause has 0."""
        self.enter(self._cause)
        return self._seconds

    def take(self, cause: str | None = None) -> dict[str, float]:
        """Returns the seconds since the last call, by their names in `metrics.jsonl`, the largest first.

        `cause`: Another cause to count for from now on.
        """
        self.enter(cause or self._cause)
        new = self._seconds - self._taken
        self._taken = self._seconds.copy()
        return {SECONDS + cause: round(seconds, 3) for cause, seconds in new.most_common() if seconds > 1e-3}


class Meter:
    """Counts steps, their tokens and their time by the run's clock.

    Args:
        flops_per_step: FLOPs of the model itself.
    """

    def __init__(self, flops_per_step: float, peak: Peak, clock: Clock):
        self._flops_per_step, self._peak, self._clock = flops_per_step, peak, clock
        self._counted = np.zeros(2)
        # Rows: untimed, timed steps. Columns: seconds, of them waiting for input, steps, tokens.
        self._sums = np.zeros((2, 4))

    def add(self, num_steps: int, num_tokens: float, is_timed: bool = True) -> None:
        """Counts steps that end now.

        Args:
            num_tokens: Real tokens in these steps.
            is_timed: Untimed steps count only without timed steps.
        """
        seconds = self._clock.read()
        now = np.array([seconds["start/first_step"] + seconds["steps"] + seconds["input"], seconds["input"]])
        self._sums[int(is_timed)] += *(now - self._counted), num_steps, num_tokens
        self._counted = now

    @property
    def has_steps(self) -> bool:
        """Whether any step was counted since the last reading."""
        return bool(self._sums[:, 2].any())

    def read(self) -> dict[str, float]:
        """Returns the speeds of the steps since the last reading, and starts over.

        An unknown chip has no "model_flops_utilization".
        """
        seconds, input_wait, steps, tokens = self._sums[int(self._sums[1, 2] > 0)].tolist()
        self._sums[:] = 0
        used = self._flops_per_step * steps / seconds
        peak = self._peak.flops(used)
        return {
            "tokens_per_second": tokens / seconds,
            "seconds_per_step": seconds / steps,
            **({} if peak is None else {"model_flops_utilization": used / peak}),
            "input_wait_fraction": input_wait / seconds,
        }
