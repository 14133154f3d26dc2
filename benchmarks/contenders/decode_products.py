"""The matrix products of a dense model's steps of decoding and nothing between them: the floor in float32."""

import tensorflow as tf


def products(job):
    """Runs the decoder's products with weights and the logits', `max_length` times; attention's own are left out."""
    batch, d_model, d_ff, heads, d_kv = (job[name] for name in ("batch", "d_model", "d_ff", "heads", "d_kv"))
    width = heads * d_kv
    # Self-attention's four projections, cross-attention's two (its keys and values are made once), feed-forward.
    layer = [(d_model, width)] * 3 + [(width, d_model), (d_model, width), (width, d_model), (d_model, d_ff),
                                      (d_ff, d_model)]
    shapes = layer * job["layers"] + [(d_model, job["vocab_size"])]
    weights = [tf.Variable(tf.random.normal(shape)) for shape in shapes]

    @tf.function(autograph=False)
    def multiply(rows):
        def step(position, sums):
            # Rows of each step depend on those before, as tokens do.
            for weight in weights:
                inner = rows[:, :1] * 0.0 + sums[:, None] + tf.ones([batch, weight.shape[0]])
                sums = sums + 1e-9 * tf.matmul(inner, weight)[:, 0]
            return position + 1, sums

        return tf.while_loop(lambda position, _: position < job["max_length"], step, (0, tf.zeros([batch])))[1]

    rows = tf.random.normal((batch, 1))
    return lambda: multiply(rows).numpy(), {"versions": {"tensorflow": tf.__version__}}
