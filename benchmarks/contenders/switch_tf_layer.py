"""switch_tf's sparse layer, and the floors it stands on: the dense layer and the experts' products alone.

A job with "accelerator" runs on the first GPU or TPU chip, as a program of the pjrt back end.
"""

import jax
import keras
import tensorflow as tf
from layer_problem import (
    LOAD_BALANCING_LOSS_WEIGHT,
    MIN_EXPERT_CAPACITY,
    ROUTER_Z_LOSS_WEIGHT,
    arrays,
    with_gradients,
)

from switch_tf import losses
from switch_tf.layers import FeedForward, SwitchFeedForward
from switch_tf.ops import dtypes
from switch_tf.partitioning import Layout
from switch_tf.partitioning.backends import create_partitioner
from switch_tf.partitioning.partitioner import Partitioner


def switch(job):
    """Builds `SwitchFeedForward` with the job's `dispatch`."""
    tokens, kernel, _ = arrays(job)
    partitioner = _partitioner(job)
    layer = SwitchFeedForward(
        job["experts"], job["d_ff"], group_size=job["group_tokens"], jitter_noise=0.0,
        train_capacity_factor=job["capacity_factor"], min_expert_capacity=MIN_EXPERT_CAPACITY, init_scale=1.0,
        dispatch=job["dispatch"], dtype=_dtype_policy(job))
    with partitioner.creates_variables():
        layer.build(tokens.shape)
    layer.router.kernel.assign(kernel)

    def forward(x):
        outputs, stats = layer.forward(x, training=True)
        return outputs, losses.router_loss(stats, LOAD_BALANCING_LOSS_WEIGHT, ROUTER_Z_LOSS_WEIGHT)

    def dropped(x):
        return layer.forward(x, training=True)[1].fraction_tokens_dropped.value

    share = float(_compiled(job, dropped, partitioner)(_inputs(job)[0]))
    return _measure(job, forward, layer, partitioner, fraction_dropped=round(share, 4))


def dense(job):
    """Builds `FeedForward` on the same tokens: the cost of a top-1 layer if routing were free and nobody had slots."""
    partitioner, layer = _partitioner(job), FeedForward(job["d_ff"], dtype=_dtype_policy(job))
    with partitioner.creates_variables():
        layer.build((None, None, job["d_model"]))
    return _measure(job, lambda x: (layer(x, training=True), 0.0), layer, partitioner)


def experts(job):
    """Builds the stacked products alone, on existing buffers: [experts, slots, d_model], every slot computed."""
    num_experts, d_model, d_ff = job["experts"], job["d_model"], job["d_ff"]
    slots = job["num_groups"] * job["capacity"]
    layer = keras.layers.Layer()
    wi = layer.add_weight((num_experts, d_model, d_ff), keras.initializers.RandomNormal(stddev=d_model**-0.5))
    wo = layer.add_weight((num_experts, d_ff, d_model), keras.initializers.RandomNormal(stddev=d_ff**-0.5))
    layer.built = True

    def batched(x):
        return tf.matmul(tf.nn.relu(tf.matmul(x, wi)), wo), 0.0

    def looped(x):
        return tf.stack([tf.matmul(tf.nn.relu(tf.matmul(own, first)), second) for own, first, second in zip(
            tf.unstack(x), tf.unstack(tf.convert_to_tensor(wi)), tf.unstack(tf.convert_to_tensor(wo)),
            strict=True)]), 0.0

    return _measure(job, looped if job["is_looped"] else batched, layer, _partitioner(job),
                    shape=(num_experts, slots, d_model))


def _partitioner(job):
    return create_partitioner(Layout(backend="pjrt")) if "accelerator" in job else Partitioner()


def _dtype_policy(job):
    return dtypes.dtype_policy(job.get("dtype", "float32"))


def _inputs(job):
    tokens, _, upstream = (tf.cast(array, job.get("dtype", "float32")) for array in arrays(job))
    return tokens, upstream


def _compiled(job, function, partitioner):
    """Returns a function of tensors, which are placed on the device once."""
    if "accelerator" not in job:
        return tf.function(function, jit_compile=job["xla"], autograph=False)
    program, placed = partitioner.compile(lambda features: function(*features.values())), {}

    def call(*tensors):
        if not placed:
            placed.update(partitioner.place({str(index): tensor for index, tensor in enumerate(tensors)}))
        return jax.block_until_ready(program(placed))

    return call


def _measure(job, forward, layer, partitioner, shape=None, **facts):
    """Returns the traced pass and its facts. `forward` maps tokens to `(outputs, what is added to the loss)`."""
    x, upstream = _inputs(job) if shape is None else (tf.random.normal(shape), tf.random.normal(shape))
    variables = [variable.value for variable in layer.trainable_variables]

    def forward_backward(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs, more_loss = forward(x)
            loss = tf.reduce_sum(tf.cast(outputs * upstream, tf.float32)) + more_loss
        # Dense tensors that are returned: a gradient that nobody reads would not be computed.
        return loss, [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, [x, *variables])]

    one_pass = forward_backward if with_gradients(job) else lambda x, upstream: forward(x)[0]
    compiled = _compiled(job, one_pass, partitioner)

    def run():
        results = compiled(x, upstream)
        tf.test.experimental.sync_devices()
        return results

    facts["output_shape"] = list(_compiled(job, lambda x: forward(x)[0], partitioner)(x).shape)
    facts["parameters"] = sum(variable.shape.num_elements() for variable in variables)
    return run, {**facts, "versions": {"tensorflow": tf.__version__, "keras": keras.__version__}}
