"""Fingerprint of the data of a description, read from their source or from a cache."""

from etils import epy

from switch_tf.data.description import DatasetDescription, check_description
from switch_tf.data.source_fingerprints import source_fingerprint

with epy.lazy_imports():  # imports seqio
    from switch_tf.data import cached_tasks


def fingerprint(description: DatasetDescription) -> dict[str, str]:
    """Returns the fingerprint of the data of a description: a hash of each task's cache, or `source_fingerprint`.

    Raises:
        Refusal: The name or split is unknown, or a file or cache cannot be read.
    """
    check_description(description)
    if not description.use_cached_tasks:
        return source_fingerprint(description.mixture_or_task_name, description.split)
    return cached_tasks.cache_fingerprint(description.mixture_or_task_name, description.vocabulary,
                                          description.cache_dir, description.split)
