"""Logits of a bfloat16 model, and the answer that is read from them, under layouts: tables that are whole or split."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import losses
from switch_tf.layers import LogitsDense, TokenEmbedding
from switch_tf.partitioning.variables import assign

VOCAB_SIZE, D_MODEL, SHAPE = 64, 32, (8, 4)


def _layers():
    """Both ways to logits, with the same numbers: those of the last 8 words are those of the first 8."""
    table = 4 * np.random.RandomState(0).randn(VOCAB_SIZE, D_MODEL)
    table[-8:] = table[:8]
    tied, untied = (TokenEmbedding(VOCAB_SIZE, D_MODEL, dtype="mixed_bfloat16"),
                    LogitsDense(VOCAB_SIZE, dtype="mixed_bfloat16"))
    for layer in (tied, untied):
        layer.build((None, None, D_MODEL))
    return table.astype("float32"), tied, untied


@pytest.mark.parametrize("name, mesh_shape", [
    ("data_model", "data=2,model=2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("expert_model", "data=2,model=2"), ("fully_sharded", "data=2"), ("fully_sharded_model", "data=2,model=2"),
        ("expert", "data=2"), ("single", None)))])
def test_under_a_layout_logits_are_float32_sums_and_the_first_of_equals_is_the_answer(
        name, mesh_shape, make_partitioner):
    partitioner = make_partitioner(name, mesh_shape)
    with partitioner.creates_variables():
        table, tied, untied = _layers()
    for variable, value in ((tied.embedding, table), (untied.kernel, table.T)):
        assign(variable, value)
    tokens = np.random.RandomState(1).randint(0, 8, SHAPE).astype("int32")

    def call(features):
        # What a word's own row says of a word is a sum of squares, the largest of all.
        hidden = tied(features["tokens"])
        answers = [losses.cross_entropy(to_logits(hidden), targets, tf.ones(SHAPE))[2].total
                   for to_logits in (tied.attend, untied) for targets in (features["tokens"], features["equals"])]
        return tied.attend(hidden), untied(hidden), answers

    features = partitioner.place({"tokens": tokens[None], "equals": tokens[None] + VOCAB_SIZE - 8})
    *all_logits, answers = partitioner.results(call)(features)
    rounded = tf.cast(tf.cast(table, tf.bfloat16), tf.float64).numpy()
    exact = np.einsum("blm,vm->blv", rounded[tokens], rounded)
    for logits in all_logits:
        # 32 terms of about 16; in bfloat16 the largest of them alone would be off by 2.
        np.testing.assert_allclose(logits, exact, rtol=0, atol=5e-4)
    assert [float(answer) for answer in answers] == [32, 0, 32, 0]
