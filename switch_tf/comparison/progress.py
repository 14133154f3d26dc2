"""Progress of a comparison: one bar for all runs, and lines that begin with the name of a variant."""

import sys
import time

from tqdm import tqdm

from switch_tf.reporting import summaries


class Progress:
    """A progress bar of all runs on standard error."""

    def __init__(self):
        self._num_steps = None
        self._done = 0
        self._trained = 0  # by this process
        self._started = time.perf_counter()

    def begin(self, num_steps: int) -> None:
        """Shows the bar, for the number of steps of all runs, unless it is shown already."""
        if self._num_steps is None:
            self._num_steps = num_steps
            self._bar = tqdm(total=num_steps, unit="step", file=sys.stderr, disable=None, dynamic_ncols=True)

    def skip(self, steps: int) -> None:
        """Counts steps that were trained before."""
        self._done += steps
        self._bar.update(steps)

    def advance(self, steps: int) -> None:
        self._trained += steps
        self.skip(steps)

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def remaining_seconds(self) -> float:
        """Estimates the time until all runs are done, with evaluations and compilations."""
        elapsed = time.perf_counter() - self._started
        return (self._num_steps - self._done) * elapsed / max(1, self._trained)

    def close(self) -> None:
        if self._num_steps is not None:
            self._bar.close()


class OfVariant(summaries.Progress):
    """Progress of a run within a comparison.

    Args:
        whole: Progress of the comparison.
        name: str. Name of the variant.
        last_step: int. Last step of the run.
    """

    def __init__(self, whole: Progress, name: str, last_step: int):
        self._whole = whole
        self._name = name
        self._last_step = last_step

    def resume(self, step: int) -> None:
        """Counts the steps that were trained before."""
        self._whole.skip(step)

    def advance(self, steps: int) -> None:
        self._whole.advance(steps)

    def glance(self, step: int, loss: float) -> None:
        """Does nothing, because the bar of the comparison moves."""

    def say(self, text: str) -> None:
        self._whole.say(f"{self._name}: {text}")

    def remaining_seconds(self, step: int, seconds_per_step: float) -> float:
        """Estimates the time until the whole comparison is done."""
        return self._whole.remaining_seconds()

    def close(self) -> None:
        """Does nothing, because the bar belongs to the comparison."""
