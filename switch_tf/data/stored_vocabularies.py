"""Vocabularies in a run folder: copied when a run starts, described as data, checked by hash when they are loaded.

A run folder may come from anywhere, so its description is not trusted: the file must lie in the run folder, have the
size of a vocabulary, and match the hash.
"""

import functools
import hashlib
import os
import pathlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import sentencepiece
import tensorflow as tf

from switch_tf import checks
from switch_tf.data import vocabularies
from switch_tf.data.vocabularies import import_seqio
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places
from switch_tf.storage.whole_file import reading, write_whole, writing

if TYPE_CHECKING:
    import seqio

_FOLDER = "vocabulary"
_FILE = re.compile(rf"{_FOLDER}/[a-z]+\.model")
_LARGEST_FILE = 256 * 2**20  # bytes; mT5's has 4 MB
_MOST_EXTRA_IDS = 10_000  # seqio adds them one by one
SENTENCEPIECE, BYTES, OTHER = "sentencepiece", "bytes", "other"


class Unreadable(Refusal):
    """A vocabulary file that cannot be read, in one sentence."""


class Stored(NamedTuple):
    """The description of a vocabulary in a run's `config.json`.

    `kind`: str. "sentencepiece" with a `file`, "bytes", or "other", which only code can make.
    `name`: str. The run's name for it: a registered name or a path.
    `size`: int. Number of ids, sentinels included.
    `extra_ids`: int. Number of sentinels besides those of the file.
    `file`, `sha256`: str or None. The copy, relative to the run folder, and its hash.
    """

    kind: str
    name: str
    size: int
    extra_ids: int = 0
    file: str | None = None
    sha256: str | None = None

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Stored":
        """Returns the description in parsed JSON.

        Raises:
            Refusal: The data are no description.
        """
        if not isinstance(data, dict) or not {"kind", "name", "size"} <= data.keys() <= set(cls._fields):
            raise Refusal(f"a vocabulary needs the keys {', '.join(cls._fields)}, not {checks.shown(data)}")
        stored = cls(**data)
        if stored.kind not in (SENTENCEPIECE, BYTES, OTHER):
            raise Refusal(f"a vocabulary is of kind {SENTENCEPIECE}, {BYTES} or {OTHER}, not "
                          f"{checks.shown(stored.kind)}")
        checks.text("the name of a vocabulary", stored.name)
        checks.integer("the size of a vocabulary", stored.size, 1)
        checks.integer("extra_ids of a vocabulary", stored.extra_ids, 0)
        if stored.extra_ids > min(stored.size, _MOST_EXTRA_IDS):
            raise Refusal(f"extra_ids of a vocabulary of {stored.size} ids must be at most "
                          f"{min(stored.size, _MOST_EXTRA_IDS)}, not {stored.extra_ids}")
        expected = str if stored.kind == SENTENCEPIECE else type(None)
        if not isinstance(stored.file, expected) or not isinstance(stored.sha256, expected):
            raise Refusal(f"a vocabulary of kind {SENTENCEPIECE}, and no other, has a file and its sha256")
        return stored


def store(vocabulary: "seqio.Vocabulary", folder: str | pathlib.Path, feature: str, name: str | None = None) -> Stored:
    """Copies a vocabulary into a run folder.

    Args:
        vocabulary: seqio vocabulary.
        folder: Path of the run folder.
        feature: str. "inputs" or "targets", which names the file.
        name: str or None. The run's VOCABULARY.

    Raises:
        Unreadable: the vocabulary's own file can no longer be read.
        Refusal: the folder cannot be written.
    """
    name = name or name_of(vocabulary)
    if type(vocabulary) is import_seqio().ByteVocabulary:
        return Stored(BYTES, name, vocabulary.vocab_size, vocabulary.extra_ids)
    seqio = import_seqio()
    is_made_of_its_file = type(vocabulary) is seqio.SentencePieceVocabulary and (  # and its number of sentinels
        {**vocabulary.__getstate__(), "_use_fast_tokenizer": False} == seqio.SentencePieceVocabulary(
            vocabulary.sentencepiece_model_file, vocabulary.extra_ids).__getstate__())
    if not is_made_of_its_file:
        return Stored(OTHER, name, vocabulary.vocab_size)
    path = vocabulary.sentencepiece_model_file
    try:
        with tf.io.gfile.GFile(path, "rb") as source:
            content = source.read()
    except tf.errors.OpError as error:
        raise Unreadable(f"The vocabulary {path} could not be copied into {folder} ({first_line(error)}).") from error
    copy = places.at(folder) / _FOLDER / f"{feature}.model"
    with writing(copy.parent):
        copy.parent.mkdir(exist_ok=True)
    write_whole(copy, content)
    return Stored(SENTENCEPIECE, name, vocabulary.vocab_size, vocabulary.extra_ids,
                  f"{_FOLDER}/{feature}.model", hashlib.sha256(content).hexdigest())


