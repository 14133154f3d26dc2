"""Sentinels that a text holds by chance, such as `<extra_id_0>` in a page on T5, are spelt out in ordinary pieces.

SentencePiece would make the control token of them, also of forms that its normalisation turns into one (full-width
letters, invisible characters). So this looks at tokens, not at text.
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
    """Replaces each sentinel by the pieces of its name, in data that were just tokenised.

    Not for a task whose text holds sentinels on purpose.

    Args:
        dataset: of `{feature: <int32>[tokens]}`, and whatever else.
        output_features: those of the task, whose vocabularies say which ids are sentinels.
    """
    present = output_features.keys() & dataset.element_spec.keys()
    spellings = {name: _spellings(output_features[name].vocabulary) for name in present}
    spellings = {name: spelling for name, spelling in spellings.items() if spelling}

    def spell_out_example(example):
        found = {
            name: tf.gather(tf.RaggedTensor.from_row_lengths(*spelling), example[name]).flat_values
            for name, spelling in spellings.items()
        }
        return {**example, **found}

    if not spellings:
        return dataset
    return dataset.map(spell_out_example, num_parallel_calls=tf.data.AUTOTUNE)


def _spellings(vocabulary):
    """Ordinary ids of every id, one after the other, and how many each has; None where text makes no sentinel."""
    if not (found := data.spellings(vocabulary)):
        return None
    pieces = [found.get(id_, [id_]) for id_ in range(vocabulary.vocab_size)]
    return tf.constant(list(itertools.chain(*pieces)), tf.int32), tf.constant([len(ids) for ids in pieces])
