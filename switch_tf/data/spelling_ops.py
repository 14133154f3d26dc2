"""`Reading.read` and `spell` as TensorFlow operations, for programs from texts to texts without Python."""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from switch_tf.data.gaps import gaps_of, is_of_sentencepiece, spellings
from switch_tf.data.vocabularies import num_sentinels
from switch_tf.refusals import Refusal

if TYPE_CHECKING:
    import seqio

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
