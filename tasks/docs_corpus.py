"""Pretraining tasks on the docs corpus, English prose that needs no download (`corpora.py`).

* `docs_corpus_span_corruption`: T5's objective, 4096 SentencePiece ids.
* `docs_corpus_span_corruption_bytes`: the same on bytes, 359 ids.
* `docs_corpus_masked_tokens`: masked language modelling for an encoder without a decoder.

Importing registers them and reads nothing; the corpus is collected when a data set is first asked for.
"""

from collections.abc import Callable, Mapping

import seqio
import tensorflow as tf

from switch_tf.tasks import corpora, preprocessors, vocabularies


def read_documents(split: str) -> dict[str, list[str]]:
    """Returns the documents of a split, as the one feature "text"."""
    return {"text": corpora.docs_corpus(split)}


class DocsCorpusSource(seqio.DataSource):
    """Examples from the corpus as a seqio source: its documents, `{"text": string}`, where nothing else is said.

    All of them are shuffled, not a window of them, in an order that a checkpoint of the iterator holds as one key.

    Args:
        read: function from a split to its examples, `{feature: list of str}`.
        num_examples: split -> how many there are.
    """

    def __init__(self, read: Callable = read_documents, num_examples: Mapping[str, int] = corpora.NUM_DOCUMENTS):
        super().__init__(splits=tuple(num_examples), num_input_examples=dict(num_examples))
        self._read = read

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Any number of shards is served by `get_dataset`."""
        return True

    def list_shards(self, split: str) -> list[str]:
        """Returns one name, of no file: the corpus is not kept in shards."""
        return [f"docs corpus: {split}"]

    def fingerprint(self, split: str) -> str:
        """Returns what the text of every split is known by."""
        return corpora.SHA256[:16]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        """Returns the examples of a split, or every n-th of the shuffled examples for n shards."""
        texts = {name: tf.constant(column) for name, column in self._read(split).items()}
        count = self.num_input_examples(split)
        indices = _shuffled_indices(count, seed) if shuffle else tf.data.Dataset.range(count)
        if shard_info:
            indices = indices.shard(shard_info.num_shards, shard_info.index)

        def example(index):
            return {name: column[index] for name, column in texts.items()}

        return indices.map(example, num_parallel_calls=tf.data.AUTOTUNE)


def _shuffled_indices(count, seed):
    """Returns 0 to `count` - 1, in another order each time the data set is repeated.

    Dataset.shuffle would write its buffer, here 7 MB, into every checkpoint.
    """

    def epoch(key):
        shuffled = tf.random.experimental.stateless_shuffle(tf.range(count, dtype=tf.int64), seed=key)
        return tf.data.Dataset.from_tensor_slices(shuffled)

    numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)
    return numbers.batch(2, drop_remainder=True).take(1).flat_map(epoch)


def _add_task(name, objective, vocabulary):
    seqio.TaskRegistry.add(
        name,
        source=DocsCorpusSource(),
        preprocessors=preprocessors.pretraining(objective),
        output_features=preprocessors.output_features(vocabulary),
        metric_fns=[],
    )


_add_task("docs_corpus_span_corruption", preprocessors.span_corruption, vocabularies.docs_corpus())
_add_task("docs_corpus_span_corruption_bytes", preprocessors.span_corruption, vocabularies.byte())
_add_task("docs_corpus_masked_tokens", preprocessors.masked_tokens, vocabularies.docs_corpus())
