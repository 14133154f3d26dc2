"""A few sequences decode in one XLA program with the same results. `loop_test.py` compares with full passes."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import decoding
from switch_tf.ops import forms

pytestmark = pytest.mark.usefixtures("fusing")
LENGTH = 5
INPUTS = np.random.default_rng(0).integers(2, 32, (4, 7)).astype("int32")
INPUTS[1, 5:] = 0
# One layer a stack, as loop_test.py has the caches of several; tied, small models repeat themselves.
UNTIED = {"logits_via_embedding": False, "scale_decoder_outputs": False, "num_encoder_layers": 1,
          "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
MANY = np.concatenate([INPUTS, INPUTS, INPUTS])  # more sequences than are fused


def program(model, inputs, sampler=None):
    """A program that decodes, of the shape of inputs."""
    sampler = sampler or decoding.Greedy()
    decode = forms.compiled(
        lambda inputs: sampler.decode(model, {"encoder_input_tokens": inputs}, LENGTH))
    return decode.get_concrete_function(tf.TensorSpec(inputs.shape, tf.int32))


def is_fused(traced):
    return any("_XlaMustCompile" in node.node_def.attr and node.node_def.attr["_XlaMustCompile"].b
               for node in traced.graph.get_operations())


@pytest.mark.parametrize("sampler", [
    pytest.param(decoding.Sample(top_k=9, top_p=0.8, seed=3), marks=pytest.mark.slow), decoding.Beam(2, num_results=2)])
def test_samplers_and_scores_are_those_without(make_model, sampler):
    model = make_model(**UNTIED)
    traced = program(model, INPUTS, sampler)
    assert is_fused(traced)
    found, expected = traced(tf.constant(INPUTS)), sampler.decode(model, {"encoder_input_tokens": INPUTS}, LENGTH)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)
    assert len(np.unique(found.ids)) > 5


@pytest.mark.slow
def test_in_bfloat16_scores_are_as_far_off_as_bfloat16_is(make_model):
    found = [program(make_model(dtype, **UNTIED), INPUTS)(tf.constant(INPUTS)) for dtype in (
        "float32", "mixed_bfloat16")]
    is_same = np.all(found[0].ids == found[1].ids, axis=(1, 2))  # nearly level tokens may change places
    assert is_same.sum() > 1
    np.testing.assert_allclose(found[0].scores[is_same], found[1].scores[is_same], rtol=0.05)


def test_what_xla_cannot_compile_or_nobody_measured_is_not_fused(make_model):
    model = make_model(**UNTIED)
    assert not is_fused(program(model, MANY))
    any_size = forms.compiled(
        lambda inputs: decoding.Greedy().ids(model, {"encoder_input_tokens": inputs}, LENGTH), ranks=(2,))
    assert not is_fused(any_size.get_concrete_function())
    assert not is_fused(program(make_model(dispatch="ragged", **UNTIED), INPUTS))
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert not is_fused(program(model, INPUTS))
