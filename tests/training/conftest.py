"""A model of a few thousand parameters, batches by hand, and a seqio task of a few sentences."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import pytest
import seqio
import tensorflow as tf

from switch_tf import SwitchConfig

SENTENCES = [f"the {animal} {verb} over the {place} and {more}" for animal in ("cat", "dog", "fox", "hen")
             for verb in ("runs", "leaps", "looks") for place in ("hill", "wall", "pond")
             for more in ("sleeps", "sings", "waits for rain")]


@pytest.fixture
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


@pytest.fixture(scope="session")
def sentences_task():
    """A task whose inputs are the first and targets the last bytes of a sentence."""
    name = "sentences"
    if name not in seqio.TaskRegistry.names():
        def read(split, shuffle_files, seed=None):
            part = SENTENCES[::6] if split == "validation" else [s for i, s in enumerate(SENTENCES) if i % 6]
            return tf.data.Dataset.from_tensor_slices({"inputs": [s[:-12] for s in part],
                                                       "targets": [s[-12:] for s in part]})

        feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
        seqio.TaskRegistry.add(name, source=seqio.FunctionDataSource(read, splits=("train", "validation")),
                               preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
                               output_features={"inputs": feature, "targets": feature})
    return name
