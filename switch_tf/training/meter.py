"""How fast a run trains between two logged steps."""

import contextlib
import time


class Meter:
    """Counts steps and tokens, and the time that training them took.

    Args:
        flops_per_step: float, of the model itself.
        peak: peak.Peak that utilisation is measured against.
    """

    def __init__(self, flops_per_step: float, peak):
        self._flops_per_step = flops_per_step
        self._peak = peak
        self._resumed = time.perf_counter()
        self._seconds, self._steps, self._tokens, self._input_wait = 0.0, 0, 0.0, 0.0

    def restart(self) -> None:
        """Lets time begin now."""
        self._resumed = time.perf_counter()

    def add(self, num_steps: int, num_tokens: float, input_wait: float) -> None:
        self._steps += num_steps
        self._tokens += num_tokens
        self._input_wait += input_wait

    @contextlib.contextmanager
    def paused(self):
        """Within this scope no time passes."""
        self._seconds += time.perf_counter() - self._resumed
        try:
            yield
        finally:
            self._resumed = time.perf_counter()

    @property
    def has_steps(self) -> bool:
        """Whether there is a speed to tell."""
        return self._steps > 0

    def read(self) -> dict[str, float]:
        """Speeds since the last reading, within `paused`; starts over."""
        seconds, steps, tokens, input_wait = self._seconds, self._steps, self._tokens, self._input_wait
        self._seconds, self._steps, self._tokens, self._input_wait = 0.0, 0, 0.0, 0.0
        used = self._flops_per_step * steps / seconds
        return {
            "tokens_per_second": tokens / seconds,
            "seconds_per_step": seconds / steps,
            "model_flops_utilization": used / self._peak.flops(used),
            "input_wait_fraction": input_wait / seconds,
        }
