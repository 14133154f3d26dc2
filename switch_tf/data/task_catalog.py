"""Descriptions and fingerprints of registered tasks. Descriptions need no data, vocabularies or network."""

import glob
import hashlib
import inspect
import json
import os
from typing import TYPE_CHECKING

from etils import epy

from switch_tf.data.vocabularies import get_provider, tasks_of, vocabularies_of
from switch_tf.refusals import Refusal
from switch_tf.storage import places

if TYPE_CHECKING:
    import seqio

with epy.lazy_imports():  # takes a second
    from tensorflow_datasets.core.utils import file_utils


_BUDGET = 256 * 2**20  # bytes to read of a split


def source_fingerprint(mixture_or_task_name: str, split: str) -> dict[str, str]:
    """Returns "task: file" -> size and hash, for every file of a split.

    A URL counts only by its name. A source may add a method `fingerprint(split) -> str`.
    """
    fingerprints, files = {}, {}
    for task in tasks_of(get_provider(mixture_or_task_name), split):
        if hasattr(task.source, "fingerprint"):
            fingerprints[task.name] = task.source.fingerprint(split)
        names = [name for name in task.source.list_shards(split) if os.sep in name or os.path.exists(name)]
        folder = os.path.dirname(os.path.commonprefix(names))  # so that a folder can be moved
        files |= {f"{task.name}: {os.path.relpath(name, folder)}": name for name in names}
    for label, file in files.items():
        try:
            fingerprints[label] = "by its name" if "://" in file else (
                f"{os.path.getsize(file)} bytes, {places.sample(file, _BUDGET // len(files))[:16]}")
        except OSError as error:
            raise Refusal(f"The data file {file!r} of {label.partition(':')[0]!r}, split {split!r}, cannot be read "
                          f"({error.strerror}); a split is made of files.") from error
    return fingerprints


def vocabulary_fingerprint(mixture_or_task_name: str, vocabulary: str | None = None) -> list[str]:
    """Returns the `fingerprint_of_vocabulary` of each vocabulary."""
    return sorted(set(map(fingerprint_of_vocabulary, vocabularies_of(get_provider(mixture_or_task_name, vocabulary)))))


def pieces_fingerprint(mixture_or_task_name: str, vocabulary: str | None = None) -> list[str]:
    """Returns the `fingerprint_of_pieces` of each vocabulary."""
    return sorted(set(map(fingerprint_of_pieces, vocabularies_of(get_provider(mixture_or_task_name, vocabulary)))))


def fingerprint_of_pieces(vocabulary: "seqio.Vocabulary") -> str:
    """Returns the same text for any two files with the same piece for each id."""
    if not hasattr(vocabulary, "sp_model"):
        return fingerprint_of_vocabulary(vocabulary)
    pieces = [vocabulary.tokenizer.IdToPiece(id_) for id_ in range(vocabulary.tokenizer.GetPieceSize())]
    return f"{len(pieces)} pieces, {_hash(json.dumps(pieces).encode())}"


def fingerprint_of_vocabulary(vocabulary: "seqio.Vocabulary") -> str:
    """Returns a vocabulary's class and size, and the hash of a SentencePiece model."""
    content = getattr(vocabulary, "sp_model", b"")
    return f"{type(vocabulary).__name__} of {vocabulary.vocab_size} ids" + (f", {_hash(content)}" if content else "")


def _hash(content):
    return hashlib.sha256(content).hexdigest()[:16]





def describe(name: str) -> dict:
    """Returns a JSON-able description of a task or mixture.

    Returns: `name`; `kind`: "task" or "mixture"; lists of str: `splits` that are known without the data; `metrics`;
        `vocabularies`; `data_sets` of TFDS; `missing`: data sets and file patterns that are not on this machine;
        `tasks` of a mixture.
    """
    provider = get_provider(name)
    is_mixture = hasattr(provider, "tasks")
    tasks = provider.tasks if is_mixture else [provider]
    splits, metrics, data_sets, missing = set(), set(), set(), set()
    for task in tasks:
        source, loader = task.source, getattr(task.source, "tfds_dataset", None)
        data_set = set() if loader is None else {loader.name} - {None}
        # Looks in TFDS's folders, because a builder would use the network. A URL counts as prepared.
        is_prepared = data_set and any(
            "://" in str(place) or os.path.exists(
                os.path.join(place, loader.name.replace(":", os.sep), "dataset_info.json"))
            for place in file_utils.list_data_dirs(given_data_dir=loader.data_dir))
        data_sets |= data_set
        missing |= set() if is_prepared else data_set
        for patterns in getattr(source, "_split_to_filepattern", {}).values():  # of seqio's sources of files
            missing |= {pattern for pattern in ([patterns] if isinstance(patterns, str) else patterns)
                        if "://" not in pattern and not glob.glob(pattern)}
        # Splits of a whole TFDS data set are known once it is prepared.
        splits |= set(source._splits or (source.splits if is_prepared else ()))
        metrics |= {*map(_metric_name, task.metric_fns),
                    *(metric.__name__ for metric in task._metric_objs_constructor_args)}
    return {
        "name": name,
        "kind": "mixture" if is_mixture else "task",
        # Training first, then validation, then the rest.
        "splits": sorted(splits, key=lambda split: [split != "train", not split.startswith("validation"), split]),
        "metrics": sorted(metrics),
        "vocabularies": sorted({getattr(vocabulary, "sentencepiece_model_file", None) or type(vocabulary).__name__
                                for vocabulary in vocabularies_of(provider)}),
        "data_sets": sorted(data_sets),
        "missing": sorted(missing),
        "tasks": [task.name for task in tasks] if is_mixture else [],
    }





def _metric_name(function):
    """t5 keeps some names in closures."""
    function = getattr(function, "func", function)
    closure = inspect.getclosurevars(function).nonlocals
    if "metric_fn" in closure:
        return _metric_name(closure["metric_fn"])
    return closure.get("metric_dict_str") or closure.get("metric_str") or function.__name__


def describe_all(tasks: list[dict], to_be_given: dict[str, list[str]], left_out: dict[str, str]) -> str:
    """Returns a table of tasks by gin file, and lines on files without a task.

    Args:
        tasks: Results of `describe`, each with its `gin_file` or None.
        to_be_given: Gin file -> macros that a user has to set.
        left_out: Gin file -> why its tasks could not be registered.
    """
    lines = []
    for file in sorted({task["gin_file"] or "" for task in tasks}):
        members = [task for task in tasks if (task["gin_file"] or "") == file]
        vocabularies = sorted({vocabulary for task in members for vocabulary in task["vocabularies"]})
        lines.append(f"{file or 'in no gin file'} ({', '.join(vocabularies)})")
        for task in members:
            if any(task["name"].startswith(f"{other['name']}.") for other in members):
                continue  # one of many languages, counted by its mixture
            is_mixture, count, num_missing = task["kind"] == "mixture", len(task["data_sets"]), len(task["missing"])
            kind, metrics = (f"mixture of {len(task['tasks'])}", "") if is_mixture else ("", " ".join(task["metrics"]))
            presence = f"{count - num_missing} of {count} here" if count > 1 else "not here"
            presence = presence if num_missing else "here"
            lines.append(f"  {task['name']:<34}{kind:<16}{' '.join(task['splits']):<24} {presence:<15} {metrics}"
                         .rstrip())
    if left_out:
        lines.append(f"Not listed: the tasks of {', '.join(left_out)}. {next(iter(left_out.values()))}")
    for file, macros in to_be_given.items():
        lines.append(f"{file}: a task of your own files, made from {', '.join(macros)}")
    return "\n".join(lines)
