"""Switch layers and their inputs, for tests."""

import numpy as np

from switch_tf.layers import SwitchFeedForward

D_MODEL, D_FF = 4, 6


def make_layer(num_experts=3, seed=0, d_model=D_MODEL, **kwargs):
    """A layer with random weights large enough that routes and outputs differ clearly."""
    layer = SwitchFeedForward(num_experts, **{"d_ff": D_FF, "min_expert_capacity": 1, **kwargs})
    layer.build((None, None, d_model))
    rng = np.random.RandomState(seed)
    for weight in layer.weights:
        weight.assign(rng.randn(*weight.shape))
    return layer


def make_inputs(batch=2, length=6, seed=1, share_real=0.7):
    rng = np.random.RandomState(seed)
    return rng.randn(batch, length, D_MODEL).astype("float32"), rng.rand(batch, length) < share_real
