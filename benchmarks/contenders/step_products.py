"""The matrix products of a dense training step and nothing between them: the floor of a step in float32."""

import math

import tensorflow as tf


def products(job):
    """Builds every product of `train_step`'s dense model, forward and both of its gradients, on existing operands."""
    shapes = _shapes(job)
    made = [_operands(*shape) for shape in shapes]

    @tf.function(autograph=False)
    def multiply():
        return [product for x, weight, upstream in made for product in (
            tf.matmul(x, weight), tf.matmul(upstream, weight, transpose_b=True),
            tf.matmul(x, upstream, transpose_a=True))]

    def run():
        multiply()
        tf.test.experimental.sync_devices()

    gflop = sum(6 * math.prod(shape) for shape in shapes) / 1e9
    return run, {"gflop": round(gflop, 1), "versions": {"tensorflow": tf.__version__}}


def _operands(batch, rows, inner, columns):
    sizes = (batch, rows, inner), (batch, inner, columns), (batch, rows, columns)
    # Variables: TensorFlow would multiply constants once.
    return [tf.Variable(tf.random.normal(size[1:] if batch == 1 else size)) for size in sizes]


def _shapes(job):
    """Returns (batch, rows, inner, columns) of each product forward."""
    batch, d_model, d_ff, heads, d_kv = (job[name] for name in ("batch", "d_model", "d_ff", "heads", "d_kv"))
    sources, targets = job["encoder_length"], job["decoder_length"]

    def attention(queries, keys):
        projections = [(1, batch * queries, d_model, heads * d_kv), (1, batch * queries, heads * d_kv, d_model),
                       *[(1, batch * keys, d_model, heads * d_kv)] * 2]
        return [*projections, (batch * heads, queries, d_kv, keys), (batch * heads, queries, keys, d_kv)]

    def feed_forward(length):
        return [(1, batch * length, d_model, d_ff), (1, batch * length, d_ff, d_model)]

    encoder = attention(sources, sources) + feed_forward(sources)
    decoder = attention(targets, targets) + attention(targets, sources) + feed_forward(targets)
    return (encoder + decoder) * job["layers"] + [(1, batch * targets, d_model, job["vocab_size"])]
