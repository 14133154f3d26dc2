"""Weights of another format are read straight into any layout: each piece once, and nothing is written."""

import dataclasses
import math
import tempfile
import types

import keras
import numpy as np
import pytest
from tensorflow.experimental import dtensor

from switch_tf import SwitchTransformer, conversion
from switch_tf.checkpoints import tensors
from switch_tf.conversion import formats
from switch_tf.partitioning.variables import stored
from tests.conversion import mesh_tensorflow_checkpoints, t5x_checkpoints
from tests.conversion.shared import GOLDEN, assert_same_logits, built, golden, golden_variables, refusal

ONE, EXPERT = {"name": "single"}, {"name": "expert", "mesh_shape": "data=2"}
PJRT = {"backend": "pjrt"}
COLUMNS = EXPERT | PJRT | {"rules": (("batch", "data"), ("mlp", "data"))}  # pieces of the same rows


def _whole(variable):
    held = stored(variable)
    if not isinstance(held, dtensor.DVariable):
        return held.numpy()
    replicated = dtensor.Layout.replicated(held.layout.mesh, held.shape.rank)
    return dtensor.unpack(dtensor.relayout(held.read_value(), replicated))[0].numpy()


def _opened(folder, config=None):
    """Returns the weights that a new run reads from a folder."""
    return formats.opened(types.SimpleNamespace(initial_checkpoint=str(folder), initial_variables="all",
                                                model_dir="no-such-run"), config)


@pytest.mark.parametrize("layout", [ONE, EXPERT, ONE | PJRT, EXPERT | PJRT, COLUMNS], ids=str)
def test_weights_of_hugging_face_are_read_into_a_layout(layout, make_partitioner, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: pytest.fail("a copy is written"))
    expected = conversion.from_hugging_face(GOLDEN / "switch")
    keras.utils.set_random_seed(1)
    model = SwitchTransformer(expected.config)
    make_partitioner(**layout).build(model)
    weights = _opened(GOLDEN / "switch")
    read, sizes = weights.source.read, []

    def counted(name, rows):
        values = read(name, rows)
        sizes.append(values.size)
        return values

    weights.source = weights.source._replace(read=counted)
    variables = tensors.state_variables(model)
    assert tensors.start(weights, variables) == []
    # Replicas of a piece take one reading, and so do all pieces of a weight: they may lie in one chunk.
    assert len(sizes) == len(expected.weights)
    assert sum(sizes) == sum(math.prod(variable.shape) for variable in expected.weights)
    for path, wanted in tensors.state_variables(expected).items():
        np.testing.assert_array_equal(_whole(variables[path]), wanted.numpy(), err_msg=path)


@pytest.mark.parametrize(("make", "checkpoints", "name"), [
    (golden, t5x_checkpoints, ""), (golden_variables, mesh_tensorflow_checkpoints, "model.ckpt-7")])
def test_a_run_starts_from_a_checkpoint_with_its_own_configuration(make, checkpoints, name, tmp_path):
    config, arrays = make("switch")
    folder = checkpoints.write(tmp_path / "checkpoint_7", arrays) / name
    model = built(config)
    tensors.start(_opened(folder, config), tensors.state_variables(model))
    assert_same_logits(model, "switch")
    assert "has shape (64, 16), but its configuration asks for (80, 16)" in refusal(
        _opened, folder, dataclasses.replace(config, vocab_size=80))
