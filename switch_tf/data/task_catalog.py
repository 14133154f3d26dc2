"""Fingerprints of sources and vocabularies: names, sizes and hashes of their files.

Descriptions of registered tasks and mixtures that need no data, vocabularies or network."""

import glob
import hashlib
import inspect
import json
import os
from typing import TYPE_CHECKING

from etils import epy

from switch_tf.data.providers import check_split, get_provider, tasks_of, vocabularies_of
from switch_tf.data.vocabularies import import_seqio
from switch_tf.refusals import Refusal
from switch_tf.storage import places

if TYPE_CHECKING:
    import seqio

with epy.lazy_imports():  # takes a second, and most tasks read no TFDS
    from tensorflow_datasets.core.utils import file_utils


_BUDGET = 256 * 2**20  # bytes to read of all files of a split together


def source_fingerprint(mixture_or_task_name: str, split: str) -> dict[str, str]:
    """Returns "task: file" -> size and hash, for every file of a split.

    A file at a URL counts only by its name. A source may describe other data, or its way to read them, by a method
    `fingerprint(split) -> str`.

    Args:
        mixture_or_task_name: str. A registered seqio task or mixture.
        split: str. A task of a mixture may lack it.

    Raises:
        Refusal: The name or split is unknown, or a file cannot be read.
    """
    provider = get_provider(mixture_or_task_name)
    check_split(provider, split)
    fingerprints, files = {}, {}
    for task in tasks_of(provider, split):
        if hasattr(task.source, "fingerprint"):
            fingerprints[task.name] = task.source.fingerprint(split)
        names = [name for name in task.source.list_shards(split) if os.sep in name or os.path.exists(name)]
        folder = os.path.dirname(os.path.commonprefix(names))  # so that a folder can be moved
        files |= {f"{task.name}: {os.path.relpath(name, folder)}": name for name in names}
    for label, file in files.items():
        fingerprints[label] = "by its name" if "://" in file else _content(label, split, file, _BUDGET // len(files))
    return fingerprints


def vocabulary_fingerprint(mixture_or_task_name: str, vocabulary: str | None = None) -> list[str]:
    """Returns the `fingerprint_of_vocabulary` of each vocabulary of a task or mixture.

    Args:
        mixture_or_task_name: str. A registered seqio task or mixture.
        vocabulary: str or None, see `get_provider`.
    """
    provider = get_provider(mixture_or_task_name, vocabulary)
    return sorted({fingerprint_of_vocabulary(vocabulary) for vocabulary in vocabularies_of(provider)})


def pieces_fingerprint(mixture_or_task_name: str, vocabulary: str | None = None) -> list[str]:
    """Returns the `fingerprint_of_pieces` of each vocabulary. Arguments as for `vocabulary_fingerprint`."""
    provider = get_provider(mixture_or_task_name, vocabulary)
    return sorted({fingerprint_of_pieces(vocabulary) for vocabulary in vocabularies_of(provider)})


def fingerprint_of_pieces(vocabulary: "seqio.Vocabulary") -> str:
    """Returns a text that is the same for any two files in which each id has the same piece."""
    if not hasattr(vocabulary, "sp_model"):
        return fingerprint_of_vocabulary(vocabulary)
    pieces = [vocabulary.tokenizer.IdToPiece(id_) for id_ in range(vocabulary.tokenizer.GetPieceSize())]
    return f"{len(pieces)} pieces, {_hash(json.dumps(pieces).encode())}"


def fingerprint_of_vocabulary(vocabulary: "seqio.Vocabulary") -> str:
    """Returns the class and size of a seqio vocabulary, and the hash of a SentencePiece model."""
    content = getattr(vocabulary, "sp_model", b"")
    return f"{type(vocabulary).__name__} of {vocabulary.vocab_size} ids" + (f", {_hash(content)}" if content else "")


def _content(label, split, file, budget):
    try:
        return f"{os.path.getsize(file)} bytes, {places.sample(file, budget)[:16]}"
    except OSError as error:
        raise Refusal(f"The data file {file!r} of {label.partition(':')[0]!r}, split {split!r}, cannot be read "
                      f"({error.strerror}); a split is made of files.") from error


def _hash(content):
    return hashlib.sha256(content).hexdigest()[:16]


def names() -> list[str]:
    """Returns the names of all tasks and mixtures in seqio's registries, sorted."""
    seqio = import_seqio()
    return sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})


