"""Training speed, the devices' peak FLOPs per second, and profiles of steps."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

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


class Meter:
    """Counts steps, tokens and training time.

    Args:
        flops_per_step: FLOPs of the model itself.
    """

    def __init__(self, flops_per_step: float, peak: Peak):
        self._flops_per_step = flops_per_step
        self._peak = peak
        self._resumed = time.perf_counter()
        self._start_over()

    def _start_over(self):
        # Rows: untimed, timed steps. Columns: seconds, steps, tokens, seconds of waiting for input.
        self._sums = np.zeros((2, 4))
        self._is_timed = True

    def restart(self) -> None:
        """Starts the clock."""
        self._resumed = time.perf_counter()

    def add(self, num_steps: int, num_tokens: float, input_wait: float, is_timed: bool = True) -> None:
        """Counts steps that end now.

        Args:
            num_tokens: Real tokens in these steps.
            input_wait: Seconds of waiting for input.
            is_timed: Untimed steps count only without timed steps.
        """
        self._is_timed = is_timed
        self._sums[int(is_timed), 1:] += num_steps, num_tokens, input_wait

    def _count_time(self):
        now = time.perf_counter()
        self._sums[int(self._is_timed), 0] += now - self._resumed
        self._resumed = now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock within this scope."""
        self._count_time()
        try:
            yield
        finally:
            self._resumed = time.perf_counter()

    @property
    def has_steps(self) -> bool:
        """Whether any step was counted since the last reading."""
        return bool(self._sums[:, 1].any())

    def read(self) -> dict[str, float]:
        """Returns the speeds since the last reading, and starts over. The clock runs.

        An unknown chip has no "model_flops_utilization".
        """
        self._count_time()
        seconds, steps, tokens, input_wait = self._sums[int(self._sums[1, 1] > 0)].tolist()
        self._start_over()
        used = self._flops_per_step * steps / seconds
        peak = self._peak.flops(used)
        return {
            "tokens_per_second": tokens / seconds,
            "seconds_per_step": seconds / steps,
            **({} if peak is None else {"model_flops_utilization": used / peak}),
            "input_wait_fraction": input_wait / seconds,
        }
