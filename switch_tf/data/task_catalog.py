"""What can be said of registered tasks and mixtures at once, without opening data, vocabularies or the network."""

import glob
import inspect
import os

from switch_tf.data.providers import get_provider, vocabularies_of
from switch_tf.data.seqio_import import import_seqio


def names() -> list[str]:
    """Returns the names of all tasks and mixtures that are registered, sorted."""
    seqio = import_seqio()
    return sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})


def describe(name: str) -> dict:
    """Returns what a task or mixture is, for people and for JSON.

    Args:
        name: str. A registered seqio task or mixture.

    Returns: `name`; `kind`: "task" or "mixture"; and lists of str: `splits`, as far as they are known without the data;
        `metrics`; `vocabularies`; `data_sets` of TFDS that it reads; `missing`, those of them and the file patterns
        that are not on this machine; `tasks` of a mixture.

    Raises:
        Refusal: an unknown name.
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
        "vocabularies": sorted({_vocabulary(one) for one in vocabularies_of(provider)}),
        "data_sets": sorted(data_sets),
        "missing": sorted(missing),
        "tasks": [task.name for task in tasks] if hasattr(provider, "tasks") else [],
    }


def _is_prepared(loader):
    """Whether a TFDS data set is in a folder that TFDS looks into; a URL counts as if it were.

    The data set's own builder would ask the network.
    """
    from tensorflow_datasets.core.utils import file_utils

    folder = loader.name.replace(":", os.sep)
    places = file_utils.list_data_dirs(given_data_dir=loader.data_dir)
    return any("://" in str(place) or os.path.exists(os.path.join(place, folder, "dataset_info.json"))
               for place in places)


def _patterns(source):
    """The file patterns that seqio's own sources of files read."""
    patterns = getattr(source, "_split_to_filepattern", {}).values()
    return [pattern for one in patterns for pattern in ([one] if isinstance(one, str) else one)]


def _splits(source):
    """The splits that a source was made with. Those of a TFDS data set in whole are known once it is there."""
    if source._splits:
        return tuple(source._splits)
    return tuple(source.splits) if _is_prepared(source.tfds_dataset) else ()


def _place(split):
    """Training first, then validation, then the rest."""
    return [split != "train", not split.startswith("validation"), split]


def _metrics(task):
    own = task._metric_objs_constructor_args
    return [*map(_metric_name, task.metric_fns), *(metric.__name__ for metric in own)]


def _metric_name(function):
    """The name of a metric; t5 makes some within functions that know it."""
    function = getattr(function, "func", function)
    within = inspect.getclosurevars(function).nonlocals
    if "metric_fn" in within:
        return _metric_name(within["metric_fn"])
    return within.get("metric_dict_str") or within.get("metric_str") or function.__name__


def _vocabulary(vocabulary):
    return getattr(vocabulary, "sentencepiece_model_file", None) or type(vocabulary).__name__
