"""The context belongs to its thread, and reaches every function that TensorFlow traces elsewhere or later."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import context, data, partitioning
from switch_tf.layers import Dropout
from switch_tf.ops import forms, random
from switch_tf.ops.forms import rematerialize
from switch_tf.partitioning.backends.strategies import StrategyPartitioner
from switch_tf.partitioning.layout import Layout


def two_replicas():
    # The collectives of one process serve a single group of devices, and a test process has several.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())


def draw():
    """<float32>[2, 3], by the seed and the part of the batch of the context."""
    return random.uniform(random.fresh_seed(), (2, 3))


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(30)
    return results[0]


def test_scopes_nest_and_are_left_after_an_error():
    with context.within(seed=1, no_drop=True):
        with pytest.raises(KeyError), context.within(seed=2):
            assert (context.current().seed, context.current().no_drop) == (2, True)
            raise KeyError
        assert context.current().seed == 1
    assert (context.current().seed, context.current().no_drop) == (None, False)


def test_a_decorated_function_enters_its_scope_in_each_call():
    seed = context.within(seed=3)(lambda: context.current().seed)
    assert (seed(), seed(), context.current().seed) == (3, 3, None)


def test_a_thread_starts_with_the_defaults_and_a_carried_function_takes_its_context_along():
    with context.within(seed=4):
        carried = context.carried(lambda: context.current(), no_drop=True)
        assert in_thread(context.current).seed is None
    with context.within(seed=5):
        assert (in_thread(carried).seed, carried().seed, carried().no_drop) == (4, 4, True)
        assert (context.current().seed, context.current().no_drop) == (5, False)


def test_threads_that_trace_at_the_same_time_do_not_see_each_other():
    barrier = threading.Barrier(2, timeout=30)

    def trace(seed):
        def traced(ids):
            with context.within(seed=seed):
                barrier.wait()  # both are inside of their scopes
                numbers = draw()
                barrier.wait()
            return numbers + 0 * tf.cast(ids[:1], tf.float32)

        return lambda: forms.compiled(traced)(tf.zeros([3], tf.int32)).numpy()

    others = []
    thread = threading.Thread(target=lambda: others.append(trace(7)()))
    thread.start()
    mine = trace(8)()
    thread.join(30)
    for seed, numbers in ((7, others[0]), (8, mine)):
        with context.within(seed=seed):
            np.testing.assert_array_equal(numbers, draw())


def test_map_functions_of_a_dataset_are_traced_in_the_context():
    with context.within(seed=6, part=context.Part(2, 1)):
        examples = tf.data.Dataset.range(4).map(lambda _: draw(), num_parallel_calls=2)
        expected = draw()
    for numbers in examples:  # read by threads of TensorFlow, after the scope
        np.testing.assert_array_equal(numbers, expected)


def test_passes_in_a_map_function_have_no_end_where_the_scope_says_so():
    def count(is_endless):
        with context.within(endless_passes=is_endless):
            numbers = tf.data.Dataset.range(1).flat_map(
                lambda _: data.passes(lambda key: tf.data.Dataset.range(3), seed=1))
        return len(list(numbers.take(7)))

    assert (count(False), count(True)) == (3, 7)


def test_a_function_with_autograph_sees_the_context():
    @tf.function
    def traced(x):
        if tf.reduce_sum(x) > 0:  # makes AutoGraph convert the function
            with random.random_seed(9):
                return x + draw()
        return x

    x = tf.ones([2, 3])
    with random.random_seed(9):
        np.testing.assert_array_equal(traced(x), x + draw())


def test_replicas_of_a_partitioner_see_the_scopes_around_it():
    strategy = two_replicas()
    partitioner = StrategyPartitioner(Layout("data=2", (("batch", "data"),)), strategy)

    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            return partitioner.gather_rows(draw())

    with context.within(seed=11):
        program = partitioner.compile(partitioner.results(call))
        found = program({"ids": tf.zeros([1, 4, 1], tf.int32)})
        np.testing.assert_array_equal(found, random.uniform(random.fresh_seed(), (4, 3)))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_rematerialised_layers_of_replicas_recompute_in_their_context(is_compiled):
    strategy, dropout = two_replicas(), Dropout(0.5)
    x = tf.random.stateless_normal([4, 8], (0, 1))

    def gradient(is_rematerialised):
        def of_replica(index):
            with tf.GradientTape() as tape:
                tape.watch(x)
                with random.random_seed(5), partitioning.part_of_batch(2, index):
                    run = rematerialize if is_rematerialised else lambda function, x: function(x)
                    loss = tf.reduce_sum(run(lambda x: dropout(x, training=True) ** 2, x))
            return tape.gradient(loss, x)

        def all_replicas():
            indices = strategy.experimental_distribute_values_from_function(
                lambda replica: tf.constant(replica.replica_id_in_sync_group))
            return strategy.experimental_local_results(strategy.run(of_replica, args=(indices,)))

        return [value.numpy() for value in (tf.function(all_replicas) if is_compiled else all_replicas)()]

    kept, recomputed = gradient(False), gradient(True)
    np.testing.assert_array_equal(recomputed, kept)
    assert np.any(kept[0] != kept[1]) and np.any(kept[0] == 0)


def test_a_recomputation_records_no_routes():
    x = tf.ones([2, 3])

    def function(x):
        if context.current().routes is not None:
            context.current().routes.append(x)
        return x**2

    recorded = []
    with context.within(routes=recorded), tf.GradientTape() as tape:
        tape.watch(x)
        y = rematerialize(function, x)
    np.testing.assert_array_equal(tape.gradient(y, x), 2 * x)
    assert recorded == []


@pytest.mark.slow
def test_fit_of_a_model_with_remat_under_two_replicas_makes_the_same_losses():
    from switch_tf import SwitchConfig, SwitchTransformer

    ids = np.random.default_rng(0).integers(2, 32, (4, 4)).astype("int32")
    features, losses = {"encoder_input_tokens": ids, "decoder_input_tokens": ids}, []
    for remat in (False, True):
        with two_replicas().scope():
            keras.utils.set_random_seed(1)
            model = SwitchTransformer(SwitchConfig(
                vocab_size=32, d_model=8, d_ff=8, d_kv=4, num_heads=2, num_encoder_layers=1, num_decoder_layers=1,
                encoder_sparse_step=1, decoder_sparse_step=0, num_experts=2, group_size=4, min_expert_capacity=1,
                dropout_rate=0.3, jitter_noise=0.2, remat=remat))
            model.build()
            model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                          jit_compile=False)
        losses.append(model.fit(features, ids, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"])
    assert losses[0][0] != losses[0][1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