def describe(name: str) -> dict:
    """Returns a JSON-able description of a task or mixture.

    Args:
        name: str. A registered seqio task or mixture.

    Returns: `name`; `kind`: "task" or "mixture"; and lists of str: `splits` that are known without the data; `metrics`;
        `vocabularies`; `data_sets` of TFDS; `missing`: data sets and file patterns that are not on this machine;
        `tasks` of a mixture.

    Raises:
        Refusal: The name is unknown.
    """
    provider = get_provider(name)
    tasks = getattr(provider, "tasks", [provider])
    data_sets, missing = set(), set()
    for task in tasks:
        loader = getattr(task.source, "tfds_dataset", None)
        if loader is not None and loader.name is not None:
            data_sets.add(loader.name)
            if not _is_prepared(loader):
                missing.add(loader.name)
        missing |= {pattern for pattern in _patterns(task.source) if "://" not in pattern and not glob.glob(pattern)}
    return {
        "name": name,
        "kind": "mixture" if hasattr(provider, "tasks") else "task",
        "splits": sorted({split for task in tasks for split in _splits(task.source)}, key=_place),
        "metrics": sorted({metric for task in tasks for metric in _metrics(task)}),
        "vocabularies": sorted({_vocabulary_name(vocabulary) for vocabulary in vocabularies_of(provider)}),
        "data_sets": sorted(data_sets),
        "missing": sorted(missing),
        "tasks": [task.name for task in tasks] if hasattr(provider, "tasks") else [],
    }


def _is_prepared(loader):
    """Whether a TFDS data set is in one of TFDS's folders, or may be at a URL; its builder would ask the network."""
    folder = loader.name.replace(":", os.sep)
    places = file_utils.list_data_dirs(given_data_dir=loader.data_dir)
    return any("://" in str(place) or os.path.exists(os.path.join(place, folder, "dataset_info.json"))
               for place in places)


def _patterns(source):
    """Returns the file patterns of seqio's sources of files."""
    by_split = getattr(source, "_split_to_filepattern", {}).values()
    return [pattern for patterns in by_split for pattern in ([patterns] if isinstance(patterns, str) else patterns)]


def _splits(source):
    """Returns the known splits of a source; those of a whole TFDS data set are known once it is prepared."""
    if source._splits:
        return tuple(source._splits)
    return tuple(source.splits) if _is_prepared(source.tfds_dataset) else ()


def _place(split):
    """Returns a sort key: training first, then validation, then the rest."""
    return [split != "train", not split.startswith("validation"), split]


def _metrics(task):
    metric_objects = task._metric_objs_constructor_args
    return [*map(_metric_name, task.metric_fns), *(metric.__name__ for metric in metric_objects)]


def _metric_name(function):
    """Returns the name of a metric, which t5 keeps in the closure of some functions."""
    function = getattr(function, "func", function)
    closure = inspect.getclosurevars(function).nonlocals
    if "metric_fn" in closure:
        return _metric_name(closure["metric_fn"])
    return closure.get("metric_dict_str") or closure.get("metric_str") or function.__name__


def _vocabulary_name(vocabulary):
    return getattr(vocabulary, "sentencepiece_model_file", None) or type(vocabulary).__name__


def describe_all(tasks: list[dict], to_be_given: dict[str, list[str]], left_out: dict[str, str]) -> str:
    """Returns a table of tasks by gin file, and lines on the files without a task.

    Args:
        tasks: Results of `describe`, each with its `gin_file` or None.
        to_be_given: Gin file -> macros that a user has to set to make its task.
        left_out: Gin file -> reason why its tasks could not be registered.
    """
    lines = []
    for file in sorted({task["gin_file"] or "" for task in tasks}):
        members = [task for task in tasks if (task["gin_file"] or "") == file]
        vocabularies = sorted({vocabulary for task in members for vocabulary in task["vocabularies"]})
        lines.append(f"{file or 'in no gin file'} ({', '.join(vocabularies)})")
        for task in members:
            if any(task["name"].startswith(f"{other['name']}.") for other in members):
                continue  # one of a hundred languages, which its mixture counts
            is_mixture = task["kind"] == "mixture"
            kind, metrics = (f"mixture of {len(task['tasks'])}", "") if is_mixture else ("", " ".join(task["metrics"]))
            lines.append(f"  {task['name']:<34}{kind:<16}{' '.join(task['splits']):<24} {_presence(task):<15} {metrics}"
                         .rstrip())
    if left_out:
        lines.append(f"Not listed: the tasks of {', '.join(left_out)}. {next(iter(left_out.values()))}")
    for file, macros in to_be_given.items():
        lines.append(f"{file}: a task of your own files, made from {', '.join(macros)}")
    return "\n".join(lines)


def _presence(task):
    """Returns whether the data sets of a task, or how many of a mixture's, are on this machine."""
    num_missing, count = len(task["missing"]), len(task["data_sets"])
    if not num_missing:
        return "here"
    return f"{count - num_missing} of {count} here" if count > 1 else "not here"
