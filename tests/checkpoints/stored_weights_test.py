"""Weights in any stored form. That damaged and removed files are named is tested in averaging_test.py."""

import numpy as np
import pytest

from switch_tf.checkpoints import bundles, folders
from switch_tf.checkpoints.stored_weights import StoredWeights


def test_a_weight_that_is_stored_unfolded_is_read_as_it_is(tmp_path, monkeypatch):
    whole = np.arange(24, dtype="float32").reshape(4, 6)
    # DTensor has split dimension 0 over two mesh axes, of 2 devices each: new dimensions come first.
    bundles.write(tmp_path / "state", [("model/kernel", "", whole.reshape(2, 2, 6))])
    monkeypatch.setattr(folders, "describe", lambda checkpoint: {
        "variables": {"model/kernel": {"shape": [4, 6], "unfolded": [[0, 2]]}}})
    weights = StoredWeights(tmp_path)
    np.testing.assert_array_equal(weights.read("model/kernel"), whole)
    with pytest.raises(folders.BrokenCheckpoint, match="has no model/bias, which a model of its configuration has"):
        weights.read("model/bias")
