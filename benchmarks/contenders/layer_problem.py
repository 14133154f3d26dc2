"""The problem of all sparse layers: inputs, slots, loss weights."""

import numpy as np

LOAD_BALANCING_LOSS_WEIGHT = 1e-2
ROUTER_Z_LOSS_WEIGHT = 1e-3
MIN_EXPERT_CAPACITY = 4


def arrays(job):
    """Returns tokens, router kernel and output gradient, the same numbers in every framework.

    Tokens are N(0, 1), as after a normalisation. The router's kernel is N(0, 1 / d_model), for logits of variance 1.

    Args:
        job: dict with `num_groups`, `group_tokens`, `d_model` and `experts`.

    Returns:
        `<float32>[group, tokens, d_model], <float32>[d_model, experts], <float32>[group, tokens, d_model]`.
    """
    random = np.random.default_rng(0)
    shape = (job["num_groups"], job["group_tokens"], job["d_model"])
    kernel = random.standard_normal((job["d_model"], job["experts"]), dtype=np.float32) * job["d_model"] ** -0.5
    tokens = random.standard_normal(shape, dtype=np.float32)
    return tokens, kernel.astype(np.float32), random.standard_normal(shape, dtype=np.float32)


def with_gradients(job):
    """Whether the job includes the backward pass."""
    return {"forward": False, "forward_backward": True}[job["pass"]]


def expert_capacity(group_tokens, capacity_factor, experts):
    """Returns the slots per expert and group: the factor times an even share, rounded down, at least 4 if possible."""
    return min(group_tokens, max(MIN_EXPERT_CAPACITY, int(capacity_factor * group_tokens / experts)))
