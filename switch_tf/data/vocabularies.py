"""seqio, imported when a function needs it, and vocabularies by name or by the path of a SentencePiece model."""

import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import sentencepiece
import tensorflow as tf

from switch_tf import checks
from switch_tf.configs import names
from switch_tf.configs.choices import nearest
from switch_tf.hardware import devices
from switch_tf.refusals import Refusal, first_line

if TYPE_CHECKING:
    import seqio

_OF_TPU = "tpu,cpu"  # JAX's own setting on a TPU VM, if nobody has chosen another
# The ids that replace spans in span corruption. They are the last of a vocabulary, <extra_id_0> the very last.
NUM_SENTINELS = 100


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


def register_vocabulary(name: str, make: Callable) -> None:
    """Lets runs choose a vocabulary by a name; see `names.declare_vocabulary`."""
    names.declare_vocabulary(name, make)


def registered_name(vocabulary: "seqio.Vocabulary") -> str | None:
    """Returns the name by which runs choose a vocabulary; None if it has no name."""
    for name, make in names.vocabularies().items():
        try:
            if make() is vocabulary:
                return name
        except Exception:  # a user's function that fails here makes another vocabulary
            continue
    return None


def is_registered(name: str) -> bool:
    """Returns whether runs can choose a vocabulary by this name."""
    return name in names.vocabularies()


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
        with tf.io.gfile.GFile(path, "rb") as file:
            content = file.read()
        pieces = sentencepiece.SentencePieceProcessor(model_proto=content) if content else None
    except (tf.errors.OpError, UnicodeError) as error:
        reason = "there is no such file" if isinstance(error, tf.errors.NotFoundError) else first_line(error)
        raise Refusal(f"VOCABULARY {path!r} is no registered vocabulary "
                         f"({', '.join(sorted(registered)) or 'none is registered'}), and no SentencePiece model that "
                         f"can be read: {reason}.{nearest(path, registered)}") from error
    except RuntimeError as error:  # SentencePiece's own, which names its source file
        raise Refusal(_NO_MODEL.format(path)) from error
    if not pieces or not pieces.get_piece_size():
        raise Refusal(_NO_MODEL.format(path))
    check_control_ids(path, pieces)
    return import_seqio().SentencePieceVocabulary(path, 0 if _holds_sentinels(path, pieces) else NUM_SENTINELS)


_NO_MODEL = ("VOCABULARY {!r} is no SentencePiece model, or a damaged one; `switch-tf vocabulary` trains one, and "
             "files of other kinds (vocab.txt) do not serve. A tokenizer.json becomes one with the weights beside it: "
             "`switch-tf convert --input FOLDER --output NEW` writes NEW/spiece.model.")


def check_control_ids(path: str | pathlib.Path, pieces: Any) -> None:
    """Raises Refusal unless padding is 0, which models mask, and an end of sequence exists."""
    if pieces.pad_id() != 0 or pieces.eos_id() < 1:
        found = ", ".join(f"{name} {pieces.piece_to_id(name)}" for name in ("<unk>", "<s>", "</s>", "<pad>")
                          if pieces.id_to_piece(pieces.piece_to_id(name)) == name)
        raise Refusal(f"A vocabulary needs padding at id 0 and an end of sequence, and VOCABULARY {path!r} has "
                      f"{found or 'neither'}; `switch-tf vocabulary` trains one that fits.")


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
