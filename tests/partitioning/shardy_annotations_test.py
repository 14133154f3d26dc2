"""Lowered functions: annotations in Shardy's form, variables as arguments, and what they update."""

import re

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.partitioning import lowering
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.lowering import XlaAnnotator

LAYOUT = Layout("data=4,one=1,expert=2,model=3", (
    ("batch", ("expert", "one", "data")), ("expert", "expert"), ("mlp", "model"), ("embed", ("data", "model"))))


@pytest.mark.parametrize("axes, dimensions", [
    (("batch", "length", "mlp"), '{"expert", "data"}, {}, {"model"}'), (("length", "embed"), '{}, {"data", "model"}'),
    (("expert", "embed", "kv"), '{"expert"}, {"data", "model"}, {}'), (("length", "kv"), "{}, {}")])
def test_annotations_name_the_axes_of_the_mesh_the_outermost_first(axes, dimensions):
    annotator = XlaAnnotator(LAYOUT)
    program = lowering.lower(lambda x: annotator.constrain(x, axes), [tf.TensorSpec([24] * len(axes))], [])
    mesh = 'mesh<["data"=4, "one"=1, "expert"=2, "model"=3]>'
    text = lowering.text(program.module)
    assert f"sdy.sharding_constraint %0 <{mesh}, [{dimensions}]>" in text
    assert "mhlo.sharding" not in text and "custom_call" not in text


def test_the_gradient_of_an_annotated_tensor_lies_like_it():
    annotator = XlaAnnotator(LAYOUT)

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.square(annotator.constrain(x, ("length", "embed"))))
        return tape.gradient(y, x)

    text = lowering.text(lowering.lower(gradient, [tf.TensorSpec([24, 24])], []).module)
    assert len(re.findall(r'sdy\.sharding_constraint .*\[\{\}, \{"data", "model"\}\]', text)) == 2


def test_variables_are_arguments_after_the_functions_own():
    kept, updated = tf.Variable([1.0, 2.0]), tf.Variable(tf.zeros([2, 3]))

    def step(x):
        updated.assign_add(x * kept[:, None])
        return {"sum": tf.reduce_sum(x)}

    program = lowering.lower(step, [tf.TensorSpec([2, 3])], [updated, kept])
    assert [variable is updated for variable in program.captured].index(True) == program.updated[0]
    assert len(program.captured) == 2 and len(program.updated) == 1
    assert program.results == [((), np.float32)] and program.structure.keys() == {"sum"}
    with pytest.raises(ValueError, match="which is no variable of the model"):
        lowering.lower(step, [tf.TensorSpec([2, 3])], [updated])
