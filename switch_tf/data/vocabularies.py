"""seqio, imported when a function needs it, and vocabularies: by name, by path, or as a copy in a run folder.

A run folder may come from anywhere, so the description of its copy is not trusted: the file must lie in the run folder,
have the size of a vocabulary, and match the hash.
"""

import functools
import hashlib
import os
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import sentencepiece
import tensorflow as tf

from switch_tf import checks
from switch_tf.configs import names
from switch_tf.configs.choices import check_choice, nearest
from switch_tf.hardware import devices
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places
from switch_tf.storage.whole_file import write_whole, writing

if TYPE_CHECKING:
    import seqio

_OF_TPU = "tpu,cpu"  # JAX's own setting on a TPU VM, if nobody has chosen another
# The ids that replace spans in span corruption. They are the last of a vocabulary, <extra_id_0> the very last.
NUM_SENTINELS = 100
_FOLDER = "vocabulary"
_FILE = re.compile(rf"{_FOLDER}/[a-z]+\.model")
_LARGEST_FILE = 256 * 2**20  # bytes; mT5's has 4 MB
_MOST_EXTRA_IDS = 10_000  # seqio adds them one by one
SENTENCEPIECE, BYTES, OTHER = "sentencepiece", "bytes", "other"


def import_seqio() -> Any:
    """Returns seqio, imported so that its metrics take no accelerator."""
    keep_jax_on_cpu()
    import seqio  # after the line above, whoever comes first

    return seqio


def keep_jax_on_cpu() -> None:
    """Keeps seqio's metrics, which run on JAX, from taking the accelerator that TensorFlow trains on.

    Does nothing if Keras itself or the run's back end runs on JAX, or if JAX_PLATFORMS is set.
    """
    if keras.config.backend() != "tensorflow" or devices.are_jax():
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = sys.modules.get("jax")  # TensorFlow imports it before anyone can set the variable
    if jax is not None and jax.config.jax_platforms in (None, "", _OF_TPU):
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def num_sentinels(vocabulary: "seqio.Vocabulary") -> int:
    """Returns the number of sentinels at the end of a seqio vocabulary, added by seqio or part of its file."""
    if vocabulary.extra_ids:
        return vocabulary.extra_ids
    last = vocabulary.decode([vocabulary.vocab_size - 1])
    return NUM_SENTINELS if isinstance(last, str) and last.strip() == "<extra_id_0>" else 0


def get_vocabulary(name: str) -> "seqio.Vocabulary":
    """Returns the seqio vocabulary of that name or path, always the same object.

    Args:
        name: str. A registered name, or the path of a SentencePiece model here or at gs://. To a file without
            sentinels 100 are added; a file that holds them has them at the end, as mT5's has.

    Raises:
        Refusal: neither, or a model that cannot serve here.
    """
    checks.text("VOCABULARY", name)
    make = names.vocabularies().get(name)
    return make() if make else _of_file(name)


@functools.cache
def _of_file(path):
    registered = names.vocabularies()
    try:
        content = _read(path)
    except (tf.errors.OpError, UnicodeError) as error:
        reason = "there is no such file" if isinstance(error, tf.errors.NotFoundError) else first_line(error)
        raise Refusal(f"VOCABULARY {path!r} is no registered vocabulary "
                         f"({', '.join(sorted(registered)) or 'none is registered'}), and no SentencePiece model that "
                         f"can be read: {reason}.{nearest(path, registered)}") from error
    pieces = _pieces(path, content)
    return import_seqio().SentencePieceVocabulary(path, 0 if _holds_sentinels(path, pieces) else NUM_SENTINELS)


def _read(path):
    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read()


def _pieces(path, content):
    """Returns the model of a file, in which padding is 0, which models mask, and an end of sequence exists."""
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=content) if content else None
    except RuntimeError:  # SentencePiece's own, which names its source file
        pieces = None
    if not pieces or not pieces.get_piece_size():
        raise Refusal(f"VOCABULARY {path!r} is no SentencePiece model, or a damaged one; `switch-tf vocabulary` trains "
                      "one, and files of other kinds (vocab.txt) do not serve. A tokenizer.json becomes one with the "
                      "weights beside it: `switch-tf convert --input FOLDER --output NEW` writes NEW/spiece.model.")
    if pieces.pad_id() != 0 or pieces.eos_id() < 1:
        found = ", ".join(f"{name} {pieces.piece_to_id(name)}" for name in ("<unk>", "<s>", "</s>", "<pad>")
                          if pieces.id_to_piece(pieces.piece_to_id(name)) == name)
        raise Refusal(f"A vocabulary needs padding at id 0 and an end of sequence, and VOCABULARY {path!r} has "
                      f"{found or 'neither'}; `switch-tf vocabulary` trains one that fits.")
    return pieces


