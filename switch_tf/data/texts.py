"""Text to ids as a user types it, and ids to text as a user reads it: sentinels by name, both ways."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from switch_tf.data.providers import get_provider
from switch_tf.data.vocabularies import num_sentinels

_SENTINEL = re.compile(r"<extra_id_(0|[1-9]\d{0,4})>")


class TextFeatures(NamedTuple):
    """How a task writes texts as ids.

    `inputs`, `targets`: seqio vocabularies.
    `inputs_end`: bool. Whether inputs end with the end of sequence.
    """

    inputs: Any
    targets: Any
    inputs_end: bool


def text_features(mixture_or_task_name: str, vocabulary: str | None = None) -> TextFeatures:
    """TextFeatures of a task or mixture; `vocabulary` as for `get_provider`.

    Raises:
        ValueError: an unknown name, or a task that has no inputs or no targets.
    """
    features = get_provider(mixture_or_task_name, vocabulary).output_features
    for name in ("inputs", "targets"):
        if name not in features:
            raise ValueError(f"Task {mixture_or_task_name!r} has no {name!r}, so it answers no texts; its features are "
                             f"{', '.join(sorted(features))}.")
    return TextFeatures(features["inputs"].vocabulary, features["targets"].vocabulary, features["inputs"].add_eos)


def read_text(vocabulary, text: str) -> list[int]:
    """The ids of a text, in which `<extra_id_0>` and so on are sentinels, as many as the vocabulary has."""
    count, ids, start = num_sentinels(vocabulary), [], 0
    for match in _SENTINEL.finditer(text):
        if int(match[1]) < count:
            ids += [*_encode(vocabulary, text[start:match.start()]), vocabulary.vocab_size - 1 - int(match[1])]
            start = match.end()
    return [*ids, *_encode(vocabulary, text[start:])]


def _encode(vocabulary, text):
    return vocabulary.encode(text) if text.strip() else []


def spell(vocabulary, ids: Sequence[int]) -> str:
    """The text of ids, with sentinels and the end of sequence by name; decoding alone drops or joins them.

    Ids beyond the vocabulary, for which models have room, are spelt `<id_32100>`.
    """
    first_sentinel = vocabulary.vocab_size - num_sentinels(vocabulary)
    pieces = []
    for is_plain, run in itertools.groupby(ids, lambda id_: id_ < first_sentinel and id_ != vocabulary.eos_id):
        if is_plain:
            pieces.append(vocabulary.decode(list(run)))
        else:
            pieces += [_name(vocabulary, id_) for id_ in run]
    return " ".join(filter(None, pieces))  # padding and the like within a sequence have no text


def pieces(vocabulary, ids: Sequence[int]) -> list[str]:
    """What each id stands for: a piece of text with the blank before a word, or the name of what is no text."""
    return [_piece(vocabulary, int(id_)) for id_ in ids]


def _piece(vocabulary, id_):
    first_sentinel = vocabulary.vocab_size - num_sentinels(vocabulary)
    if id_ >= first_sentinel or id_ == vocabulary.eos_id:
        return _name(vocabulary, id_)
    if id_ == vocabulary.pad_id:
        return "<pad>"
    if hasattr(vocabulary, "tokenizer"):
        return vocabulary.tokenizer.id_to_piece(id_).replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    return vocabulary.decode([id_]) or f"<id_{id_}>"


def _name(vocabulary, id_):
    if id_ == vocabulary.eos_id:
        return "</s>"
    sentinel = vocabulary.vocab_size - 1 - id_
    return f"<extra_id_{sentinel}>" if sentinel >= 0 else f"<id_{id_}>"
