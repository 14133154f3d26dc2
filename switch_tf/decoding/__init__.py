"""What a model says, token by token: the most probable token, one drawn at random, or the most probable sequence.

Knows a model by its `prefill` and `decode_step` alone.
"""

from switch_tf.configs.choices import check_choice
from switch_tf.decoding.beam import Beam
from switch_tf.decoding.likelihood import log_likelihoods
from switch_tf.decoding.loop import END_ID, Decoded, bucketed_length, check_decodes, most_fused
from switch_tf.decoding.samplers import Greedy, Sample

SAMPLERS = {"greedy": Greedy, "sample": Sample, "beam": Beam}

__all__ = ["Beam", "Decoded", "END_ID", "Greedy", "SAMPLERS", "Sample", "bucketed_length", "check_decodes",
           "get_sampler", "log_likelihoods", "most_fused"]


def get_sampler(sampler):
    """A sampler as it is, or the one of that name with its defaults: "greedy", "sample" or "beam".

    Raises:
        Refusal: it is neither.
    """
    if isinstance(sampler, tuple(SAMPLERS.values())):
        return sampler
    check_choice("sampler", sampler, tuple(SAMPLERS))
    return SAMPLERS[sampler]()
