"""Facts of a vocabulary about the text beside a sentinel, for reading and spelling gaps.

T5's span corruption removes tokens from a text that was tokenised whole. So the text after a gap begins with a blank
only if one is typed, and the blank before a gap belongs to the removed tokens. SentencePiece produces these ids for
text beside a sentinel. Text next to a gap is therefore encoded together with a sentinel, the anchor.
"""

import functools
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from etils import epy

from switch_tf.data.vocabularies import num_sentinels

if TYPE_CHECKING:
    import seqio

with epy.lazy_imports():  # other vocabularies do not need it
    from sentencepiece import sentencepiece_model_pb2

BLANK_PIECE = "\N{LOWER ONE EIGHTH BLOCK}"
_OVERLAY = "\N{COMBINING LONG SOLIDUS OVERLAY}"  # the one character that Unicode composes with ">"


class Gaps(NamedTuple):
    """Facts of a SentencePiece vocabulary.

    `anchor`: text of a sentinel to put before the text after a gap; `num_before`: its number of ids.
    `ending`: text of a sentinel with one id, to put after the text before a gap.
    `blanks`: characters that the vocabulary reads as a blank.
    `joined`: characters that the normalisation joins with the end of the anchor, which is then no sentinel. A blank is
        put before them.
    `keeps_blanks`, `adds_blank`: bool. SentencePiece's `remove_extra_whitespaces` (inverted) and `add_dummy_prefix`.
    `plain_id`, `plain_text`: an id to decode before others, which keeps their leading blanks, and its text.
    """

    anchor: str
    num_before: int
    ending: str
    blanks: str
    joined: str
    keeps_blanks: bool
    adds_blank: bool
    plain_id: int
    plain_text: str


def is_of_sentencepiece(vocabulary: "seqio.Vocabulary") -> bool:
    """Returns whether a seqio vocabulary is a SentencePiece model."""
    return hasattr(vocabulary, "sp_model")


def gaps_of(vocabulary: "seqio.Vocabulary") -> Gaps:
    """Returns the Gaps of a SentencePiece vocabulary, computed once."""
    # The tokenizer is the key, since seqio's vocabularies have no hash.
    return _gaps_of(vocabulary.tokenizer, num_sentinels(vocabulary))


@functools.lru_cache(maxsize=64)
def _gaps_of(tokenizer, count):
    normalizer = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.serialized_model_proto()).normalizer_spec
    last = tokenizer.get_piece_size() - 1
    plain_id = next(id_ for id_ in range(last, -1, -1)
                    if not tokenizer.is_byte(id_) and tokenizer.decode([id_]).strip())
    anchor, num_before, ending = "", 0, ""
    if count:
        ending = tokenizer.id_to_piece(last).replace(BLANK_PIECE, " ")
        anchor = f" {ending.strip()}"
        num_before = len(tokenizer.encode(anchor))
    is_joined = count and tokenizer.encode(anchor + _OVERLAY)[:num_before] != tokenizer.encode(anchor)
    return Gaps(anchor, num_before, ending, _blanks(tokenizer), _OVERLAY if is_joined else "",
                not normalizer.remove_extra_whitespaces, normalizer.add_dummy_prefix, plain_id,
                tokenizer.decode([plain_id]))


@functools.cache
def _invisible():
    """Returns the characters that a normalisation may turn into a blank."""
    return [character for character in map(chr, range(2**16))
            if unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf")]


def _blanks(tokenizer):
    blank = tokenizer.encode("a b")
    return "".join(character for character in _invisible() if tokenizer.encode(f"a{character}b") == blank)


def continued(vocabulary: "seqio.Vocabulary", text: str) -> list[int]:
    """Returns the ids of a text directly after a sentinel, without the blank that begins a text."""
    gaps = gaps_of(vocabulary)
    blank = " " if gaps.joined and text.startswith(gaps.joined) else ""
    return vocabulary.encode(gaps.anchor + blank + text)[gaps.num_before:]


def spellings(vocabulary: "seqio.Vocabulary") -> Mapping[int, list[int]]:
    """Returns sentinel -> ordinary ids of its name, for each sentinel that the vocabulary would read in text."""
    count = num_sentinels(vocabulary)
    return _spellings(vocabulary.tokenizer, gaps_of(vocabulary), count) if is_of_sentencepiece(vocabulary) else {}


@functools.lru_cache(maxsize=64)
def _spellings(tokenizer, gaps, count):
    names = {}
    for id_ in range(tokenizer.get_piece_size() - count, tokenizer.get_piece_size()):
        start, _, number = tokenizer.id_to_piece(id_).replace(BLANK_PIECE, " ").rpartition("_")
        # In two parts, which are no sentinel. The second one begins without a blank, so they are read as one name.
        names[id_] = [part_id for part in (f"{start}_", number)
                      for part_id in tokenizer.encode(gaps.anchor + part)[gaps.num_before:]]
    return names
