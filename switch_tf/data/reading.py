"""Typed text to ids, and ids to readable text, the same in training, evaluation, inference and serving.

T5's span corruption removes tokens from a tokenised text: the blank before a gap goes with them, and the text after a
gap begins with a blank only if one is typed. SentencePiece gives these ids to text next to a sentinel, so text next to
a gap is encoded with a sentinel, the anchor.
"""

import dataclasses
import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from etils import epy

from switch_tf import checks
from switch_tf.configs.choices import check_choice
from switch_tf.data.vocabularies import get_provider, num_sentinels
from switch_tf.refusals import Refusal
from switch_tf.storage import outputs

if TYPE_CHECKING:
    import seqio

with epy.lazy_imports():  # only for SentencePiece
    from sentencepiece import sentencepiece_model_pb2

SENTINELS = ("gaps", "spelt_out", "as_tokenized")  # see `Reading`
_BLANK_PIECE = "\N{LOWER ONE EIGHTH BLOCK}"
_OVERLAY = "\N{COMBINING LONG SOLIDUS OVERLAY}"  # the one character that Unicode composes with ">"
_NUM_SPECIAL = 3  # padding, end of sequence and unknown precede seqio's bytes
_DECLARATION = "typed_sentinels"
# T5's objectives with gaps in their inputs.
_OBJECTIVES = {f"t5.data.preprocessors.{name}" for name in ("denoise", "iid_denoising", "span_corruption",
                                                            "unsupervised")}
# seqio's steps that append the end of sequence -> whether a cut text keeps it.
_APPENDING = {"seqio.preprocessors.append_eos_after_trim": True, "seqio.preprocessors.append_eos": False,
              "seqio.preprocessors.tokenize_and_append_eos": False}
_KNOWN_PACKAGES = {"seqio", "switch_tf", "t5"}


