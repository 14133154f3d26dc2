"""The batch that every training step is given."""

import numpy as np


def batch(job):
    """Random tokens, none of them padding.

    Args:
        job: dict with `batch`, `encoder_length`, `decoder_length` and `vocab_size`.

    Returns:
        `<int32>[batch, encoder_length], <int32>[batch, decoder_length]`.
    """
    random = np.random.default_rng(0)
    return tuple(random.integers(2, job["vocab_size"], (job["batch"], job[length])).astype(np.int32)
                 for length in ("encoder_length", "decoder_length"))


# Untrained models answer each input with the start token, over and over, so that all rows want the same expert. What
# makes their answers differ: factors of the embedding, and of the kernels that lead out of attention to the inputs.
EMBEDDING_FACTOR, CROSS_ATTENTION_FACTOR = 0.1, 30.0


def tokens_of_a_step(ids) -> float:
    """How many different tokens the rows of a step have, on average: <int>[batch, length]."""
    return float(np.mean([len(set(column)) for column in np.asarray(ids).T.tolist()]))
