"""In a float64 model nothing is float32: no operation of a traced layer, or of a whole step, has a float32 result."""

import dataclasses

import keras
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.layers import Router, SwitchFeedForward
from switch_tf.training import train_step

# Without "hash": its gates are all 1 and exact in float32.
POLICIES = {
    "top2": {"second_expert_policy": "all", "second_place_loss_weight": 0.5}, "switch": {"router_dtype": "bfloat16"},
    "expert_choice": {}, "sinkhorn": {}, "ntlb": {}, "batch_prioritized": {"num_selected_experts": 2}}
QUICK = ("top2", "expert_choice")


def _float32_operations(function, *specs):
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return [operation.name for operation in graph.get_operations()
            if any(output.dtype == tf.float32 and not _is_for_a_sign(output) for output in operation.outputs)]


def _is_for_a_sign(tensor):
    """Keras' argmax looks for the sign of zeros in the bits of float32, and compares what it was given."""
    return all(consumer.type == "Bitcast" for consumer in tensor.consumers())


@pytest.mark.parametrize("policy", [pytest.param(policy, marks=() if policy in QUICK else pytest.mark.slow)
                                    for policy in POLICIES])
def test_a_sparse_layer_has_no_float32_island_in_float64(policy):
    router = Router(4, policy=policy, jitter_noise=0.0, dtype="float64", name="router", **POLICIES[policy])
    layer = SwitchFeedForward(4, 8, router=router, jitter_noise=0.0, dtype="float64")
    layer.build((None, None, 6))

    def compute(x, ids):
        with tf.GradientTape() as tape:
            outputs = layer(x, token_ids=ids, training=True)
            loss = tf.reduce_sum(outputs) + tf.add_n(layer.losses)
        return tape.gradient(loss, [variable.value for variable in layer.trainable_variables])

    assert _float32_operations(compute, tf.TensorSpec((2, 8, 6), tf.float64), tf.TensorSpec((2, 8), tf.int32)) == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"expert_sublayers": "feed_forward_and_attention", "extra_mlp": True}])
def test_a_whole_step_has_none(shallow_config, batch, changes):
    config = dataclasses.replace(shallow_config, dropout_rate=0.0, expert_dropout_rate=0.0, jitter_noise=0.0, **changes)
    keras.utils.set_random_seed(1)
    model = SwitchTransformer(config, dtype="float64")
    model.build()
    assert _float32_operations(lambda: train_step.compute_gradients(
        model, batch, 3, tf.constant(0, tf.int64), StepSettings())) == []