@dataclasses.dataclass(frozen=True)
class Reading:
    """The conventions by which texts of a task become ids.

    Args:
        inputs, targets: seqio vocabularies.
        inputs_end, targets_end: Whether the end of sequence follows.
        sentinels: The meaning of a typed `<extra_id_0>`. "gaps": the sentinel of removed tokens. "spelt_out": text, in
            ordinary pieces. "as_tokenized": the ids that the vocabulary gives it.
        keeps_end: Whether a cut text keeps its end of sequence, as after seqio's `append_eos_after_trim`.
        fields: Keys or column numbers of inputs and targets in the task's files.
    """

    inputs: Any
    targets: Any
    inputs_end: bool = True
    targets_end: bool = True
    prefix: str = ""
    sentinels: str = "gaps"
    keeps_end: bool = True
    fields: tuple[str | int, str | int] = ("inputs", "targets")

    def __post_init__(self):
        checks.fields(self, ("inputs_end", "targets_end", "keeps_end"), checks.flag)
        # No vocabulary reads half of a surrogate pair. JSON may hold one.
        if not isinstance(self.prefix, str) or re.search("[\ud800-\udfff]", self.prefix):
            raise Refusal(f"The prefix must be text, not {checks.shown(self.prefix)}.")
        check_choice("sentinels", self.sentinels, SENTINELS)
        if not (isinstance(self.fields, tuple) and len(self.fields) == 2 and all(
                isinstance(field, str) or type(field) is int and field >= 0 for field in self.fields)):
            raise Refusal(f"fields must be two names or numbers of columns, not {checks.shown(self.fields)}.")

    def as_data(self) -> dict:
        """Returns the fields without the vocabularies, JSON-able."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[2:]} | {
            "fields": list(self.fields)}

    @classmethod
    def from_data(cls, data: Mapping, inputs_vocabulary: "seqio.Vocabulary",
                  targets_vocabulary: "seqio.Vocabulary") -> "Reading":
        """Returns the Reading of a result of `as_data`."""
        names = [field.name for field in dataclasses.fields(cls)[2:]]
        if not isinstance(data, Mapping) or sorted(data) != sorted(names):
            raise Refusal(f"A reading must have the keys {', '.join(names)}, received {checks.shown(data)}.")
        fields = data["fields"]
        return cls(inputs_vocabulary, targets_vocabulary,
                   **{**data, "fields": tuple(fields) if isinstance(fields, list) else fields})

    def raw(self) -> "Reading":
        """Returns the reading without prefix, and with typed sentinels as gaps."""
        return dataclasses.replace(self, prefix="", sentinels="gaps")

    def read(self, text: str, length: int) -> tuple[list[int], int]:
        """Returns the ids of an input, at most `length`, and the number that were cut."""
        return self._cut(self.inputs, self.prefix + text, length, self.inputs_end)

    def read_target(self, text: str, length: int) -> tuple[list[int], int]:
        """Returns the same for a target, without the prefix."""
        return self._cut(self.targets, text, length, self.targets_end)

    def _cut(self, vocabulary, text, length, has_end):
        ids = read_text(vocabulary, text, self.sentinels)
        if not ids:
            return [], 0
        end = [vocabulary.eos_id] * has_end
        num_cut = max(0, len(ids) + len(end) - length)
        return [*(ids[:length - len(end)] if self.keeps_end else ids), *end][:length], num_cut


def typed_sentinels(meaning: str) -> Callable:
    """Declares the meaning of a typed `<extra_id_0>` for a preprocessor, as a decorator.

    The last declaration among a task's preprocessors counts. The default is "as_tokenized".

    Args:
        meaning: See `Reading.sentinels`.
    """
    check_choice("The typed_sentinels of a preprocessor", meaning, SENTINELS)

    def declare(step):
        setattr(step, _DECLARATION, meaning)
        return step

    return declare


def reading_of(mixture_or_task_name: str, vocabulary: str | None = None) -> Reading:
    """Returns the Reading of a task or mixture; `vocabulary` as for `get_provider`.

    `prefix` and `fields` are attributes of the task's source, such as `TextFilesSource`. Preprocessors declare the
    meaning of sentinels. A mixture has the values that its tasks share, and the defaults of Reading where they differ.
    """
    provider = get_provider(mixture_or_task_name, vocabulary)
    features = provider.output_features
    for name in ("inputs", "targets"):
        if name not in features:
            raise Refusal(f"Task {mixture_or_task_name!r} has no {name!r}, so it answers no texts; its features are "
                          f"{', '.join(sorted(features))}.")
    first, *rest = conventions = [_conventions(task) for task in getattr(provider, "tasks", [provider])]
    has_end = any(task.pop("has_end") for task in conventions)
    agreed = {name: value for name, value in first.items() if all(other[name] == value for other in rest)}
    differ = [words for name, words in (("prefix", "prefixes"), ("sentinels", "readings of <extra_id_0>"))
              if name not in agreed]
    if differ:
        outputs.say(f"The tasks of {mixture_or_task_name!r} have different {' and '.join(differ)}. Texts are read with "
                    "what all tasks agree on; otherwise without a prefix, and with <extra_id_0> as a gap.")
    inputs, targets = features["inputs"], features["targets"]
    return Reading(inputs.vocabulary, targets.vocabulary, inputs.add_eos and has_end, targets.add_eos and has_end,
                   **agreed)


def _conventions(task):
    """Returns a task's fields of a Reading, and `has_end`: whether its steps append ends."""
    sentinels, keeps_end, is_known = "as_tokenized", None, True
    for given in task.preprocessors:
        step = given
        # The innermost function, or the outermost step with a declaration.
        while not hasattr(step, _DECLARATION) and (
                inner := step.func if isinstance(step, functools.partial) else getattr(step, "__wrapped__", None)):
            step = inner
        origin = f"{getattr(step, '__module__', None)}.{getattr(step, '__name__', None)}"
        is_known &= origin.partition(".")[0] in _KNOWN_PACKAGES
        sentinels = getattr(step, _DECLARATION, "gaps" if origin in _OBJECTIVES else sentinels)
        if origin in _APPENDING:
            keeps_end = _APPENDING[origin]
        elif isinstance(given, functools.partial) and given.keywords.get("with_eos"):  # seqio's `tokenize`
            keeps_end = False
    fields = getattr(task.source, "fields", None)
    fields = fields if isinstance(fields, Mapping) else {}  # may mean something else in a user's source
    # An unknown step may append the end, too.
    return {"prefix": getattr(task.source, "prefix", ""), "sentinels": sentinels, "keeps_end": keeps_end is not False,
            "has_end": keeps_end is not None or not is_known,
            "fields": (fields.get("inputs", "inputs"), fields.get("targets", "targets"))}


