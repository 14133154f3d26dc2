"""Small models with known weights, shared by the tests of this folder."""

import functools
import zlib

import numpy as np
import pytest

from switch_tf import SwitchConfig, SwitchTransformer

# Heads times d_kv is not d_model, and no two sizes are alike.
SMALL = {
    "vocab_size": 32, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 3, "num_encoder_layers": 2,
    "num_decoder_layers": 2, "dropout_rate": 0.0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12}
SPARSE = {**SMALL, "num_experts": 4, "min_expert_capacity": 1, "jitter_noise": 0.0}


def set_weights(model):
    """Gives every weight random values that depend on its path alone: two models of one structure are the same."""
    for variable in model.variables:
        path = variable.path.partition("/")[2]
        rng = np.random.RandomState(zlib.crc32(path.encode()))
        noise = rng.randn(*variable.shape)
        if path.endswith("scale"):
            variable.assign(1 + 0.2 * noise)
        elif path.endswith("embedding"):
            variable.assign(noise)
        else:
            # The sum runs over d_model, d_ff, or heads and d_kv; queries are smaller by sqrt(d_kv).
            is_query = path.endswith("/query")
            is_projection = is_query or path.endswith(("/key", "/value"))
            fan_in = variable.shape[0] if is_projection else np.prod(variable.shape[:-1][-2:])
            variable.assign(noise / (fan_in * (variable.shape[-1] if is_query else 1)) ** 0.5)


@functools.cache
def cached_model(dtype, items):
    model = SwitchTransformer(SwitchConfig(**dict(items)), dtype=dtype)
    model.build()
    set_weights(model)
    return model


@pytest.fixture(scope="session")
def make_model():
    """A function that makes a model, sparse unless told otherwise; tests share models and must not change them."""

    def make(dtype="float32", is_sparse=True, **overrides):
        return cached_model(dtype, tuple({**(SPARSE if is_sparse else SMALL), **overrides}.items()))

    return make


@pytest.fixture(scope="session")
def fresh_model():
    """The same without sharing, for tests that change the model."""

    def make(dtype="float32", is_sparse=True, **overrides):
        return cached_model.__wrapped__(dtype, tuple({**(SPARSE if is_sparse else SMALL), **overrides}.items()))

    return make


@pytest.fixture
def features():
    """3 examples: 8 inputs and 6 targets, padded to different lengths; inputs are the targets shifted right."""
    rng = np.random.RandomState(0)
    inputs, targets = rng.randint(1, 32, (3, 8)), rng.randint(1, 32, (3, 6))
    for row, (num_inputs, num_targets) in enumerate(((8, 6), (5, 4), (3, 1))):
        inputs[row, num_inputs:] = 0
        targets[row, num_targets:] = 0
    shifted = np.concatenate([np.zeros((3, 1), int), targets[:, :-1]], axis=1)
    return {"encoder_input_tokens": inputs.astype("int32"), "decoder_input_tokens": shifted.astype("int32"),
            "decoder_target_tokens": targets.astype("int32")}
