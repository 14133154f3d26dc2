"""Vocabulary of a Hugging Face folder: a SentencePiece model or a registered name."""

import pathlib
from typing import NamedTuple

from switch_tf.conversion import json_files, tokenizer_json
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from switch_tf.storage.whole_file import reading

FILE = "spiece.model"  # in the folders of T5 and mT5
_MAX_BYTES = 64 * 2**20  # mT5's has 4 MB


class Vocabulary(NamedTuple):
    """A vocabulary: `content` of a SentencePiece model, `name` of a registered one, or the `reason` why it has none."""

    content: bytes | None = None
    name: str | None = None
    reason: str | None = None


def find(folder: str | pathlib.Path, shown: str | pathlib.Path | None = None) -> Vocabulary:
    """Finds the vocabulary of a folder: spiece.model, the bytes of a ByT5, or the pieces of tokenizer.json.

    A vocabulary that cannot be read is a `reason` and not an error, because the weights are useful without it.

    Args:
        folder: Path of the folder, or of a local copy of it.
        shown: Path for the `reason`, if `folder` is a copy.
    """
    folder = places.at(folder)
    try:
        if (folder / FILE).exists():
            json_files.check_regular(folder / FILE)
            if (folder / FILE).stat().st_size > _MAX_BYTES:
                raise Refusal(f"{folder / FILE} is larger than the {_MAX_BYTES} bytes that are read of such a file.")
            with reading(folder / FILE):
                return Vocabulary(content=(folder / FILE).read_bytes())
        if _tokenizer_class(folder) == "ByT5Tokenizer":
            return Vocabulary(name="bytes")
        if (folder / "tokenizer.json").exists():
            return Vocabulary(content=tokenizer_json.sentencepiece_model(folder / "tokenizer.json"))
    except Refusal as error:
        return Vocabulary(reason=str(error))
    return Vocabulary(reason=f"{shown or folder} has neither {FILE} nor tokenizer.json; download one of them with the "
                             "weights, or name the VOCABULARY that the model was trained with.")


def _tokenizer_class(folder):
    """Returns the `tokenizer_class` of tokenizer_config.json or config.json, or None."""
    for name in ("tokenizer_config.json", "config.json"):
        if (folder / name).exists() and (found := json_files.read_object(folder / name).get("tokenizer_class")):
            return found
    return None