class Gaps(NamedTuple):
    """Properties of a SentencePiece vocabulary for text next to a sentinel.

    `anchor`: Text of a sentinel, put before the text after a gap. `num_before`: Its number of ids.
    `ending`: Text of a sentinel with one id, put after the text before a gap.
    `blanks`: Characters that the vocabulary reads as a blank.
    `joined`: A character that normalisation would join with the anchor, or "". A blank is put before it.
    `keeps_blanks`, `adds_blank`: SentencePiece's `remove_extra_whitespaces` (inverted) and `add_dummy_prefix`.
    `plain_id`, `plain_text`: An id and its text. Decoded before other ids, it keeps their leading blanks.
    `names`: Ordinary ids of each sentinel's name, by sentinel id.
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
    names: tuple[tuple[int, ...], ...]


def gaps_of(vocabulary: "seqio.Vocabulary") -> Gaps | None:
    """Returns the Gaps of a SentencePiece vocabulary, cached, or None."""
    # The tokenizer is the key, since seqio's vocabularies have no hash.
    return _gaps_of(vocabulary.tokenizer, num_sentinels(vocabulary)) if hasattr(vocabulary, "sp_model") else None


@functools.lru_cache(maxsize=64)
def _gaps_of(tokenizer, count):
    normalizer = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.serialized_model_proto()).normalizer_spec
    size, blank = tokenizer.get_piece_size(), tokenizer.encode("a b")
    plain_id = next(id_ for id_ in range(size - 1, -1, -1)
                    if not tokenizer.is_byte(id_) and tokenizer.decode([id_]).strip())
    # Normalisations turn only such characters into blanks.
    blanks = "".join(character for character in map(chr, range(2**16))
                     if unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf")
                     and tokenizer.encode(f"a{character}b") == blank)
    anchor, num_before, ending, joined = "", 0, "", ""
    if count:
        ending = tokenizer.id_to_piece(size - 1).replace(_BLANK_PIECE, " ")
        anchor = f" {ending.strip()}"
        ids = tokenizer.encode(anchor)
        num_before = len(ids)
        joined = "" if tokenizer.encode(anchor + _OVERLAY)[:num_before] == ids else _OVERLAY
    names = []
    for id_ in range(size - count, size):
        start, _, number = tokenizer.id_to_piece(id_).replace(_BLANK_PIECE, " ").rpartition("_")
        # In two parts, because neither is a sentinel. The second has no leading blank.
        names.append(tuple(part_id for part in (f"{start}_", number)
                           for part_id in tokenizer.encode(anchor + part)[num_before:]))
    return Gaps(anchor, num_before, ending, blanks, joined, not normalizer.remove_extra_whitespaces,
                normalizer.add_dummy_prefix, plain_id, tokenizer.decode([plain_id]), tuple(names))


def _sentinel(count):
    return f"<extra_id_({'|'.join(map(str, range(count)))})>"


def spellings(vocabulary: "seqio.Vocabulary") -> Mapping[int, Sequence[int]]:
    """Returns sentinel -> ordinary ids of its name, if the vocabulary would read sentinels in text."""
    gaps = gaps_of(vocabulary)
    return dict(enumerate(gaps.names, vocabulary.vocab_size - len(gaps.names))) if gaps else {}


def read_text(vocabulary: "seqio.Vocabulary", text: str, sentinels: str = "gaps") -> list[int]:
    """Returns the ids of a text.

    Args:
        sentinels: See `Reading`. With "gaps", the text around sentinels has the ids that T5's span corruption leaves.
    """
    if sentinels == "as_tokenized":
        return list(vocabulary.encode(text))
    count, named, ids = num_sentinels(vocabulary), spellings(vocabulary), []
    parts = re.split(_sentinel(count), text) if sentinels == "gaps" and count else [text]
    for place, part in enumerate(parts):
        if place % 2:
            ids.append(vocabulary.vocab_size - 1 - int(part))
        elif part:
            for id_ in _encode(vocabulary, part, place > 0, place < len(parts) - 1):
                ids += named.get(id_, (id_,))
    return ids


def _encode(vocabulary, text, follows_gap, precedes_gap):
    gaps = gaps_of(vocabulary)
    if gaps is None or not (follows_gap or precedes_gap):
        return vocabulary.encode(text)
    if precedes_gap:
        text = text[:-1] if gaps.keeps_blanks and text[-1] in gaps.blanks else text
        text = text if gaps.keeps_blanks else text.rstrip(gaps.blanks)
        if not text and not gaps.keeps_blanks:
            return []
        text += gaps.ending
    if follows_gap:
        text = gaps.anchor + (" " if gaps.joined and text.startswith(gaps.joined) else "") + text
    return vocabulary.encode(text)[gaps.num_before if follows_gap else 0:-1 if precedes_gap else None]


def spell(vocabulary: "seqio.Vocabulary", ids: Sequence[int]) -> str:
    """Returns the text of ids, with names for sentinels and the end of sequence.

    `read_text` restores the ids if they come from a text. Ids beyond the vocabulary are spelt `<id_32100>`.
    """
    first_sentinel = vocabulary.vocab_size - num_sentinels(vocabulary)
    gaps, text = gaps_of(vocabulary), ""
    for is_plain, run in itertools.groupby(ids, lambda id_: id_ < first_sentinel and id_ != vocabulary.eos_id):
        if is_plain:
            before, skipped = ([gaps.plain_id], gaps.plain_text) if gaps else ([], "")
            text += vocabulary.decode([*before, *run])[len(skipped):]
            continue
        for id_ in run:
            # Between text and name is a separator, or the blank of a gap if the vocabulary keeps blanks.
            has_blank = text != "" and not text.endswith(" ")
            if first_sentinel <= id_ < vocabulary.vocab_size and (gaps is None or gaps.keeps_blanks):
                has_blank = gaps is not None and (text.endswith(" ") if text else gaps.adds_blank)
            text += " " * has_blank + _name(vocabulary, id_)
    if gaps is None or gaps.keeps_blanks and not gaps.adds_blank:
        return text
    return text.removeprefix(" ") if gaps.keeps_blanks else text.lstrip(" ")  # that SentencePiece adds


def pieces(vocabulary: "seqio.Vocabulary", ids: Sequence[int]) -> list[str]:
    """Returns the text of each id with the blank before a word, or a special id's name."""
    first_sentinel, texts = vocabulary.vocab_size - num_sentinels(vocabulary), []
    for id_ in map(int, ids):
        if id_ >= first_sentinel or id_ == vocabulary.eos_id:
            texts.append(_name(vocabulary, id_))
        elif id_ == vocabulary.pad_id:
            texts.append("<pad>")
        elif gaps_of(vocabulary):
            texts.append(vocabulary.tokenizer.id_to_piece(id_).replace(_BLANK_PIECE, " "))
        else:
            texts.append(vocabulary.decode([id_]) or f"<id_{id_}>")
    return texts


