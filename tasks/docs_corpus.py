"""Pretraining tasks on the docs corpus, English prose that needs no download (`corpora.py`).

* `docs_corpus_span_corruption`: T5's objective, 4096 SentencePiece ids.
* `docs_corpus_span_corruption_bytes`: the same on bytes, 359 ids.
* `docs_corpus_masked_tokens`: masked language modelling for an encoder without a decoder.

Importing registers them and reads nothing; the corpus is collected when a data set is first asked for.
"""

import seqio
import tensorflow as tf

from switch_tf.tasks import corpora, preprocessors, vocabularies


class DocsCorpusSource(seqio.DataSource):
    """The documents of the corpus as a seqio source, one `{"text": string}` each.

    The whole corpus is shuffled, not a window of it, in an order that a checkpoint of the iterator holds as one key.
    """

    def __init__(self):
        super().__init__(splits=tuple(corpora.NUM_DOCUMENTS), num_input_examples=corpora.NUM_DOCUMENTS)

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
        """Returns the documents of a split, or every n-th of the shuffled documents for n shards."""
        texts = tf.constant(corpora.docs_corpus(split))
        indices = _shuffled_indices(len(texts), seed) if shuffle else tf.data.Dataset.range(len(texts))
        if shard_info:
            indices = indices.shard(shard_info.num_shards, shard_info.index)
        return indices.map(lambda index: {"text": texts[index]}, num_parallel_calls=tf.data.AUTOTUNE)


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
