"""`read_text` and `spell` as TensorFlow operations, for programs that take texts and give texts without Python."""

import tensorflow as tf

from switch_tf import checks
from switch_tf.data.vocabularies import num_sentinels

_BLANK = r"[\t-\r\x1c-\x20\x{85}\p{Z}]*"  # what `str.strip` takes away
_NUM_SPECIAL = 3  # ids of seqio's ByteVocabulary below those of bytes: padding, end of sequence, unknown


class TextsInGraph(tf.Module):
    """A seqio vocabulary within a program, saved with it.

    Raises:
        ValueError: it is neither of SentencePiece nor of bytes.
    """

    def __init__(self, vocabulary):
        super().__init__()
        is_of_bytes = type(vocabulary).__name__ == "ByteVocabulary"
        if not is_of_bytes and not hasattr(vocabulary, "tf_tokenizer"):
            raise checks.refusal("A vocabulary of SentencePiece or of bytes can be written into a program, and this is "
                                 f"a {type(vocabulary).__name__}.")
        self._tokenizer = None if is_of_bytes else vocabulary.tf_tokenizer
        self._vocab_size, self._eos_id = vocabulary.vocab_size, vocabulary.eos_id
        self._num_sentinels = num_sentinels(vocabulary)

    def read(self, texts, length: int, ends: bool):
        """The ids of texts as a model reads them; typed sentinels are sentinels. See `read_text`.

        Args:
            texts: <string>[batch].
            length: int, ids of a text that are kept, the end of sequence included.
            ends: bool, whether the end of sequence follows.

        Returns:
            <int32>[batch, longest], padding 0; of a text with nothing in it nothing but padding.
        """
        import tensorflow_text

        # With no sentinel a pattern that is in no text.
        numbers = "|".join(map(str, range(self._num_sentinels)))
        sentinel = f"<extra_id_({numbers})>" if numbers else r"[^\s\S]"
        pieces = tensorflow_text.regex_split(texts, sentinel, sentinel)
        words = pieces.flat_values
        is_sentinel = tf.strings.regex_full_match(words, sentinel)
        is_left_out = tf.logical_or(is_sentinel, tf.strings.regex_full_match(words, _BLANK))
        plain = self._encode(tf.where(is_left_out, "", words))
        numbers = tf.strings.to_number(
            tf.strings.regex_replace(tf.boolean_mask(words, is_sentinel), "[^0-9]", ""), tf.int32)
        special = tf.RaggedTensor.from_row_lengths(self._vocab_size - 1 - numbers, tf.cast(is_sentinel, tf.int64))
        ids = pieces.with_flat_values(tf.concat([plain, special], axis=1)).merge_dims(1, 2)
        if ends:
            end = tf.cast(ids.row_lengths() > 0, tf.int64)
            ids = tf.concat([ids, tf.RaggedTensor.from_row_lengths(
                tf.fill([tf.reduce_sum(end)], self._eos_id), end)], axis=1)
        ids = ids[:, :length].to_tensor(0)
        # One place at least: of texts that are all empty there would be none.
        return tf.pad(ids, [[0, 0], [0, tf.cast(tf.shape(ids)[1] == 0, tf.int32)]])

    def spell(self, ids):
        """The text of each row up to its end of sequence: <int32>[batch, length] -> <string>[batch]. See `spell`."""
        is_before_end = tf.cumsum(tf.cast(tf.equal(ids, self._eos_id), tf.int32), axis=1) < 1
        is_real = tf.cast(tf.logical_and(is_before_end, ids > 0), tf.int32)
        num_left = tf.cumsum(is_real, axis=1, reverse=True)  # 0 where padding follows to the end
        rows = tf.ragged.boolean_mask(ids, tf.logical_and(is_before_end, num_left > 0))
        values, row = rows.values, rows.value_rowids()
        is_plain = values < self._vocab_size - self._num_sentinels
        # A piece is a run of plain ids, or one other id.
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
        row = tf.boolean_mask(tf.boolean_mask(row, begins), is_text)
        words = tf.RaggedTensor.from_value_rowids(tf.boolean_mask(words, is_text), row, rows.nrows())
        return tf.strings.reduce_join(words, axis=1, separator=" ")

    def _encode(self, texts):
        """<string>[text] -> <int32>[text, (id)]."""
        if self._tokenizer is not None:
            return self._tokenizer.tokenize(texts)
        letters = tf.strings.bytes_split(texts)
        codes = tf.reshape(tf.io.decode_raw(letters.values, tf.uint8), [-1])
        return letters.with_values(tf.cast(codes, tf.int32) + _NUM_SPECIAL)

    def _decode(self, ids):
        """<int32>[text, (id)] -> <string>[text]."""
        if self._tokenizer is not None:
            return self._tokenizer.detokenize(ids)
        letters = tf.constant([b""] * _NUM_SPECIAL + [bytes([code]) for code in range(256)])
        joined = tf.strings.reduce_join(tf.gather(letters, ids), axis=1)
        return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="ignore")