def load(stored: Stored, folder: str | pathlib.Path) -> "seqio.Vocabulary":
    """Returns the seqio vocabulary of a run folder, the same object for the same file.

    Raises:
        Refusal: The file is missing, changed, outside the run folder, or no vocabulary; the size differs; or only code
            can make the vocabulary.
    """
    if stored.kind == BYTES:
        vocabulary = import_seqio().ByteVocabulary(stored.extra_ids)
        if vocabulary.vocab_size != stored.size:
            raise Refusal(f"A vocabulary of bytes with {stored.extra_ids} sentinels has {vocabulary.vocab_size} "
                          f"ids, and config.json in {folder} gives it {stored.size}.")
        return vocabulary
    if stored.kind == OTHER:
        raise Refusal(f"The vocabulary {stored.name!r} of {folder} is made by code, which {folder} cannot hold.")
    return _of_copy(str(path_of(stored, folder)), stored.extra_ids, stored.size)


def path_of(stored: Stored, folder: str | pathlib.Path) -> pathlib.Path:
    """Returns the verified file of a SentencePiece vocabulary in a run folder.

    Raises:
        Refusal: The file is missing or changed, or lies outside the run folder.
    """
    path = places.at(folder) / stored.file
    if not _FILE.fullmatch(stored.file) or places.is_local(path) and os.path.realpath(path) != os.path.join(
            os.path.realpath(folder), stored.file):
        raise Refusal(f"config.json in {folder} must name a file in the folder {_FOLDER!r} beside it that is no "
                      f"link, not {checks.shown(stored.file)}.")
    if not path.is_file():
        raise Refusal(f"{path}, the vocabulary that the run copied from {checks.shown(stored.name)}, is missing; "
                      "copy it from the place where the run folder came from.")
    if path.stat().st_size > _LARGEST_FILE:
        raise Refusal(f"{path} has {path.stat().st_size} bytes, more than any vocabulary ({_LARGEST_FILE}).")
    with reading(path):
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise Refusal(f"{path} is not the vocabulary that the run copied from {checks.shown(stored.name)}: its "
                      "SHA-256 differs from the one in config.json. Copy it again.")
    return path


def choice_of(stored: Stored, folder: str | pathlib.Path) -> str | None:
    """Returns the VOCABULARY that selects the one of a run folder, None if no name or path does."""
    if stored.kind == OTHER:
        return None
    choice = str(path_of(stored, folder)) if stored.kind == SENTENCEPIECE else stored.name
    if stored.kind == BYTES and not vocabularies.is_registered(choice):
        return None
    chosen = vocabularies.get_vocabulary(choice)
    return choice if (chosen.vocab_size, chosen.extra_ids) == (stored.size, stored.extra_ids) else None


def name_of(vocabulary: "seqio.Vocabulary") -> str:
    """Returns the registered name or the path that selects a vocabulary, or else the name of its class."""
    if (name := vocabularies.registered_name(vocabulary)) is not None:
        return name
    if type(vocabulary) is import_seqio().ByteVocabulary:
        return BYTES
    return getattr(vocabulary, "sentencepiece_model_file", type(vocabulary).__name__)


@functools.cache
def _of_copy(path, extra_ids, size):
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=places.at(path).read_bytes())
    except RuntimeError as error:  # SentencePiece's own, which names its source file
        raise Refusal(f"{path} is no SentencePiece model, or a damaged one.") from error
    if pieces.get_piece_size() + extra_ids != size:
        raise Refusal(f"{path} has {pieces.get_piece_size()} pieces, and config.json says {size - extra_ids}.")
    vocabularies.check_control_ids(path, pieces)
    return import_seqio().SentencePieceVocabulary(path, extra_ids)
