"""The files of a task's cache, and their comparison with the task.

`<cache_dir>/<task>/<split>/` holds shards, `00003-of-00016.array_record`, each with a JSON file of counts and checksum,
and `manifest.json` once all are complete. A record is a `tf.train.Example` of the features before
`seqio.CacheDatasetPlaceholder`.
"""

import contextlib
import errno
import functools
import hashlib
import inspect
import itertools
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from etils import epy

from switch_tf import environment
from switch_tf.data.example_files import BadData, UnreachableData
from switch_tf.data.task_catalog import describe, fingerprint_of_vocabulary, source_fingerprint
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import json_lines, outputs, places
from switch_tf.storage.whole_file import reading, remove, write_whole, writing, written

if TYPE_CHECKING:
    import seqio

with epy.lazy_imports():  # only caches and stored predictions need it
    from array_record.python import array_record_module

FORMAT_VERSION = 1
SEEDS_PER_PART = 1_000_003  # of a batch; seqio counts up from a part's seed, and users from theirs
# In array_record's errors about a file's content, not about a failing disk.
_FORMAT = "Riegeli/records file"
_CORRUPT = f"Corrupted {_FORMAT}"
_PART = 2**24  # bytes to fetch at a time
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_fetching = threading.Lock()


def write_records(path: Any, records: Iterable[bytes]) -> dict:
    """Writes independently readable records; returns "bytes" and "sha256". The iterable's errors pass on."""

    def write(step, *arguments):
        with writing(path):
            try:
                return step(*arguments)
            except RuntimeError as error:  # every failure of the writer
                number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
                raise OSError(number, str(error).partition(";")[0].removeprefix("write() failed: ")) from error

    with contextlib.ExitStack() as stack:
        unfinished = write(stack.enter_context, written(path))
        writer = write(array_record_module.ArrayRecordWriter, str(unfinished), "group_size:1")
        try:
            for record in records:
                write(writer.write, record)
        finally:
            write(writer.close)
        sums = {"bytes": unfinished.stat().st_size, "sha256": checksum(unfinished)}
        write(stack.close)
    return sums


def fetched_shard(file: str, sha256: str) -> str:
    """Returns a shard's local path, fetched from a bucket once for all runs of a machine.

    Raises:
        BadData: The shard is damaged.
        UnreachableData: It cannot be fetched or stored.
    """
    if places.is_local(file):
        return file
    copy = environment.cache_folder() / "shards" / f"{sha256}.array_record"
    with _fetching:
        if copy.is_file():
            return str(copy)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with written(copy) as unfinished:
            try:
                with (writing(copy), open(unfinished, "wb") as local, reading(file),
                      places.at(file).open("rb") as source):
                    shutil.copyfileobj(source, local, _PART)
            except Refusal as error:
                raise UnreachableData(str(error)) from error
            if checksum(unfinished) != sha256:
                raise BadData(f"{file} is damaged: its SHA-256 is not the one in its manifest; `switch-tf cache` with "
                              "the task's gin file and --overwrite writes it anew.")
    return str(copy)


def open_shard(file: str, sha256: str) -> Any:
    """Opens a shard for random access, without read-ahead threads as array_record advises."""
    return array_record_module.ArrayRecordReader(fetched_shard(file, sha256), _READER_OPTIONS)


def is_unchanged(file: Any, sha256: str) -> bool:
    """Whether a local file has this checksum. True for a bucket, because it keeps its own checksums."""
    return not places.is_local(file) or checksum(file) == sha256


def begin(folder: Any, name: str, request: dict, own: re.Pattern, overwrite: bool, **others: Any) -> None:
    """Writes the request of a new folder, or compares it with the stored request.

    Args:
        request: JSON-able. All that determines the content of the folder.
        own: Pattern of the folder's file names.
        overwrite: Whether to remove these files first.
        others: Entries that are not compared.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.iterdir()) if overwrite else ():
            if own.fullmatch(file.name):
                remove(file)
    with reading(folder / name):
        try:
            mismatch = difference(json_lines.load(folder / name), request)
        except FileNotFoundError:
            write_whole(folder / name, json_lines.dumps({**request, **others}, indent=1))
            return
        except (ValueError, AttributeError):
            mismatch = f"{name} is damaged"
    if mismatch:
        raise Refusal(f"{str(folder)!r} is of something else: {mismatch}. Give --overwrite to make it anew, or another "
                      "--output.")


def folder_of(cache_dir: str | None, task_name: str, split: str) -> Any:
    """Returns the folder of a split. Without `cache_dir`, all runs of the user share it."""
    return places.at(cache_dir or environment.cache_folder() / "tasks") / task_name.replace(":", "_") / split


def request(task: "seqio.Task", split: str, source: dict[str, str] | None = None) -> dict:
    """Returns all that determines the cache of a split, JSON-able.

    Args:
        source: Result of `source_fingerprint`, computed if None.
    """
    return {
        "format_version": FORMAT_VERSION,
        "task": task.name,
        "split": split,
        "source": source_fingerprint(task.name, split) if source is None else source,
        "preprocessors": [_step(step) for step in task.preprocessors[:placeholder_of(task)]],
        "vocabularies": {name: fingerprint_of_vocabulary(feature.vocabulary)
                         for name, feature in sorted(task.output_features.items())},
    }


def placeholder_of(task: "seqio.Task") -> int:
    """Returns the index of a task's `seqio.CacheDatasetPlaceholder`."""
    if not task.supports_caching:
        raise Refusal(f"Task {task.name!r} cannot be cached: put seqio.CacheDatasetPlaceholder() among its "
                      "preprocessors, behind what needs neither lengths nor chance.")
    return task._cache_step_idx


