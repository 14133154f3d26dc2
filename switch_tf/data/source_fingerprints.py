"""Fingerprints of sources and vocabularies: names, sizes and hashes of their files."""

import hashlib
import json
import os
from typing import TYPE_CHECKING

from switch_tf.data.providers import check_split, get_provider, tasks_of, vocabularies_of
from switch_tf.refusals import Refusal
from switch_tf.storage import places

if TYPE_CHECKING:
    import seqio

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
