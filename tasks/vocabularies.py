"""The vocabularies of the tasks. None reads its file before an id is needed, so importing needs no network.

seqio compares vocabularies by path and options, and a mixture needs equal ones: use these functions, which always
return the same object.
"""

import functools
from pathlib import Path

import seqio

from switch_tf import data

data.keep_jax_on_cpu()  # every module with tasks imports this one and seqio, whose metrics run on JAX

_FOLDER = Path(__file__).resolve().parent / "vocabulary_files"

NUM_SENTINELS = data.NUM_SENTINELS


@functools.cache
def docs_corpus() -> seqio.SentencePieceVocabulary:
    """4096 ids: 3996 pieces learnt from the docs corpus by `train_vocabulary.py`, and the sentinels."""
    return seqio.SentencePieceVocabulary(str(_FOLDER / "docs_corpus_4k.model"), NUM_SENTINELS)


@functools.cache
def source_corpus() -> seqio.SentencePieceVocabulary:
    """4096 ids: 3996 pieces learnt from the source corpus, which keep every space and newline, and the sentinels."""
    return seqio.SentencePieceVocabulary(str(_FOLDER / "source_corpus_4k.model"), NUM_SENTINELS)


@functools.cache
def byte() -> seqio.ByteVocabulary:
    """359 ids: padding, end of sequence and unknown, 256 bytes, and the sentinels."""
    return seqio.ByteVocabulary(NUM_SENTINELS)


@functools.cache
def t5() -> seqio.SentencePieceVocabulary:
    """32,100 ids: T5's 32,000 pieces of English, German, French and Romanian, and the sentinels.

    The same path and options as in t5's own tasks, so both can be mixed. The file beside it whose name ends in
    `.100extra` holds the sentinels already; with another hundred they would not be the ids T5 was trained with.
    """
    return seqio.SentencePieceVocabulary("gs://t5-data/vocabs/cc_all.32000/sentencepiece.model", NUM_SENTINELS)


@functools.cache
def mt5() -> seqio.SentencePieceVocabulary:
    """250,100 ids: mT5's 250,000 pieces and its sentinels, which this file holds already."""
    return seqio.SentencePieceVocabulary("gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model", 0)
