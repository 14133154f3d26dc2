"""Ordinary pieces for sentinels that occur in plain text, such as `<extra_id_0>` in a page on T5.

SentencePiece turns them into control tokens, as it does with forms that its normalisation maps to one (full-width
letters, invisible characters). So tokens are replaced, not text.
"""

import itertools
from collections.abc import Mapping

import seqio
import tensorflow as tf

from switch_tf import data


@data.typed_sentinels("spelt_out")
def spell_out(
    dataset: tf.data.Dataset,
    output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
    """Replaces each sentinel by the pieces of its name, directly after tokenisation.

    It must not be used for a task with intended sentinels in its text.

    Args:
        dataset: Dataset of `{feature: <int32>[tokens]}` and other entries.
        output_features: Features of the task. Their vocabularies define the sentinels.
    """
    present = output_features.keys() & dataset.element_spec.keys()
    spellings = {name: _spellings(output_features[name].vocabulary) for name in present}
    spellings = {name: spelling for name, spelling in spellings.items() if spelling}

    def spell_out_example(example):
        spelt_out = {
            name: tf.gather(tf.RaggedTensor.from_row_lengths(*spelling), example[name]).flat_values
            for name, spelling in spellings.items()
        }
        return {**example, **spelt_out}

    if not spellings:
        return dataset
    return dataset.map(spell_out_example, num_parallel_calls=tf.data.AUTOTUNE)


def _spellings(vocabulary):
    """Returns the ordinary ids of every id, concatenated, and their counts, None if text never becomes a sentinel."""
    if not (names := data.spellings(vocabulary)):
        return None
    pieces = [names.get(id_, [id_]) for id_ in range(vocabulary.vocab_size)]
    return tf.constant(list(itertools.chain(*pieces)), tf.int32), tf.constant([len(ids) for ids in pieces])
