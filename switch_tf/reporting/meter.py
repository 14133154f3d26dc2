"""Measures the speed of training between two logged steps."""

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Any


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
        # Whether steps are timed -> their number, tokens, and seconds, those of waiting for input by themselves, too.
        self._sums: dict[bool, Any] = {True: collections.Counter(), False: collections.Counter()}
        self._is_timed = True

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
        self._is_timed = is_timed
        self._sums[is_timed].update(steps=num_steps, tokens=num_tokens, input_wait=input_wait)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock within this scope."""
        self._sums[self._is_timed]["seconds"] += time.perf_counter() - self._resumed
        try:
            yield
        finally:
            self._resumed = time.perf_counter()

    @property
    def has_steps(self) -> bool:
        """Whether any step was counted since the last reading."""
        return any(sums["steps"] for sums in self._sums.values())

    def read(self) -> dict[str, float]:
        """Returns the speeds since the last reading, and starts over. Called within `paused`.

        Without "model_flops_utilization" for a chip of an unknown type.
        """
        sums = self._sums[self._sums[True]["steps"] > 0]
        seconds, steps = sums["seconds"], sums["steps"]
        self._start_over()
        used = self._flops_per_step * steps / seconds
        peak = self._peak.flops(used)
        return {
            "tokens_per_second": sums["tokens"] / seconds,
            "seconds_per_step": seconds / steps,
            **({} if peak is None else {"model_flops_utilization": used / peak}),
            "input_wait_fraction": sums["input_wait"] / seconds,
        }
