"""What lies in the cache of a task: its folders, what they were made of, and whether that is still so.

`<cache_dir>/<task>/<split>/` holds shards of tokenised examples, `00003-of-00016.array_record`, each with a JSON file
of its counts and checksum, and, once all of them are there, `manifest.json`. An example is a `tf.train.Example` of
every feature that the task has before its `seqio.CacheDatasetPlaceholder`.
"""

import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import pathlib

from switch_tf.data.source_fingerprints import fingerprint_of_vocabulary, source_fingerprint
from switch_tf.data.task_catalog import describe
from switch_tf.refusals import Refusal

FORMAT_VERSION = 1
_DISTRIBUTIONS = ("switch-tf", "seqio", "t5", "tensorflow", "tensorflow-datasets", "tensorflow-text", "sentencepiece")


def default_folder() -> str:
    """Returns where tasks are cached unless a user says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "switch_tf", "tasks")


def folder_of(cache_dir: str | None, task_name: str, split: str) -> pathlib.Path:
    """Returns the folder of a split; `cache_dir` is the default one if None."""
    return pathlib.Path(cache_dir or default_folder(), task_name.replace(":", "_"), split)


def request(task, split: str, source: dict[str, str] | None = None) -> dict:
    """Returns what the cache of a split depends on, JSON-able.

    Args:
        task: seqio.Task, with the vocabulary that it is cached with.
        split: str.
        source: what its data are known by, `source_fingerprint`'s; looked up where it is None.
    """
    steps = task.preprocessors[:placeholder_of(task)]
    return {
        "format_version": FORMAT_VERSION,
        "task": task.name,
        "split": split,
        "source": source_fingerprint(task.name, split) if source is None else source,
        "preprocessors": [_step(step) for step in steps],
        "vocabularies": {name: fingerprint_of_vocabulary(feature.vocabulary)
                         for name, feature in sorted(task.output_features.items())},
    }


def placeholder_of(task) -> int:
    """Returns the place of a task's `seqio.CacheDatasetPlaceholder` among its preprocessors.

    Raises:
        Refusal: it has none.
    """
    if not task.supports_caching:
        raise Refusal(f"Task {task.name!r} cannot be cached: put seqio.CacheDatasetPlaceholder() among its "
                      "preprocessors, behind what needs neither lengths nor chance.")
    return task._cache_step_idx


def versions() -> dict[str, str]:
    """Returns the versions of the packages that make tokens of text."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # tensorflow is tensorflow-tpu on a Cloud TPU VM
            found[name] = "not installed"
    return found


def load(task, split: str, cache_dir: str | None) -> dict:
    """Returns the manifest of a split's cache, after it was compared with the task and its files were looked for.

    Where the task's own data are not on this machine, they are not compared.

    Raises:
        Refusal: no cache, an unfinished one, one of another task, vocabulary, preprocessing or data, or one that
            lacks files.
    """
    folder = folder_of(cache_dir, task.name, split)
    again = f"`switch-tf cache {task.name}` with the task's gin file and the run's --vocabulary"
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError:
        state = "is unfinished" if folder.exists() else "does not exist"
        raise Refusal(f"USE_CACHED_TASKS: the cache of {task.name!r}, split {split!r}, {state} in {str(folder)!r}; "
                      f"make it by {again}, or set CACHE_DIR to where it is.") from None
    except (OSError, ValueError) as error:
        raise Refusal(f"USE_CACHED_TASKS: {folder}/manifest.json cannot be read ({error}); make it anew by "
                      f"{again} and --overwrite.") from error
    if found := difference(manifest["request"], _request_to_compare(task, split, manifest["request"])):
        raise Refusal(f"USE_CACHED_TASKS: the cache of {task.name!r}, split {split!r}, in {str(folder)!r} is stale: "
                      f"{found}. Make it anew by {again} and --overwrite, or set CACHE_DIR to another one.")
    for shard in manifest["shards"]:
        file = folder / shard["file"]
        size = file.stat().st_size if file.exists() else None
        if size != shard["bytes"]:
            told = "is missing" if size is None else f"has {size} bytes instead of {shard['bytes']}"
            raise Refusal(f"USE_CACHED_TASKS: {file} {told}; make it good by {again}.")
    return manifest


def difference(saved: dict, new: dict) -> str | None:
    """Returns the first difference of two requests in words, None where they agree."""
    for name, value in new.items():
        if saved.get(name) == value:
            continue
        was, now = saved.get(name), value
        if isinstance(value, dict) and isinstance(was, dict):
            key = next(key for key in sorted({*was, *value}) if was.get(key) != value.get(key))
            name, was, now = f"{name}, {key},", was.get(key), value.get(key)
        return f"its {name} was {was!r} and is {now!r}"
    return None


def checksum(file: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _request_to_compare(task, split, saved):
    is_here = not describe(task.name)["missing"]
    return request(task, split, None if is_here else saved["source"])


def _step(step):
    """A preprocessing step as text: its name, its fixed arguments and a hash of its code."""
    fixed = ""
    while isinstance(step, functools.partial):
        fixed += "".join(f", {value!r}" for value in step.args)
        fixed += "".join(f", {name}={value!r}" for name, value in sorted(step.keywords.items()))
        step = step.func
    step = inspect.unwrap(step)
    name = f"{step.__module__}.{getattr(step, '__qualname__', type(step).__qualname__)}"
    try:
        code = hashlib.sha256(inspect.getsource(step).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # typed in, or built in
        code = "unknown code"
    return f"{name}{fixed}: {code}"
