"""The batch of all training steps."""

import numpy as np


def batch(job):
    """Returns random tokens without padding.

    Args:
        job: dict with `batch`, `encoder_length`, `decoder_length` and `vocab_size`.

    Returns:
        `<int32>[batch, encoder_length], <int32>[batch, decoder_length]`.
    """
    random = np.random.default_rng(0)
    return tuple(random.integers(2, job["vocab_size"], (job["batch"], job[length])).astype(np.int32)
                 for length in ("encoder_length", "decoder_length"))


# Untrained models repeat the start token for every input, so that all rows want the same expert. These factors of the
# embedding and of the output kernels of cross-attention make their answers differ.
EMBEDDING_FACTOR, CROSS_ATTENTION_FACTOR = 0.1, 30.0


def tokens_of_a_step(ids) -> float:
    """Returns the mean number of different tokens in a step; `ids` is <int>[batch, length]."""
    return float(np.mean([len(set(column)) for column in np.asarray(ids).T.tolist()]))
