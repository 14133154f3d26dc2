"""Keras' `fit` and `evaluate` under MirroredStrategy: the losses of one device, and random numbers in every replica."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.callbacks import RouterStatistics
from switch_tf.layers import SwitchFeedForward, TokenEmbedding

# Each sequence is a group, so groups of one device and of two replicas are the same.
MODEL = {"vocab_size": 64, "d_model": 16, "d_ff": 16, "d_kv": 4, "num_heads": 2, "num_encoder_layers": 1,
         "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_experts": 4,
         "group_size": 8, "min_expert_capacity": 1, "load_balancing_loss_weight": 0.5, "router_z_loss_weight": 0.5}
QUIET = {"dropout_rate": 0.0, "jitter_noise": 0.0}
NOISY = {"dropout_rate": 0.2, "jitter_noise": 0.2, "expert_dropout_rate": 0.2}
IDS = np.random.default_rng(0).integers(2, 64, (8, 8)).astype("int32")
FEATURES = {"encoder_input_tokens": IDS, "decoder_input_tokens": IDS}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mirrored():
    # Collectives have room for one group of devices in a process, and a test process has several.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"],
                                          cross_device_ops=tf.distribute.ReductionToOneDevice())


def scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def make(strategy, **changes):
    with scope(strategy):
        keras.utils.set_random_seed(0)
        model = SwitchTransformer(SwitchConfig(**{**MODEL, **changes}))
        model.build()
        model.compile(keras.optimizers.SGD(0.1), LOSS, jit_compile=False)
    return model


@pytest.mark.slow
def test_losses_and_router_statistics_are_those_of_one_device():
    found = []
    for strategy in (None, mirrored()):
        model = make(strategy, **QUIET)
        history = model.fit(FEATURES, IDS, batch_size=8, epochs=2, shuffle=False, verbose=0,
                            callbacks=[RouterStatistics()]).history
        found.append({**history, "evaluated": model.evaluate(FEATURES, IDS, batch_size=8, verbose=0)})
    one, two = found
    assert one["loss"][0] != one["loss"][1] and one["router/load_balancing_loss"][0] > 1
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_random_numbers_are_drawn_in_replicas_and_repeat():
    # Batches of 4 and 3 in steps of two, so that replicas have 2 and 2, and 2 and 1.
    def losses():
        model = make(mirrored(), **NOISY)
        model.compile(keras.optimizers.SGD(0.1), LOSS, jit_compile=False, steps_per_execution=2)
        return model.fit({name: ids[:7] for name, ids in FEATURES.items()}, IDS[:7], batch_size=4, epochs=2,
                         shuffle=False, verbose=0).history["loss"]

    first = losses()
    assert np.isfinite(first).all() and losses() == first


def test_a_layer_with_its_defaults_fits_and_adds_each_loss_once():
    found = []
    x = np.random.default_rng(1).normal(size=(8, 8, 16)).astype("float32")
    for strategy in (None, mirrored()):
        with scope(strategy):
            keras.utils.set_random_seed(0)
            inputs = keras.Input((8, 16))
            # Jitter too small to matter still draws numbers, and what replicas draw must not mix their losses.
            layer = SwitchFeedForward(4, 8, jitter_noise=1e-7, group_size=8, load_balancing_loss_weight=1.0)
            model = keras.Model(inputs, inputs + layer(inputs))
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        found.append(model.fit(x, x[..., ::-1], epochs=2, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_ids_reach_layers_of_a_users_model():
    class Hashed(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = TokenEmbedding(64, 8)
            self.experts = SwitchFeedForward(2, 8, router="hash")

        def build(self, input_shape):
            self.embedding.build(input_shape)
            self.experts.build((None, None, 8))

        def call(self, ids, training=False):
            return self.experts(self.embedding(ids), token_ids=ids, training=training)

    with mirrored().scope():
        model = Hashed()
        model.compile("sgd", "mse", jit_compile=False)
    assert np.isfinite(model.fit(IDS, np.ones((8, 8, 8)), verbose=0).history["loss"]).all()


def test_replicas_share_a_seed_and_draw_other_numbers():
    from switch_tf.ops import random

    @tf.function
    def draw():
        return strategy.run(lambda: random.uniform(random.fresh_seed(), (2, 3)))

    strategy = mirrored()
    keras.utils.set_random_seed(7)
    first, second = (np.concatenate(strategy.experimental_local_results(draw())) for _ in range(2))
    assert len(np.unique(np.concatenate([first, second]))) == 24  # of 2 draws, 2 replicas, 6 numbers
