"""Measures the speed of training between two logged steps."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class _Sums:
    seconds: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    input_wait: float = 0.0  # seconds


class Meter:
    """Counts steps, tokens and the time spent training.

    Args:
        flops_per_step: float, FLOPs of the model itself.
        peak: training.speed.Peak, the rate that utilisation is relative to.
    """

    def __init__(self, flops_per_step: float, peak: Any):
        self._flops_per_step = flops_per_step
        self._peak = peak
        self._resumed = time.perf_counter()
        self._start_over()

    def _start_over(self):
        self._timed, self._untimed = _Sums(), _Sums()
        self._running = self._timed

    def restart(self) -> None:
        """Starts the clock now."""
        self._resumed = time.perf_counter()

    def add(self, num_steps: int, num_tokens: float, input_wait: float, is_timed: bool = True) -> None:
        """Counts steps that end now.

        Args:
            num_steps: int.
            num_tokens: float, real tokens in these steps.
            input_wait: float, seconds spent waiting for input.
            is_timed: bool. Untimed steps count only if there are no timed ones.
        """
        self._running = self._timed if is_timed else self._untimed
        self._running.steps += num_steps
        self._running.tokens += num_tokens
        self._running.input_wait += input_wait

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock within this scope."""
        self._running.seconds += time.perf_counter() - self._resumed
        try:
            yield
        finally:
            self._resumed = time.perf_counter()

    @property
    def has_steps(self) -> bool:
        """Whether any step was counted since the last reading."""
        return self._timed.steps + self._untimed.steps > 0

    def read(self) -> dict[str, float]:
        """Returns the speeds since the last reading, and starts over. Called within `paused`.

        Without "model_flops_utilization" for a chip of an unknown type.
        """
        sums = self._timed if self._timed.steps else self._untimed
        self._start_over()
        used = self._flops_per_step * sums.steps / sums.seconds
        peak = self._peak.flops(used)
        return {
            "tokens_per_second": sums.tokens / sums.seconds,
            "seconds_per_step": sums.seconds / sums.steps,
            **({} if peak is None else {"model_flops_utilization": used / peak}),
            "input_wait_fraction": sums.input_wait / sums.seconds,
        }
