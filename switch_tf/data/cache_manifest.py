"""The folders of a task's cache, and the check that a cache still agrees with its task.

`<cache_dir>/<task>/<split>/` holds shards of tokenised examples, `00003-of-00016.array_record`, each with a JSON file
of its counts and checksum, and `manifest.json` once all shards are complete. An example is a `tf.train.Example` of the
task's features before its `seqio.CacheDatasetPlaceholder`.
"""

import functools
import hashlib
import inspect
import json
import pathlib
from typing import TYPE_CHECKING

from switch_tf import environment
from switch_tf.data.source_fingerprints import fingerprint_of_vocabulary, source_fingerprint
from switch_tf.data.task_catalog import describe
from switch_tf.refusals import Refusal
from switch_tf.storage import places

if TYPE_CHECKING:
    import seqio

FORMAT_VERSION = 1
_DISTRIBUTIONS = ("switch-tf", "seqio", "t5", "tensorflow", "tensorflow-datasets", "tensorflow-text", "sentencepiece")


def default_folder() -> pathlib.Path:
    """Returns the default folder of cached tasks."""
    return environment.cache_folder() / "tasks"


def folder_of(cache_dir: str | None, task_name: str, split: str) -> pathlib.Path:
    """Returns the folder of a split. `cache_dir` None means the default folder."""
    return places.at(cache_dir or default_folder()) / task_name.replace(":", "_") / split


def request(task: "seqio.Task", split: str, source: dict[str, str] | None = None) -> dict:
    """Returns a JSON-able description of everything that the cache of a split depends on.

    Args:
        task: seqio.Task with the vocabulary of the cache.
        split: str. A split of the task.
        source: Result of `source_fingerprint`, computed if None.
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


def placeholder_of(task: "seqio.Task") -> int:
    """Returns the index of a task's `seqio.CacheDatasetPlaceholder` among its preprocessors.

    Raises:
        Refusal: The task has none.
    """
    if not task.supports_caching:
        raise Refusal(f"Task {task.name!r} cannot be cached: put seqio.CacheDatasetPlaceholder() among its "
                      "preprocessors, behind what needs neither lengths nor chance.")
    return task._cache_step_idx


def versions() -> dict[str, str]:
    """Returns the versions of the packages on which tokens depend."""
    # TensorFlow may be installed as tensorflow-tpu.
    return {name: environment.installed_version(name) or "not installed" for name in _DISTRIBUTIONS}


def load(task: "seqio.Task", split: str, cache_dir: str | None) -> dict:
    """Returns the manifest of a split's cache after comparing it with the task and its files.

    The task's data are compared only if they are on this machine.

    Raises:
        Refusal: The cache is missing or unfinished, lacks files, or belongs to another task, vocabulary, preprocessing
            or data.
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
    if changed := difference(manifest["request"], _request_to_compare(task, split, manifest["request"])):
        raise Refusal(f"USE_CACHED_TASKS: the cache of {task.name!r}, split {split!r}, in {str(folder)!r} is stale: "
                      f"{changed}. Make it anew by {again} and --overwrite, or set CACHE_DIR to another one.")
    # A bucket would be asked for each size, and shards are compared with their checksums when they are fetched.
    names = None if places.is_local(folder) else {entry.name for entry in folder.iterdir()}
    for shard in manifest["shards"]:
        file = folder / shard["file"]
        if names is None:
            size = file.stat().st_size if file.exists() else None
        else:
            size = shard["bytes"] if file.name in names else None
        if size != shard["bytes"]:
            fault = "is missing" if size is None else f"has {size} bytes instead of {shard['bytes']}"
            raise Refusal(f"USE_CACHED_TASKS: {file} {fault}; make it good by {again}.")
    return manifest


def difference(saved: dict, new: dict) -> str | None:
    """Returns the first difference of two requests in words, None if they agree."""
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


def line_of(cache: dict) -> str:
    """Returns the line about one cache that `switch-tf cache` prints, see `cache_writing.finish_all`."""
    tokens = ", ".join(f"{count:,} tokens of {feature}" for feature, count in cache["tokens"].items() if count)
    return (f"{cache['task']}, split {cache['split']}: {cache['examples']:,} examples, {tokens}, "
            f"{cache['bytes'] / 2**20:.1f} MB in {cache['num_shards']} shards: {cache['folder']}")


def _request_to_compare(task, split, saved):
    is_here = not describe(task.name)["missing"]
    return request(task, split, None if is_here else saved["source"])


def _step(step):
    """Returns a preprocessing step as text: its name, its fixed arguments and a hash of its code."""
    fixed = ""
    while isinstance(step, functools.partial):
        fixed += "".join(f", {value!r}" for value in step.args)
        fixed += "".join(f", {name}={value!r}" for name, value in sorted(step.keywords.items()))
        step = step.func
    step = inspect.unwrap(step)
    name = f"{step.__module__}.{getattr(step, '__qualname__', type(step).__qualname__)}"
    try:
        code = hashlib.sha256(inspect.getsource(step).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # without a source file
        code = "unknown code"
    return f"{name}{fixed}: {code}"
