"""A sample of the sentences in text files, for the training of a vocabulary."""

import itertools
import random
import sys
from collections.abc import Sequence

import tqdm

from switch_tf.data.example_files import BadData, TextFile, find_files
from switch_tf.refusals import Refusal
from switch_tf.sentencepiece_training import sentences_of

# Larger samples hardly change the pieces, but cost time and memory.
MAX_SENTENCES = 1_000_000


def sample(patterns: Sequence[str], fields: Sequence[str | int]) -> tuple[list[str], int]:
    """Draws at most `MAX_SENTENCES` sentences from text files, each with the same probability.

    Args:
        patterns: Paths and globs, see `find_files`.
        fields: Keys or columns to read, see `TextFile`.

    Returns:
        (sentences, number of texts in the files).

    Raises:
        Refusal: A file is missing, or a text cannot be read.
    """
    sample, generator, num_texts, num_sentences = [], random.Random(0), 0, 0
    files = [TextFile(name, fields) for name in find_files("--input", patterns)]
    with tqdm.tqdm(desc=f"reading {len(files)} file{'s' * (len(files) > 1)}", unit=" texts",
                   mininterval=0.5) as progress:
        for records, faults in itertools.chain.from_iterable(file.all() for file in files):
            if faults:
                raise BadData(faults[0])
            num_texts += len(records)
            progress.update(len(records))
            for text in itertools.chain.from_iterable(records):
                for sentence in sentences_of(text):
                    num_sentences += 1
                    if len(sample) < MAX_SENTENCES:
                        sample.append(sentence)
                    elif (place := generator.randrange(num_sentences)) < MAX_SENTENCES:
                        sample[place] = sentence
    if not sample:
        raise Refusal(f"There is no text in {', '.join(patterns)}.")
    if num_sentences > len(sample):
        print(f"{len(sample):,} of {num_sentences:,} sentences are learned from.", file=sys.stderr)
    return sample, num_texts
