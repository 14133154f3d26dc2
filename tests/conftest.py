"""A model of a few thousand parameters, and a batch by hand.

Every test process has eight virtual CPU devices, which nothing but the tests of layouts uses.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig

NUM_DEVICES = 8

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES)


@pytest.fixture(scope="session")
def tiny_config():
    return SwitchConfig(vocab_size=384, d_model=16, d_ff=32, d_kv=8, num_heads=2, num_encoder_layers=2,
                        num_decoder_layers=2, num_experts=4, num_groups_multiple=4, min_expert_capacity=1,
                        dropout_rate=0.1, expert_dropout_rate=0.1, init_scale=0.1)


@pytest.fixture
def batch():
    """8 examples of 12 input and 6 target tokens, some of them shorter."""
    random = np.random.RandomState(0)
    inputs, targets = random.randint(3, 384, (8, 12)), random.randint(3, 384, (8, 6))
    inputs[2:5, 7:] = 0
    targets[4:, 4:] = 0
    features = {"encoder_input_tokens": inputs, "decoder_target_tokens": targets,
                "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
                "decoder_loss_weights": targets > 0}
    return {name: tf.constant(value, tf.int32) for name, value in features.items()}
