"""How fast a run trains between two logged steps."""

import contextlib
import dataclasses
import time


@dataclasses.dataclass
class _Sums:
    seconds: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    input_wait: float = 0.0  # seconds


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
        self._start_over()

    def _start_over(self):
        self._timed, self._untimed = _Sums(), _Sums()
        self._running = self._timed

    def restart(self) -> None:
        """Lets time begin now."""
        self._resumed = time.perf_counter()

    def add(self, num_steps: int, num_tokens: float, input_wait: float, is_timed=True) -> None:
        """Counts steps that end now; those not `is_timed` say something only where no others do."""
        self._running = self._timed if is_timed else self._untimed
        self._running.steps += num_steps
        self._running.tokens += num_tokens
        self._running.input_wait += input_wait

    @contextlib.contextmanager
    def paused(self):
        """Within this scope no time passes."""
        self._running.seconds += time.perf_counter() - self._resumed
        try:
            yield
        finally:
            self._resumed = time.perf_counter()

    @property
    def has_steps(self) -> bool:
        """Whether there is a speed to tell."""
        return self._timed.steps + self._untimed.steps > 0

    def read(self) -> dict[str, float]:
        """Speeds since the last reading, within `paused`; starts over. No utilisation of a chip of an unknown type."""
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
