"""The rate that utilisation is measured against: a chip's nominal one, or that of long products on this machine."""

import math
import time

import tensorflow as tf

from switch_tf.hardware.devices import device_type
from switch_tf.hardware.rates import nominal_flops

# Seconds that a measured rate is trusted: what else a machine has to do changes.
TRUSTED = 60
# Rows and columns of a product that keeps all of a device busy, on CPUs and on others.
_SIZES = {"CPU": 1024}
_LARGE = 8192


class Peak:
    """FLOPs per second of some devices like the first one here, in a dtype.

    Args:
        dtype: str, of the products.
        count: int, devices.
    """

    def __init__(self, dtype: str, count: int):
        self._nominal = nominal_flops(dtype)
        self._count = count
        # Products on a TPU VM would run on the host's CPU, and there take minutes.
        self._is_unknown = self._nominal is None and device_type() == "TPU"
        if self._nominal is None and not self._is_unknown:
            self._products = _Products(dtype)
            self._fastest = 0.0
            self._measure()

    def flops(self, used: float) -> float | None:
        """The rate of all devices together; None for a TPU of an unknown type.

        Elsewhere, where none is known it is the largest that was ever measured here: measured again where the last time
        is a while ago, or where a run uses more than that, as it was measured while the machine was busy.

        Args:
            used: float, FLOPs per second that a run was seen to use.
        """
        if self._is_unknown:
            return None
        if self._nominal is not None:
            return self._nominal * self._count
        if time.monotonic() - self._measured_at > TRUSTED or used > self._fastest * self._count:
            self._measure()
        # A run that outpaces the products is itself the fastest that was measured, so no share exceeds 1.
        self._fastest = max(self._fastest, used / self._count)
        return self._fastest * self._count

    def _measure(self):
        self._fastest = max(self._fastest, self._products.measure())
        self._measured_at = time.monotonic()


class _Products:
    """Products of large matrices one after the other in one call, so that the host waits once and not for each."""

    def __init__(self, dtype):
        self._size = _SIZES.get(device_type(), _LARGE)
        self._factor = tf.fill((self._size, self._size), tf.cast(1 / self._size, dtype))  # of ones it makes ones
        self._run = tf.function(self._multiply, autograph=False)

    def _multiply(self, count):
        _, product = tf.while_loop(lambda index, _: index < count,
                                   lambda index, x: (index + 1, tf.matmul(x, self._factor)),
                                   (tf.constant(0), tf.ones_like(self._factor)))
        return tf.cast(product[0, 0], tf.float32)

    def measure(self, seconds=0.25):
        """FLOPs per second of as many products as take about so many seconds."""
        self._timed(1)  # traced and started
        count = math.ceil(seconds / self._timed(1))
        return 2 * self._size**3 * count / self._timed(count)

    def _timed(self, count):
        started = time.perf_counter()
        float(self._run(tf.constant(count)))
        return time.perf_counter() - started