def _holds_sentinels(path, pieces):
    size, held = pieces.get_piece_size(), {}
    for number in (0, NUM_SENTINELS - 1):
        ids = [pieces.piece_to_id(f"{start}<extra_id_{number}>") for start in ("▁", "")]
        held[number] = next((id_ for id_ in ids if id_ != pieces.unk_id()), None)
    if held[0] is None:
        return False
    if held != {0: size - 1, NUM_SENTINELS - 1: size - NUM_SENTINELS}:
        raise Refusal(f"VOCABULARY {path!r} holds <extra_id_0> as id {held[0]} of {size}; sentinels have to be the "
                      f"last {NUM_SENTINELS} ids, <extra_id_0> the very last. Use the file without any, to which "
                      "they are added.")
    return True


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
        check_choice("the kind of a vocabulary", stored.kind, (SENTENCEPIECE, BYTES, OTHER))
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


def store(vocabulary: "seqio.Vocabulary", folder: pathlib.Path, feature: str, name: str | None = None) -> Stored:
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
        content = _read(path)
    except tf.errors.OpError as error:
        raise Unreadable(f"The vocabulary {path} could not be copied into {folder} ({first_line(error)}).") from error
    copy = folder / _FOLDER / f"{feature}.model"
    with writing(copy.parent):
        copy.parent.mkdir(exist_ok=True)
    write_whole(copy, content)
    return Stored(SENTENCEPIECE, name, vocabulary.vocab_size, vocabulary.extra_ids,
                  f"{_FOLDER}/{feature}.model", hashlib.sha256(content).hexdigest())


def load(stored: Stored, folder: pathlib.Path) -> "seqio.Vocabulary":
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
    return _of_copy(path_of(stored, folder), stored.extra_ids, stored.size)


def path_of(stored: Stored, folder: pathlib.Path) -> pathlib.Path:
    """Returns the verified file of a SentencePiece vocabulary in a run folder.

    Raises:
        Refusal: The file is missing or changed, or lies outside the run folder.
    """
    path = folder / stored.file
    if not _FILE.fullmatch(stored.file) or places.is_local(path) and os.path.realpath(path) != os.path.join(
            os.path.realpath(folder), stored.file):
        raise Refusal(f"config.json in {folder} must name a file in the folder {_FOLDER!r} beside it that is no "
                      f"link, not {checks.shown(stored.file)}.")
    try:
        content = places.content(path, _LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}, the vocabulary that the run copied from {checks.shown(stored.name)}, cannot be read "
                      f"({getattr(error, 'strerror', None) or error}); copy it from the place where the run folder "
                      "came from.") from error
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise Refusal(f"{path} is not the vocabulary that the run copied from {checks.shown(stored.name)}: its "
                      "SHA-256 differs from the one in config.json. Copy it again.")
    return path


def choice_of(stored: Stored, folder: pathlib.Path) -> str | None:
    """Returns the VOCABULARY that selects the one of a run folder, None if no name or path does."""
    if stored.kind == OTHER:
        return None
    choice = str(path_of(stored, folder)) if stored.kind == SENTENCEPIECE else stored.name
    if stored.kind == BYTES and choice not in names.vocabularies():
        return None
    chosen = get_vocabulary(choice)
    return choice if (chosen.vocab_size, chosen.extra_ids) == (stored.size, stored.extra_ids) else None


def name_of(vocabulary: "seqio.Vocabulary") -> str:
    """Returns the registered name or the path that selects a vocabulary, or else the name of its class."""
    for name, make in names.vocabularies().items():
        try:
            if make() is vocabulary:
                return name
        except Exception:  # a user's function that fails here makes another vocabulary
            continue
    if type(vocabulary) is import_seqio().ByteVocabulary:
        return BYTES
    return getattr(vocabulary, "sentencepiece_model_file", type(vocabulary).__name__)


@functools.cache
def _of_copy(path, extra_ids, size):
    pieces = _pieces(str(path), path.read_bytes())
    if pieces.get_piece_size() + extra_ids != size:
        raise Refusal(f"{path} has {pieces.get_piece_size()} pieces, and config.json says {size - extra_ids}.")
    return import_seqio().SentencePieceVocabulary(str(path), extra_ids)