def _name(vocabulary, id_):
    if id_ == vocabulary.eos_id:
        return "</s>"
    sentinel = vocabulary.vocab_size - 1 - id_
    return f"<extra_id_{sentinel}>" if sentinel >= 0 else f"<id_{id_}>"


def _is_same_row(row):
    """Whether each of <int64>[n] row numbers equals the one before."""
    return tf.concat([tf.zeros_like(row[:1], tf.bool), tf.equal(row[1:], row[:-1])], 0)


class SpellingOps(tf.Module):
    """A seqio vocabulary that is saved within a program.

    Args:
        vocabulary: SentencePiece or byte vocabulary.
        sentinels, prefix, keeps_end: See `Reading`.
    """

    def __init__(
            self, vocabulary: "seqio.Vocabulary", sentinels: str = "gaps", prefix: str = "", keeps_end: bool = True):
        super().__init__()
        self._gaps = gaps_of(vocabulary)
        if self._gaps is None and type(vocabulary).__name__ != "ByteVocabulary":
            raise Refusal("A vocabulary of SentencePiece or of bytes can be written into a program, and this is "
                          f"a {type(vocabulary).__name__}.")
        self._tokenizer = vocabulary.tf_tokenizer if self._gaps else None
        self._vocab_size, self._eos_id = vocabulary.vocab_size, vocabulary.eos_id
        self._num_sentinels = num_sentinels(vocabulary)
        self._sentinels, self._prefix, self._keeps_end = sentinels, prefix, keeps_end

    def read(self, texts: list[str], length: int, ends: bool) -> Any:
        """Returns the ids of texts, see `Reading.read`.

        Args:
            texts: <string>[batch].
            length: Most ids of a text, the end of sequence included.
            ends: Whether the end of sequence follows.

        Returns: <int32>[batch, longest], padding 0. A text without ids is a row of padding.
        """
        texts = tf.strings.join([self._prefix, texts])
        if self._sentinels == "gaps" and self._num_sentinels:
            ids = self._encode_gaps(texts)
        else:
            ids = self._spelt_out(self._encode(texts))
        if ends:
            ids = tf.concat([ids[:, :length - 1] if self._keeps_end else ids, tf.ones_like(ids[:, :1]) * self._eos_id],
                            axis=1)
        ids = ids[:, :length].to_tensor(0)
        # At least one position, even if all texts are empty.
        return tf.pad(ids, [[0, 0], [0, tf.cast(tf.shape(ids)[1] == 0, tf.int32)]])

    def _encode_gaps(self, texts):
        """<string>[batch] -> <int32>[batch, (id)]."""
        # Cut at a byte that UTF-8 lacks, because tensorflow-text's regex_split ends a text at a NUL.
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8")
        pieces = tf.strings.split(tf.strings.regex_replace(
            texts, _sentinel(self._num_sentinels), b"\xff\\0\xff"), b"\xff")
        # Sentinels are at odd places, plain text or empty pieces at even places.
        words, place = pieces.flat_values, tf.ragged.range(pieces.row_lengths()).flat_values
        is_sentinel = place % 2 > 0
        is_plain = ~is_sentinel & tf.not_equal(words, "")
        precedes = is_plain & tf.roll(is_sentinel, -1, 0)
        plain = self._spelt_out(self._encode_beside(tf.where(is_plain, words, ""), is_plain & (place > 0), precedes))
        numbers = tf.strings.to_number(
            tf.strings.regex_replace(tf.boolean_mask(words, is_sentinel), "[^0-9]", ""), tf.int32)
        special = tf.RaggedTensor.from_row_lengths(self._vocab_size - 1 - numbers, tf.cast(is_sentinel, tf.int64))
        return pieces.with_flat_values(tf.concat([plain, special], axis=1)).merge_dims(1, 2)

    def _encode_beside(self, words, follows, precedes):
        """<string>[text] -> <int32>[text, (id)]."""
        if self._gaps is None:
            return self._encode(words)
        gaps = self._gaps
        blank = "[" + "".join(f"\\x{{{ord(character):x}}}" for character in gaps.blanks) + "]"
        before = tf.strings.regex_replace(words, f"{blank}{'' if gaps.keeps_blanks else '*'}\\z", "")
        is_empty = precedes & tf.equal(before, "") & (not gaps.keeps_blanks)
        texts = tf.where(precedes, before + gaps.ending, words)
        beside = tf.strings.regex_replace(texts, f"^{gaps.joined}", f" {gaps.joined}") if gaps.joined else texts
        texts = tf.where(follows, gaps.anchor + beside, texts)
        ids = self._encode(tf.where(is_empty, "", texts))
        starts = tf.cast(follows, tf.int64) * gaps.num_before
        ends = ids.row_lengths() - tf.cast(precedes, tf.int64)
        return tf.gather(ids, tf.ragged.range(starts, ends), batch_dims=1)

    def _spelt_out(self, ids):
        """Replaces sentinels by ordinary pieces in <int32>[text, (id)]."""
        if self._gaps is None or not self._gaps.names or self._sentinels == "as_tokenized":
            return ids
        names = tf.ragged.constant([[], *map(list, self._gaps.names)], tf.int32)
        first = self._vocab_size - self._num_sentinels
        is_plain = ids.flat_values < first
        plain = tf.ragged.boolean_mask(ids.flat_values[:, None], is_plain[:, None])
        named = tf.gather(names, tf.where(is_plain, 0, ids.flat_values - first + 1))
        return ids.with_flat_values(tf.concat([plain, named], axis=1)).merge_dims(1, 2)

    def spell(self, ids: tf.Tensor) -> tf.Tensor:
        """Spells rows up to their end of sequence: <int32>[batch, length] -> <string>[batch]."""
        is_before_end = tf.cumsum(tf.cast(tf.equal(ids, self._eos_id), tf.int32), axis=1) < 1
        rows = tf.RaggedTensor.from_tensor(tf.where(is_before_end, ids, 0), padding=0)
        values, row = rows.values, rows.value_rowids()
        is_plain = values < self._vocab_size - self._num_sentinels
        # Pieces: runs of plain ids, and single special ids.
        begins = ~(_is_same_row(row) & is_plain & tf.roll(is_plain, 1, 0))
        first = tf.boolean_mask(values, begins)
        pieces = tf.RaggedTensor.from_row_starts(tf.where(is_plain, values, 0), tf.where(begins)[:, 0])
        sentinel = self._vocab_size - 1 - first
        name = tf.where(sentinel >= 0, "<extra_id_" + tf.strings.as_string(sentinel) + ">",
                        "<id_" + tf.strings.as_string(first) + ">")
        words = tf.where(tf.boolean_mask(is_plain, begins), self._decode(pieces), name)
        is_text = tf.not_equal(words, "")
        row, first, words = (tf.boolean_mask(values, is_text) for values in (
            tf.boolean_mask(row, begins), first, words))
        # Spaces at gaps as in `spell`.
        gaps, has_text = self._gaps, _is_same_row(row)
        ends = tf.roll(tf.strings.regex_full_match(words, r"(?s).* "), 1, 0)
        has_blank = has_text & ~ends
        if gaps is None or gaps.keeps_blanks:
            gap_has_blank = tf.where(has_text, ends, gaps.adds_blank) if gaps else tf.zeros_like(ends)
            has_blank = tf.where(first < self._vocab_size, gap_has_blank, has_blank)
        has_blank &= first >= self._vocab_size - self._num_sentinels
        words = tf.RaggedTensor.from_value_rowids(tf.where(has_blank, " ", "") + words, row, rows.nrows())
        texts = tf.strings.reduce_join(words, axis=1)
        if gaps is None or (gaps.keeps_blanks and not gaps.adds_blank):
            return texts
        return tf.strings.regex_replace(texts, "^ " if gaps.keeps_blanks else "^ +", "")  # that SentencePiece adds

    def _encode(self, texts):
        """<string>[text] -> <int32>[text, (id)]."""
        if self._tokenizer is not None:
            return self._tokenizer.tokenize(texts)
        letters = tf.strings.bytes_split(texts)
        return letters.with_values(
            tf.cast(tf.reshape(tf.io.decode_raw(letters.values, tf.uint8), [-1]), tf.int32) + _NUM_SPECIAL)

    def _decode(self, ids):
        """<int32>[text, (id)] -> <string>[text], with the blank before the first word."""
        if self._tokenizer is not None:
            # Otherwise SentencePiece drops leading blanks, in a number that depends on its version.
            texts = self._tokenizer.detokenize(
                tf.concat([tf.fill([ids.nrows(), 1], self._gaps.plain_id), ids], axis=1))
            return tf.strings.substr(texts, len(self._gaps.plain_text.encode()), 2**31 - 1)
        letters = tf.constant([b""] * _NUM_SPECIAL + [bytes([code]) for code in range(256)])
        return tf.strings.unicode_transcode(
            tf.strings.reduce_join(tf.gather(letters, ids), axis=1), "UTF-8", "UTF-8", errors="ignore")
