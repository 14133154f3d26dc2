"""A seqio source of text files (`data.TextFile`): shuffled, sharded and resumed without reading them from the start.

Files are cut into pieces of a mebibyte. An epoch is a new order of all pieces and of the examples within each, both
made from one key. Sixteen pieces are read at a time. So a checkpoint of the iterator holds positions, no text. A packed
file, which can only be read from its beginning, is shuffled among the other files, and mebibyte by mebibyte.
"""

import random
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from switch_tf import checks, data
from switch_tf.refusals import Refusal

# Files of a split up to this size together are checked before the first example is read.
LOOKED_THROUGH = 64 * 2**20  # bytes
_PIECES_AT_A_TIME = 16


class TextFilesSource(seqio.DataSource):
    """The examples of text files, `{feature: string}` each.

    `fields`, `prefix`: the first and the fourth argument, which `data.reading_of` reads.

    Args:
        features: Feature -> its field in the files, see `data.TextFile`.
        train_files: Path, glob, or a list of them.
        validation_files: The same. None holds out a share of the training files' examples.
        prefix: str. Put before the first feature.
        held_out_share: float in (0, 1). Share of held-out examples, by a hash of their text, so that equal examples are
            in the same split.
        max_bad_examples: int. Number of unusable examples to leave out, each with a line on standard error. One more
            ends the reading.
    """

    # Blanks, newlines and Unicode forms of a target that the vocabulary drops are no mistakes of a model, see
    # `data.evaluator`.
    compares_by_spelling = True

    def __init__(self, features: Mapping[str, str | int], train_files: str | Sequence[str],
                 validation_files: str | Sequence[str] | None = None, prefix: str = "", held_out_share: float = 0.05,
                 max_bad_examples: int = 0):
        super().__init__(splits=("train", "validation"))
        self.fields = dict(features)
        self._patterns = {"train": ("TRAIN_FILES", train_files), "validation": ("VALIDATION_FILES", validation_files)}
        self._has_own_validation = validation_files is not None
        if not self._has_own_validation:
            self._patterns["validation"] = self._patterns["train"]
        if not isinstance(prefix, str):
            raise Refusal(f"PREFIX must be text, not {checks.shown(prefix)}.")
        self.prefix = prefix
        self._held_out_share = checks.number("held_out_share", held_out_share, "in (0, 1)")
        self._max_bad_examples = checks.integer("max_bad_examples", max_bad_examples, at_least=0)
        self._bad, self._looked_through, self._pieces = set(), set(), {}

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Whether `get_dataset` takes any number of shards: it does."""
        return True

    def num_input_examples(self, split: str) -> None:
        """Returns None, because examples are not counted."""

    def list_shards(self, split: str) -> list[str]:
        """Returns the files of a split."""
        return data.find_files(*self._patterns[split])

    def fingerprint(self, split: str) -> str:
        """Returns the arguments of the reading. The content of files has fingerprints of its own."""
        share = "" if self._has_own_validation else f", {self._held_out_share:g} held out"
        return f"{self.fields}, prefix {self.prefix!r}{share}"

    def get_dataset(self, split: str = "train", shuffle: bool = True, seed: int | None = None,
                    shard_info: seqio.ShardInfo | None = None, **unused: Any) -> tf.data.Dataset:
        """Returns the examples of a split; for n shards those of every n-th piece, or every n-th if pieces are few.

        Raises:
            Refusal: A file or field is missing, or a checked file has a bad example. A bad example that is found later
                ends the data set with tf.errors.OpError, see `refusals.sentence_about_data`.
        """
        files = [data.TextFile(file, list(self.fields.values())) for file in self.list_shards(split)]
        pieces = [(index, *piece) for index, file in enumerate(files) for piece in self._pieces_of(file)]
        self._look_through(files)
        table = np.array(pieces, np.int64).reshape(-1, 3)
        is_cut = shard_info is not None and len(pieces) >= shard_info.num_shards

        def one_pass(key):
            order = tf.random.experimental.stateless_shuffle(table, seed=key) if shuffle else table
            found = tf.data.Dataset.from_tensor_slices(order)
            if is_cut:
                found = found.shard(shard_info.num_shards, shard_info.index)
            found = found.interleave(lambda piece: self._examples(files, split, piece, key[0]),
                                     cycle_length=_PIECES_AT_A_TIME if shuffle else 1)
            return found if is_cut or not shard_info else found.shard(shard_info.num_shards, shard_info.index)

        if not shuffle:
            return one_pass([-1])
        return data.passes(one_pass, seed)

    def _pieces_of(self, file):
        """Returns the pieces of a file, computed once, because a file of CSV has to be read for them."""
        known = tf.io.gfile.stat(file.name)
        key = file.name, known.length, known.mtime_nsec
        if key not in self._pieces:
            self._pieces[key] = file.pieces()
        return self._pieces[key]

    def _examples(self, files, split, piece, key):
        """Returns the examples of a piece in an order that the key decides, the original order for -1."""
        file, start, end = tf.unstack(piece, num=3)

        def step(place, _):
            after, *texts = tf.numpy_function(
                lambda *numbers: self._read(files, split, *map(int, numbers)), [file, place, end, key],
                [tf.int64, *[tf.string] * len(self.fields)],
                stateful=False)  # a stateful function could not be resumed
            texts = {name: tf.ensure_shape(column, [None])
                     for name, column in zip(self.fields, texts, strict=True)}
            return tf.ensure_shape(after, []), (place, texts)

        steps = tf.data.Dataset.range(np.iinfo(np.int64).max).scan(start, step)
        return steps.take_while(lambda place, _: place >= 0).flat_map(
            lambda _, texts: tf.data.Dataset.from_tensor_slices(texts))

    def _read(self, files, split, file, start, end, key):
        """Returns the next position, -1 at the end, and the texts of each feature, bytes[examples]."""
        rows, bad, after = files[file].read(start, end) if start >= 0 else ([], [], -1)
        self._count(bad)
        if not self._has_own_validation:
            rows = [row for row in rows if self._is_held_out(row) == (split == "validation")]
        if key >= 0:
            random.Random(f"{key} {file} {start}").shuffle(rows)
        columns = zip(*rows, strict=True) if rows else [()] * len(self.fields)
        prefixes = [self.prefix] + [""] * len(self.fields)
        return np.int64(after), *(np.array([(prefix + text).encode() for text in column], object)
                                  for prefix, column in zip(prefixes, columns, strict=False))

    def _is_held_out(self, row):
        return zlib.crc32("\t".join(row).encode()) < self._held_out_share * 2**32

    def _count(self, bad):
        for sentence in bad:
            is_new = sentence not in self._bad
            self._bad.add(sentence)
            if len(self._bad) > self._max_bad_examples:
                raise data.BadData(f"{sentence} Mend it, or raise max_bad_examples, which is {self._max_bad_examples}.")
            if is_new:
                print(f"Left out: {sentence}", file=sys.stderr, flush=True)

    def _look_through(self, files):
        names = tuple(file.name for file in files)
        if names in self._looked_through or sum(tf.io.gfile.stat(name).length for name in names) > LOOKED_THROUGH:
            return
        for file in files:
            for _, bad in file.all():
                self._count(bad)
        self._looked_through.add(names)
