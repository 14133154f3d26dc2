"""Trains the SentencePiece vocabulary of the docs corpus: `python -m switch_tf.tasks.train_vocabulary OUTPUT`.

The model in `vocabulary_files/` was made by this script and is kept, so that ids are the same everywhere whatever
sentencepiece does in its next version. Takes a few seconds.
"""

import io
import string
import sys
from pathlib import Path

import sentencepiece

from switch_tf.tasks import corpora

# 100 sentinels on top make 4096 ids, the vocabulary of the tiny presets.
NUM_PIECES = 3996


def train(paragraphs: list[str], num_pieces: int = NUM_PIECES) -> bytes:
    """Returns a serialised unigram model, the same bytes whenever the paragraphs are the same.

    Args:
        paragraphs: texts to learn the pieces from.
        num_pieces: int. Size of the vocabulary without sentinels: padding 0, end of sequence 1, unknown 2.
    """
    model = io.BytesIO()  # a file name would be written into the model
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(paragraphs),
        model_writer=model,
        model_type="unigram",
        vocab_size=num_pieces,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        pad_piece="<pad>", eos_piece="</s>", unk_piece="<unk>",
        # Without these two even a question mark was unknown.
        byte_fallback=True,
        required_chars="".join(c for c in string.printable if c.isprintable() and c != " "),
        character_coverage=0.9995,
        seed_sentencepiece_size=100_000,
        num_threads=1,  # the pieces depend on it
        minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


if __name__ == "__main__":
    documents = corpora.docs_corpus("train")
    Path(sys.argv[1]).write_bytes(train([paragraph for text in documents for paragraph in text.split("\n")]))
