"""Typed text to ids, and ids to readable text, with sentinels by name in both."""

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from switch_tf.data.gaps import BLANK_PIECE, continued, gaps_of, is_of_sentencepiece, spellings
from switch_tf.data.vocabularies import num_sentinels

if TYPE_CHECKING:
    import seqio

# The meanings of a typed `<extra_id_0>`, see `Reading`.
SENTINELS = ("gaps", "spelt_out", "as_tokenized")
_SENTINEL = re.compile(r"<extra_id_(0|[1-9][0-9]{0,4})>")  # \d would match digits of other scripts


def read_text(vocabulary: "seqio.Vocabulary", text: str, sentinels: str = "gaps") -> list[int]:
    """Returns the ids of a text.

    Args:
        vocabulary: seqio vocabulary.
        text: str.
        sentinels: One of `SENTINELS`. With "gaps", `<extra_id_0>` and the vocabulary's other names are sentinels, and
            the text around them has the ids that T5's span corruption leaves.
    """
    if sentinels == "as_tokenized":
        return list(vocabulary.encode(text))
    parts = _split(text, num_sentinels(vocabulary)) if sentinels == "gaps" else [text]
    named, ids = spellings(vocabulary), []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(vocabulary.vocab_size - 1 - part)
            continue
        for id_ in _encode(vocabulary, part, number > 0, number < len(parts) - 1):
            ids += named.get(id_, (id_,))
    return ids


def _split(text, count):
    """Splits a text into texts that are not empty and numbers of sentinels below `count`."""
    parts, start = [], 0
    for match in _SENTINEL.finditer(text):
        if int(match[1]) < count:
            parts += [text[start:match.start()], int(match[1])]
            start = match.end()
    return [part for part in [*parts, text[start:]] if part != ""]


def _encode(vocabulary, text, follows_gap, precedes_gap):
    """Returns the ids of a text, alone or beside gaps."""
    if not is_of_sentencepiece(vocabulary) or not (follows_gap or precedes_gap):
        return vocabulary.encode(text)
    gaps = gaps_of(vocabulary)
    if precedes_gap:  # the blank before a gap belongs to the gap
        text = text[:-1] if gaps.keeps_blanks and text[-1] in gaps.blanks else text
        text = text if gaps.keeps_blanks else text.rstrip(gaps.blanks)
        if not text and not gaps.keeps_blanks:
            return []
        text += gaps.ending
    ids = continued(vocabulary, text) if follows_gap else vocabulary.encode(text)
    return ids[:-1] if precedes_gap else ids


def spell(vocabulary: "seqio.Vocabulary", ids: Sequence[int]) -> str:
    """Returns the text of ids with the names of sentinels and of the end of sequence, which decoding drops or joins.

    `read_text` turns it back into the same ids if they are the ids of a text. Ids beyond the vocabulary, for which
    models have room, are spelt `<id_32100>`.
    """
    first_sentinel = vocabulary.vocab_size - num_sentinels(vocabulary)
    gaps = gaps_of(vocabulary) if is_of_sentencepiece(vocabulary) else None
    text = ""
    for is_plain, run in itertools.groupby(ids, lambda id_: id_ < first_sentinel and id_ != vocabulary.eos_id):
        if is_plain and gaps:
            text += vocabulary.decode([gaps.plain_id, *run])[len(gaps.plain_text):]
        elif is_plain:
            text += vocabulary.decode(list(run))
        else:
            for id_ in run:
                is_sentinel = first_sentinel <= id_ < vocabulary.vocab_size
                text += _blank_before(gaps, text, is_sentinel) + _name(vocabulary, id_)
    return text if gaps is None else _without_first_blank(gaps, text)


def _blank_before(gaps, text, is_sentinel):
    """Returns the blank between a text and a name: a separator, or the blank of a gap if the vocabulary keeps blanks.
    """
    if is_sentinel and gaps is None:
        return ""
    if is_sentinel and gaps.keeps_blanks:
        return " " * (text.endswith(" ") if text else gaps.adds_blank)
    return " " * (text != "" and not text.endswith(" "))


def _without_first_blank(gaps, text):
    """Returns a text without the blank that SentencePiece adds to its first word."""
    if not gaps.keeps_blanks:
        return text.lstrip(" ")
    return text.removeprefix(" ") if gaps.adds_blank else text


def pieces(vocabulary: "seqio.Vocabulary", ids: Sequence[int]) -> list[str]:
    """Returns the text of each id, with the blank before a word, or the name of a special id."""
    return [_piece(vocabulary, int(id_)) for id_ in ids]


def _piece(vocabulary, id_):
    first_sentinel = vocabulary.vocab_size - num_sentinels(vocabulary)
    if id_ >= first_sentinel or id_ == vocabulary.eos_id:
        return _name(vocabulary, id_)
    if id_ == vocabulary.pad_id:
        return "<pad>"
    if is_of_sentencepiece(vocabulary):
        return vocabulary.tokenizer.id_to_piece(id_).replace(BLANK_PIECE, " ")
    return vocabulary.decode([id_]) or f"<id_{id_}>"


def _name(vocabulary, id_):
    if id_ == vocabulary.eos_id:
        return "</s>"
    sentinel = vocabulary.vocab_size - 1 - id_
    return f"<extra_id_{sentinel}>" if sentinel >= 0 else f"<id_{id_}>"
