"""The corrupt records of a cache that a run leaves out, up to a limit.

A record is left out by its index, and the next one is read in its place, so positions do not move. The records found so
far are a part of the position in the data: a run that was killed stops at the same record as one that was not.
"""

import json
import pathlib
import sys
import threading

from switch_tf.data.example_files import BadData, UnreachableData
from switch_tf.refusals import first_line

# Words in array_record's errors about the content of a file, and not about a disk that fails.
_FORMAT = "Riegeli/records file"
_CORRUPT = f"Corrupted {_FORMAT}"


class CorruptRecords:
    """The corrupt records found in one part of the batches.

    Args:
        limit: Number of different records to leave out of each task.

    Attributes:
        has_failed: Whether the reading has ended with an error, which tf.data may hold back behind batches that were
            read before.
    """

    def __init__(self, limit: int = 0):
        self.has_failed = False
        self._limit = limit
        self._found: dict[str, set[int]] = {}  # task/split/file -> numbers of records
        self._named: set[tuple[str, int]] = set()
        self._lock = threading.Lock()  # a position is saved while a thread of tf.data reads ahead

    def add(self, file: str, number: int, error: Exception) -> None:
        """Leaves out a record, with a line on standard error.

        Args:
            file: Path of its file.
            number: Its number within the file.
            error: Error of reading it.

        Raises:
            BadData: It is not the record that is damaged, or more of its task than the limit are.
            UnreachableData: The disk failed.
        """
        *task, name = pathlib.Path(file).parts[-3:]
        place = "/".join([*task, name])
        with self._lock:
            is_known = number in self._found.get(place, ())
            count = sum(len(numbers) for known, numbers in self._found.items() if known.split("/")[:-1] == task)
            if isinstance(error, RuntimeError) and _FORMAT not in str(error):
                raise UnreachableData(f"{file}, record {number}, cannot be read ({first_line(error)}).") from error
            if _CORRUPT not in str(error) or count + (not is_known) > self._limit:
                excess = f", one more than the {self._limit} of Run.skip_corrupt_records" * (self._limit > 0)
                raise BadData(f"{file} is damaged, record {number}{excess} ({first_line(error)}); `switch-tf cache` "
                              "with the task's gin file finds damaged shards and writes them anew.") from error
            self._found.setdefault(place, set()).add(number)
        if (place, number) not in self._named:
            self._named.add((place, number))
            print(f"Left out: {file}, record {number} ({first_line(error)}).", file=sys.stderr, flush=True)

    def text(self) -> str:
        """Returns the records found so far as JSON, "" if there are none."""
        with self._lock:
            found = {place: sorted(numbers) for place, numbers in self._found.items()}
        return json.dumps(found) if found else ""

    def take_up(self, text: str) -> None:
        """Adds the records of a `text` of an earlier process.

        Raises:
            ValueError, AttributeError, TypeError: It is no such text.
        """
        found = {place: set(map(int, numbers)) for place, numbers in json.loads(text).items()}
        with self._lock:
            for place, numbers in found.items():
                self._found.setdefault(place, set()).update(numbers)
