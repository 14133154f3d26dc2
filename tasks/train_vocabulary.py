"""Trains the SentencePiece vocabularies in `vocabulary_files/`: `python -m switch_tf.tasks.train_vocabulary FOLDER`.

The files are kept so that ids do not depend on the version of sentencepiece. Takes a minute. `switch-tf vocabulary`
does the same for other texts.
"""

import sys
from pathlib import Path

from switch_tf.sentencepiece_training import train
from switch_tf.tasks import corpora, source_corpus

# 100 sentinels on top make 4096 ids, the vocabulary of the tiny presets.
NUM_PIECES = 3996

# Sources of one file in this many are enough to learn pieces from.
_SOURCES_MODULUS = 10


def docs_corpus() -> bytes:
    """Returns the vocabulary of the docs corpus."""
    return train([line for text in corpora.docs_corpus("train") for line in text.split("\n")], NUM_PIECES)


def source_code() -> bytes:
    """Returns the vocabulary of the source corpus."""
    texts = source_corpus.read_sources("train")["text"][::_SOURCES_MODULUS]
    return train([line for text in texts for line in text.split("\n") if line], NUM_PIECES, keeps_whitespace=True)


if __name__ == "__main__":
    for name, model in (("docs_corpus_4k.model", docs_corpus()), ("source_corpus_4k.model", source_code())):
        (Path(sys.argv[1]) / name).write_bytes(model)
