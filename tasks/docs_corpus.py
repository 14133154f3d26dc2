"""Pretraining tasks on the docs corpus, English prose that needs no download (`corpora.py`).

* `docs_corpus_span_corruption`: T5's objective, 4096 SentencePiece ids.
* `docs_corpus_span_corruption_bytes`: the same on bytes, 359 ids.
* `docs_corpus_masked_tokens`: masked language modelling for an encoder without a decoder.

Importing registers the tasks and reads nothing. The corpus is collected when a data set is first read.
"""

from collections.abc import Callable, Mapping

import seqio

from switch_tf.tasks import corpora, in_memory, preprocessors, vocabularies


def read_documents(split: str) -> dict[str, list[str]]:
    """Returns the documents of a split, as the one feature "text"."""
    return {"text": corpora.docs_corpus(split)}


def source(
    read: Callable = read_documents, num_examples: Mapping[str, int] = corpora.NUM_DOCUMENTS
) -> in_memory.InMemorySource:
    """Returns a seqio source of the examples that `read` makes of the corpus, by default its documents."""
    return in_memory.InMemorySource("docs corpus", read, num_examples, corpora.content_digest)


def _add_task(name, objective, vocabulary):
    seqio.TaskRegistry.add(
        name,
        source=source(),
        preprocessors=preprocessors.pretraining(objective),
        output_features=preprocessors.output_features(vocabulary),
        metric_fns=[],
    )


_add_task("docs_corpus_span_corruption", preprocessors.span_corruption, vocabularies.docs_corpus())
_add_task("docs_corpus_span_corruption_bytes", preprocessors.span_corruption, vocabularies.byte())
_add_task("docs_corpus_masked_tokens", preprocessors.masked_tokens, vocabularies.docs_corpus())
