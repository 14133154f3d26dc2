"""Records some steps of a run with the profiler of its back end, for XProf in TensorBoard."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.storage import places

FOLDER = "profile"
_FIRST_CALL = 2  # later than the calls that compile and fill caches


class Profiling:
    """Records training steps, from the third call of the step after the start of a process.

    Args:
        num_calls: Calls of the step to record, 0 for none.
        folder: Run folder. The profile is written into a folder in it.
        partitioner: Partitioner of the run.
        say: Function that prints a line of text.
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
        """Runs one call of the step, and records it if its turn has come.

        Args:
            number: Steps taken before.
        """
        if not self.is_recording:
            yield
        else:
            self._annotate = self._annotate or self._begin()
            with self._annotate(number):
                yield
        self._call += 1
        if self._call == self._calls.stop:
            self.close()

    def _begin(self):
        folder = self._recording.enter_context(places.uploaded(self._folder))
        return self._recording.enter_context(self._partitioner.profile(folder))

    def close(self) -> None:
        """Writes what was recorded."""
        if self._annotate:
            self._recording.close()
            count = min(self._call, self._calls.stop) - self._calls.start
            self._say(f"The profile of {count} call{'s' * (count != 1)} of the step is in {self._folder}; `pip install "
                      f"xprof` and `tensorboard --logdir {self._folder}` show it.")
        elif self._calls and self._call < self._calls.stop:
            self._say(f"The run ended before call {self._calls.start + 1} of the step, the first that PROFILE_STEPS "
                      "records.")
        self._annotate, self._calls = None, range(0)
