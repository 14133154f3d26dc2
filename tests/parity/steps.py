"""A small model, its batches, and the comparison of a partitioner's steps with those of one TensorFlow device."""

import functools
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import verification

OPTIMIZERS = {"adafactor": lambda: Adafactor(0.01), "adam": lambda: keras.optimizers.Adam(0.001)}
PLAIN = StepSettings()
# Kinds of models with the optimizer to train them. Adam reads its slots after it has updated them, which DTensor once
# let it do too early.
KINDS = [
    ({"routing_policy": "top_n", "num_selected_experts": 3, "activation": "geglu", "logits_via_embedding": False},
     "adam"),
    ({"routing_policy": "expert_choice"}, "adafactor"),
    ({"expert_sublayers": "feed_forward_and_attention"}, "adafactor"), ({"routing_policy": "top2"}, "adafactor"),
    ({"routing_policy": "hash"}, "adafactor"),
    ({"routing_policy": "ntlb", "semantics": "mtf", "extra_mlp": True}, "adafactor"),
    ({"routing_policy": "batch_prioritized", "num_selected_experts": 2, "exploration": "sample"}, "adafactor"),
    ({"routing_policy": "sinkhorn", "semantics": "t5x"}, "adafactor")]


class Precision(NamedTuple):
    """A dtype, the number of steps to compare, and the largest differences that its rounding explains.

    Attributes:
        loss: Largest relative difference of the loss of the first step.
        rest: The same of the gradients, the later losses and the weights.
    """

    dtype: str
    steps: int
    loss: float
    rest: float


def small_config(**changes):
    """Returns a small configuration with dropout and jitter."""
    sizes = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_heads": 4, "d_kv": 8, "num_encoder_layers": 1,
             "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 0}
    routing = {"num_experts": 8, "num_groups_multiple": 16, "min_expert_capacity": 1, "jitter_noise": 0.1}
    return SwitchConfig(**{**sizes, **routing, "dropout_rate": 0.1, "expert_dropout_rate": 0.1, **changes})


def batches(config, count):
    """Returns sequences of different lengths, so that padding is spread unevenly over devices."""
    random = np.random.RandomState(0)
    made = []
    for _ in range(count):
        inputs, targets = (random.randint(1, config.vocab_size, (16, length)) for length in (16, 8))
        inputs[np.arange(16) > random.randint(4, 17, (16, 1))] = 0
        targets[:, 6:] *= random.randint(0, 2, (16, 2))
        if config.is_encoder_only:
            targets = inputs
        stack = "encoder" if config.is_encoder_only else "decoder"
        made.append({name: tf.constant(value, tf.int32) for name, value in {
            "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1], "encoder_input_tokens": inputs,
            f"{stack}_target_tokens": targets, f"{stack}_loss_weights": targets > 0}.items()})
    return made


def packed_batches(config, count):
    """Returns sequences of up to three examples each, and of padding, as seqio packs them."""
    random = np.random.RandomState(1)
    made = []
    for _ in range(count):
        features = {}
        for stack, length in (("encoder", 16), ("decoder", 8)):
            ends = np.sort(random.randint(1, length + 1, (16, 3)))  # of each example; one may be empty
            places = np.arange(length)
            segments = 1 + (places[:, None] >= ends[:, None, :]).sum(-1)
            segments[segments > 3] = 0
            starts = np.pad(ends, ((0, 0), (1, 0)))[np.arange(16)[:, None], np.maximum(segments - 1, 0)]
            positions, is_real = (places - starts) * (segments > 0), segments > 0
            tokens = random.randint(1, config.vocab_size, (16, length)) * is_real
            features |= {f"{stack}_segment_ids": segments, f"{stack}_positions": positions}
            if stack == "encoder":
                features["encoder_input_tokens"] = tokens
            else:
                before = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1] * (positions > 0)
                features |= {"decoder_input_tokens": before, "decoder_target_tokens": tokens,
                             "decoder_loss_weights": is_real}
        made.append({name: tf.constant(value, tf.int32) for name, value in features.items()})
    return made


@functools.cache
def _on_one_device(config, optimizer, settings, precision, make_batches):
    return _train(Partitioner(), config, optimizer, settings, precision, make_batches)


def _train(partitioner, config, optimizer, settings, precision, make_batches):
    twin = verification.Twin(lambda: SwitchTransformer(config, dtype=precision.dtype), OPTIMIZERS[optimizer],
                             partitioner, 7, settings)
    return twin.train(make_batches(config, precision.steps))


def assert_same(precision, partitioner, config, optimizer="adafactor", settings=PLAIN, make_batches=batches):
    """Asserts that a partitioner takes the steps of one device, and that something was learnt."""
    one, other = (_on_one_device(config, optimizer, settings, precision, make_batches),
                  _train(partitioner, config, optimizer, settings, precision, make_batches))
    found = verification.compare(one, other)
    assert found.loss.value <= precision.loss
    assert found.gradient.value <= precision.rest, found.gradient
    assert found.later_loss.value <= precision.rest
    assert found.weight.value <= precision.rest, found.weight
    assert len({one for one, _ in found.losses}) == precision.steps
