"""`switch-tf vocabulary`: trains a SentencePiece model on text files."""

import argparse

from etils import epy

from switch_tf import sentencepiece_training
from switch_tf.installation import quiet
from switch_tf.storage import lock

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import data
    from switch_tf.data import example_files

# The rows of an embedding are a multiple of it, which fills the tiles of an accelerator and is easy to split.
_ROWS = 128

EXAMPLES = r"""
switch-tf vocabulary --input texts.txt --size 8000 --output mine.model
switch-tf vocabulary --input pairs.jsonl --field inputs targets --size 8000 --output mine.model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the files to read, the size and the output."""
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE",
                        help="files or globs: .txt (a text a line), .jsonl, .json, .tsv, .csv, each also as .gz")
    parser.add_argument("--size", at_least=1, required=True,
                        help="pieces, without the 100 sentinels that every task adds")
    parser.add_argument("--output", required=True, metavar="FILE", help="the SentencePiece model to be written")
    parser.add_argument("--field", nargs="+", default=["text"], metavar="NAME",
                        help="keys or columns to read, numbers in tables without a header (default: text)")


def run(arguments: argparse.Namespace) -> tuple[dict, str]:
    """Trains a vocabulary; returns its sizes and the `vocab_size` that a model needs."""
    sentencepiece_training.check_output(arguments.output)
    with lock.held(arguments.output):
        quiet.import_tensorflow()
        fields = [int(name) if name.isdigit() else name for name in arguments.field]
        sample, num_texts = example_files.sample_sentences(arguments.input, fields)
        sentencepiece_training.train_file(sample, arguments.size, arguments.output)
    num_ids = arguments.size + data.NUM_SENTINELS
    result = {
        "output": arguments.output, "num_texts": num_texts, "num_sentences": len(sample),
        "num_pieces": arguments.size, "num_ids": num_ids, "vocab_size": -(-num_ids // _ROWS) * _ROWS,
        "characters_per_token": sentencepiece_training.characters_per_token(arguments.output, sample),
    }
    return result, sentencepiece_training.describe(result)