def load(task: "seqio.Task", split: str, cache_dir: str | None) -> dict:
    """Returns a cache's manifest, compared with its files, the task, and the task's data if they are on this machine.
    """
    folder = folder_of(cache_dir, task.name, split)
    again = f"`switch-tf cache {task.name}` with the task's gin file and the run's --vocabulary"
    try:
        manifest = json_lines.load(folder / "manifest.json")
    except FileNotFoundError:
        state = "is unfinished" if folder.exists() else "does not exist"
        raise Refusal(f"USE_CACHED_TASKS: the cache of {task.name!r}, split {split!r}, {state} in {str(folder)!r}; "
                      f"make it by {again}, or set CACHE_DIR to where it is.") from None
    except (OSError, ValueError) as error:
        raise Refusal(f"USE_CACHED_TASKS: {folder}/manifest.json cannot be read ({error}); make it anew by "
                      f"{again} and --overwrite.") from error
    saved = manifest["request"]
    if changed := difference(saved, request(
            task, split, saved["source"] if describe(task.name)["missing"] else None)):
        raise Refusal(f"USE_CACHED_TASKS: the cache of {task.name!r}, split {split!r}, in {str(folder)!r} is stale: "
                      f"{changed}. Make it anew by {again} and --overwrite, or set CACHE_DIR to another one.")
    # In a bucket each size costs a request, and `fetched_shard` compares checksums.
    is_local, names = places.is_local(folder), {entry.name for entry in folder.iterdir()}
    for shard in manifest["shards"]:
        file = folder / shard["file"]
        is_there = file.is_file() if is_local else file.name in names  # a link may lead to itself or to nothing
        size = None if not is_there else places.size(file) if is_local else shard["bytes"]
        if size != shard["bytes"]:
            fault = "is missing" if size is None else f"has {size} bytes instead of {shard['bytes']}"
            raise Refusal(f"USE_CACHED_TASKS: {file} {fault}; make it good by {again}.")
    return manifest


def difference(saved: dict, new: dict) -> str | None:
    """Returns the first difference of two requests, or None."""
    for name, now in new.items():
        was = saved.get(name)
        if was == now:
            continue
        if isinstance(now, dict) and isinstance(was, dict):
            key = next(key for key in sorted({*was, *now}) if was.get(key) != now.get(key))
            name, was, now = f"{name}, {key},", was.get(key), now.get(key)
        return f"its {name} was {was!r} and is {now!r}"
    return None


def checksum(file: Any) -> str:
    """Returns the SHA-256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _step(step):
    """Returns a step's name, fixed arguments and code hash."""
    fixed = ""
    while isinstance(step, functools.partial):
        fixed += "".join(f", {value!r}" for value in step.args)
        fixed += "".join(f", {name}={value!r}" for name, value in sorted(step.keywords.items()))
        step = step.func
    step = inspect.unwrap(step)
    name = f"{step.__module__}.{getattr(step, '__qualname__', type(step).__qualname__)}"
    try:
        code = hashlib.sha256(inspect.getsource(step).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # no source file
        code = "unknown code"
    return f"{name}{fixed}: {code}"


class CorruptRecords:
    """Records that are left out of one part of the batches.

    They are left out by index, so positions do not move. A position holds the records found so far, so a resumed run
    reaches the limit at the same record.

    Args:
        limit: Number of different records to leave out of each task.

    Attributes:
        has_failed: Whether reading has failed. tf.data may first return batches that it read earlier.
    """

    def __init__(self, limit: int = 0):
        self.has_failed = False
        self._limit = limit
        self._found = set()  # task/split/file, number of a record
        self._named = set()
        self._lock = threading.Lock()  # a position is saved while a thread of tf.data reads ahead

    def add(self, file: str, number: int, error: Exception) -> None:
        """Leaves out a record and prints a line on standard error.

        Raises:
            BadData: The file itself is damaged, or the task has more corrupt records than the limit.
            UnreachableData: The disk failed.
        """
        if isinstance(error, RuntimeError) and _FORMAT not in str(error):
            raise UnreachableData(f"{file}, record {number}, cannot be read ({first_line(error)}).") from error
        task, name = os.path.split("/".join(pathlib.Path(file).parts[-3:]))
        record = f"{task}/{name}", number
        with self._lock:
            num_earlier = sum(known.startswith(f"{task}/") for known, _ in self._found - {record})
            if _CORRUPT not in str(error) or num_earlier >= self._limit:
                excess = f", one more than the {self._limit} of Run.skip_corrupt_records" * (self._limit > 0)
                raise BadData(f"{file} is damaged, record {number}{excess} ({first_line(error)}); `switch-tf cache` "
                              "with the task's gin file finds damaged shards and writes them anew.") from error
            self._found.add(record)
        if record not in self._named:
            self._named.add(record)
            outputs.say(f"Left out: {file}, record {number} ({first_line(error)}).")

    def text(self) -> str:
        """Returns the records as JSON, or ""."""
        with self._lock:
            corrupt = sorted(self._found)
        return json_lines.dumps({place: [number for _, number in records] for place, records in itertools.groupby(
            corrupt, lambda record: record[0])}) if corrupt else ""

    def take_up(self, records: dict) -> None:
        """Adds the records of an earlier process's parsed `text`.

        Raises:
            ValueError, AttributeError, TypeError: The value has another form.
        """
        with self._lock:
            self._found |= {(place, int(number)) for place, numbers in records.items() for number in numbers}
