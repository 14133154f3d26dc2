"""Token-by-token decoding: greedy, sampling and beam search.

Samplers call only a model's `prefill` and `decode_step`, and read its `config` and dtype.
"""

from switch_tf.configs.choices import check_choice
from switch_tf.decoding.loop import (
    END_ID,
    Beam,
    Decoded,
    Greedy,
    Sample,
    Sampler,
    bucketed_length,
    check_decodes,
    log_likelihoods,
    max_fused_sequences,
)

SAMPLERS: dict[str, type[Sampler]] = {"greedy": Greedy, "sample": Sample, "beam": Beam}

__all__ = ["Beam", "Decoded", "END_ID", "Greedy", "SAMPLERS", "Sample", "Sampler", "bucketed_length",
           "check_decodes", "get_sampler", "log_likelihoods", "max_fused_sequences"]


def get_sampler(sampler: str | Sampler) -> Sampler:
    """Returns a sampler unchanged, or the sampler named "greedy", "sample" or "beam" with default arguments."""
    if isinstance(sampler, Sampler):
        return sampler
    check_choice("sampler", sampler, tuple(SAMPLERS))
    return SAMPLERS[sampler]()
