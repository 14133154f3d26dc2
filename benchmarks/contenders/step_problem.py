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
