"""Weights of another format are read straight into any layout: each piece once, and nothing is written."""

import math
import pathlib
import tempfile
import types

import keras
import numpy as np
import pytest
from tensorflow.experimental import dtensor

from switch_tf import SwitchTransformer, conversion
from switch_tf.checkpoints import tensors
from switch_tf.conversion import initial_weights
from switch_tf.partitioning.variables import stored

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
ONE, EXPERT = {"name": "single"}, {"name": "expert", "mesh_shape": "data=2"}
PJRT = {"backend": "pjrt"}


def _whole(variable):
    held = stored(variable)
    if not isinstance(held, dtensor.DVariable):
        return held.numpy()
    replicated = dtensor.Layout.replicated(held.layout.mesh, held.shape.rank)
    return dtensor.unpack(dtensor.relayout(held.read_value(), replicated))[0].numpy()


@pytest.mark.parametrize("layout", [ONE, EXPERT, ONE | PJRT, EXPERT | PJRT], ids=str)
def test_weights_of_hugging_face_are_read_into_a_layout(layout, make_partitioner, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: pytest.fail("a copy is written"))
    run = types.SimpleNamespace(initial_checkpoint=str(GOLDEN / "switch"), initial_variables="all",
                                model_dir=str(tmp_path / "run"))
    expected = conversion.from_hugging_face(GOLDEN / "switch")
    keras.utils.set_random_seed(1)
    model = SwitchTransformer(expected.config)
    make_partitioner(**layout).build(model)
    weights = initial_weights.opened(run, None)
    read, sizes = weights.source.read, []

    def counted(name, rows):
        values = read(name, rows)
        sizes.append(values.size)
        return values

    weights.source = weights.source._replace(read=counted)
    variables = tensors.state_variables(model)
    assert tensors.start(weights, variables) == []
    # Replicas of a piece take one reading.
    assert sum(sizes) == sum(math.prod(variable.shape) for variable in expected.weights)
    for path, wanted in tensors.state_variables(expected).items():
        np.testing.assert_array_equal(_whole(variables[path]), wanted.numpy(), err_msg=path)
