"""Descriptions of registered tasks and mixtures that need no data, vocabularies or network."""

import glob
import inspect
import os

from etils import epy

from switch_tf.data.providers import get_provider, vocabularies_of
from switch_tf.data.seqio_import import import_seqio

with epy.lazy_imports():  # takes a second, and most tasks read no TFDS
    from tensorflow_datasets.core.utils import file_utils


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
