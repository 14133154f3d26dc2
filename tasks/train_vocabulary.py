"""Trains the SentencePiece vocabulary of the docs corpus: `python -m switch_tf.tasks.train_vocabulary OUTPUT`.

The model in `vocabulary_files/` was made by this script and is kept, so that ids are the same everywhere whatever
sentencepiece does in its next version. Takes a few seconds. `switch-tf vocabulary` does the same for other texts.
"""

import sys
from pathlib import Path

from switch_tf.sentencepiece_training import train
from switch_tf.tasks import corpora

# 100 sentinels on top make 4096 ids, the vocabulary of the tiny presets.
NUM_PIECES = 3996

if __name__ == "__main__":
    documents = corpora.docs_corpus("train")
    Path(sys.argv[1]).write_bytes(train([line for text in documents for line in text.split("\n")], NUM_PIECES))
