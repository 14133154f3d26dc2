"""Facts of a vocabulary about the text beside a sentinel, for reading and spelling gaps.

T5's span corruption removes tokens from a text that was tokenised whole. So the text after a gap begins with a blank
only if one is typed, and the blank before a gap belongs to the removed tokens. SentencePiece produces these ids for
text beside a sentinel. Text next to a gap is therefore encoded together with a sentinel, the anchor.


Typed text to ids, and ids to readable text, with sentinels by name in both.

`Reading.read` and `spell` as TensorFlow operations, for programs from texts to texts without Python."""

import functools
import itertools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from etils import epy

from switch_tf.data.vocabularies import num_sentinels
from switch_tf.refusals import Refusal

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


_NUM_SPECIAL = 3  # ids of seqio's ByteVocabulary below those of bytes: padding, end of sequence, unknown


class SpellingOps(tf.Module):
    """A seqio vocabulary that is saved within a program.

    Args:
        vocabulary: SentencePiece or byte vocabulary.
        sentinels, prefix, keeps_end: See `Reading`.

    Raises:
        Refusal: The vocabulary is neither.
    """

    def __init__(
            self, vocabulary: "seqio.Vocabulary", sentinels: str = "gaps", prefix: str = "", keeps_end: bool = True):
        super().__init__()
        is_of_bytes = type(vocabulary).__name__ == "ByteVocabulary"
        if not is_of_bytes and not is_of_sentencepiece(vocabulary):
            raise Refusal("A vocabulary of SentencePiece or of bytes can be written into a program, and this is "
                          f"a {type(vocabulary).__name__}.")
        self._tokenizer = None if is_of_bytes else vocabulary.tf_tokenizer
        self._gaps = None if is_of_bytes else gaps_of(vocabulary)
        self._vocab_size, self._eos_id = vocabulary.vocab_size, vocabulary.eos_id
        self._num_sentinels = num_sentinels(vocabulary)
        self._sentinels, self._prefix, self._keeps_end = sentinels, prefix, keeps_end
        self._names = [] if sentinels == "as_tokenized" else list(spellings(vocabulary).values())

    def read(self, texts: list[str], length: int, ends: bool) -> Any:
        """Returns the ids of texts, see `Reading.read`.

        Args:
            texts: <string>[batch].
            length: int. Largest number of ids of a text, the end of sequence included.
            ends: bool. Whether the end of sequence follows.

        Returns:
            <int32>[batch, longest], padding 0. A text without ids is a row of padding.
        """
        texts = tf.strings.join([self._prefix, texts])
        if self._sentinels == "gaps" and self._num_sentinels:
            ids = self._with_gaps(texts)
        else:
            ids = self._spelt_out(self._encode(texts))
        if ends:
            end = tf.cast(ids.row_lengths() > 0, tf.int64)
            ids = tf.concat([ids[:, :length - 1] if self._keeps_end else ids, tf.RaggedTensor.from_row_lengths(
                tf.fill([tf.reduce_sum(end)], self._eos_id), end)], axis=1)
        ids = ids[:, :length].to_tensor(0)
        # At least one position, also if all texts are empty.
        return tf.pad(ids, [[0, 0], [0, tf.cast(tf.shape(ids)[1] == 0, tf.int32)]])

    def _with_gaps(self, texts):
        """Encodes texts with typed sentinels as sentinels: <string>[batch] -> <int32>[batch, (id)]."""
        sentinel = f"<extra_id_({'|'.join(map(str, range(self._num_sentinels)))})>"
        # Cut at a byte that UTF-8 does not have. tensorflow-text's regex_split ends a text at a NUL.
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8")
        pieces = tf.strings.split(tf.strings.regex_replace(texts, sentinel, b"\xff\\0\xff"), b"\xff")
        pieces = tf.ragged.boolean_mask(pieces, tf.not_equal(pieces, ""))
        words, row = pieces.flat_values, pieces.value_rowids()
        is_sentinel = tf.strings.regex_full_match(words, sentinel)
        is_same = tf.equal(row[1:], row[:-1])
        # The neighbours of plain text in its row are sentinels.
        follows = tf.logical_and(tf.concat([tf.zeros_like(row[:1], tf.bool), is_same], 0), ~is_sentinel)
        precedes = tf.logical_and(tf.concat([is_same, tf.zeros_like(row[:1], tf.bool)], 0), ~is_sentinel)
        plain = self._spelt_out(self._encode_beside(tf.where(is_sentinel, "", words), follows, precedes))
        numbers = tf.strings.to_number(
            tf.strings.regex_replace(tf.boolean_mask(words, is_sentinel), "[^0-9]", ""), tf.int32)
        special = tf.RaggedTensor.from_row_lengths(self._vocab_size - 1 - numbers, tf.cast(is_sentinel, tf.int64))
        return pieces.with_flat_values(tf.concat([plain, special], axis=1)).merge_dims(1, 2)

    def _encode_beside(self, words, follows, precedes):
        """Encodes texts beside gaps, see `gaps`: <string>[text] -> <int32>[text, (id)]."""
        if self._gaps is None:
            return self._encode(words)
        gaps = self._gaps
        blank = "[" + "".join(f"\\x{{{ord(character):x}}}" for character in gaps.blanks) + "]"
        before = tf.strings.regex_replace(words, f"{blank}{'' if gaps.keeps_blanks else '*'}\\z", "")
        is_empty = tf.logical_and(precedes, tf.equal(before, "")) if not gaps.keeps_blanks else tf.zeros_like(precedes)
        texts = tf.where(precedes, before + gaps.ending, words)
        beside = tf.strings.regex_replace(texts, f"^{gaps.joined}", f" {gaps.joined}") if gaps.joined else texts
        texts = tf.where(follows, gaps.anchor + beside, texts)
        ids = self._encode(tf.where(is_empty, "", texts))
        starts = tf.where(follows, tf.constant(gaps.num_before, tf.int64), 0)
        ends = ids.row_lengths() - tf.cast(precedes, tf.int64)
        is_kept = tf.ragged.map_flat_values(
            lambda place: tf.logical_and(place >= tf.gather(starts, ids.value_rowids()),
                                         place < tf.gather(ends, ids.value_rowids())),
            tf.ragged.range(ids.row_lengths()))
        return tf.ragged.boolean_mask(ids, is_kept)

    def _spelt_out(self, ids):
        """Replaces sentinels that occur in plain text by ordinary pieces, in <int32>[text, (id)]."""
        if not self._names:
            return ids
        names = tf.RaggedTensor.from_row_lengths(
            tf.constant([id_ for name in self._names for id_ in name], tf.int32), [0, *map(len, self._names)])
        first = self._vocab_size - self._num_sentinels
        is_plain = ids.flat_values < first
        plain = tf.RaggedTensor.from_row_lengths(
            tf.boolean_mask(ids.flat_values, is_plain), tf.cast(is_plain, tf.int64))
        named = tf.gather(names, tf.where(is_plain, 0, ids.flat_values - first + 1))
        return ids.with_flat_values(tf.concat([plain, named], axis=1)).merge_dims(1, 2)

    def spell(self, ids: tf.Tensor) -> tf.Tensor:
        """Spells each row up to its end of sequence, see `spell`: <int32>[batch, length] -> <string>[batch]."""
        is_before_end = tf.cumsum(tf.cast(tf.equal(ids, self._eos_id), tf.int32), axis=1) < 1
        is_real = tf.cast(tf.logical_and(is_before_end, ids > 0), tf.int32)
        num_left = tf.cumsum(is_real, axis=1, reverse=True)  # 0 if only padding follows
        rows = tf.ragged.boolean_mask(ids, tf.logical_and(is_before_end, num_left > 0))
        values, row = rows.values, rows.value_rowids()
        is_plain = values < self._vocab_size - self._num_sentinels
        # A piece is a run of plain ids, or one special id.
        goes_on = tf.logical_and(tf.logical_and(is_plain[1:], is_plain[:-1]), tf.equal(row[1:], row[:-1]))
        begins = tf.logical_not(tf.concat([tf.zeros_like(is_plain[:1]), goes_on], axis=0))
        first = tf.boolean_mask(values, begins)
        pieces = tf.RaggedTensor.from_value_rowids(
            tf.where(is_plain, values, 0), tf.cumsum(tf.cast(begins, tf.int64)) - 1, nrows=tf.size(first, tf.int64))
        sentinel = self._vocab_size - 1 - first
        name = tf.where(sentinel >= 0, tf.strings.join(["<extra_id_", tf.strings.as_string(sentinel), ">"]),
                        tf.strings.join(["<id_", tf.strings.as_string(first), ">"]))
        words = tf.where(tf.boolean_mask(is_plain, begins), self._decode(pieces), name)
        is_text = tf.not_equal(words, "")
        row, first, words = (tf.boolean_mask(values, is_text) for values in (
            tf.boolean_mask(row, begins), first, words))
        words = tf.strings.join([self._blanks_before(first, words, row), words])
        return self._joined(tf.RaggedTensor.from_value_rowids(words, row, rows.nrows()))

    def _blanks_before(self, first, words, row):
        """Returns <string>[piece], the blank between a text and a name, as `spelling._blank_before` does."""
        is_name = first >= self._vocab_size - self._num_sentinels
        has_text = tf.concat([tf.zeros_like(row[:1], tf.bool), tf.equal(row[1:], row[:-1])], axis=0)
        ends = tf.strings.regex_full_match(tf.concat([[""], words[:-1]], axis=0)[:tf.size(words)], r"(?s).* ")
        has_blank = tf.logical_and(has_text, ~ends)
        if self._gaps is None or self._gaps.keeps_blanks:
            gap_has_blank = tf.where(has_text, ends, self._gaps.adds_blank) if self._gaps else tf.zeros_like(ends)
            has_blank = tf.where(first < self._vocab_size, gap_has_blank, has_blank)
        return tf.where(tf.logical_and(is_name, has_blank), " ", "")

    def _joined(self, words):
        """Joins <string>[batch, (piece)] to <string>[batch], without the blank that SentencePiece adds at the start."""
        texts = tf.strings.reduce_join(words, axis=1)
        if self._gaps is None or (self._gaps.keeps_blanks and not self._gaps.adds_blank):
            return texts
        return tf.strings.regex_replace(texts, "^ " if self._gaps.keeps_blanks else "^ +", "")

    def _encode(self, texts):
        """Encodes <string>[text] to <int32>[text, (id)]."""
        if self._tokenizer is not None:
            return self._tokenizer.tokenize(texts)
        letters = tf.strings.bytes_split(texts)
        codes = tf.reshape(tf.io.decode_raw(letters.values, tf.uint8), [-1])
        return letters.with_values(tf.cast(codes, tf.int32) + _NUM_SPECIAL)

    def _decode(self, ids):
        """Decodes <int32>[text, (id)] to <string>[text], with the blank before the first word."""
        if self._tokenizer is not None:
            # Without an id before them, SentencePiece drops leading blanks; their number depends on its version.
            plain = tf.fill([ids.nrows(), 1], self._gaps.plain_id)
            texts = self._tokenizer.detokenize(tf.concat([plain, ids], axis=1))
            return tf.strings.substr(texts, len(self._gaps.plain_text.encode()), 2**31 - 1)
        letters = tf.constant([b""] * _NUM_SPECIAL + [bytes([code]) for code in range(256)])
        joined = tf.strings.reduce_join(tf.gather(letters, ids), axis=1)
        return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="ignore")
