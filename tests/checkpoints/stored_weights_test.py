"""Weights in any stored form. That damaged and removed files are named is tested in averaging_test.py."""

import numpy as np
import pytest

from switch_tf.checkpoints import bundles, folders
from switch_tf.checkpoints.tensors import StoredWeights


def test_a_weight_that_is_stored_unfolded_is_read_as_it_is(tmp_path, monkeypatch):
    whole = np.arange(24, dtype="float32").reshape(4, 6)
    # DTensor has split dimension 0 over two mesh axes, of 2 devices each: new dimensions come first.
    bundles.write(tmp_path / "state", [("model/kernel", "", whole.reshape(2, 2, 6))])
    monkeypatch.setattr(folders, "describe", lambda checkpoint: {
        "variables": {"model/kernel": {"shape": [4, 6], "dtype": "float32", "unfolded": [[0, 2]]}}})
    weights = StoredWeights(tmp_path)
    np.testing.assert_array_equal(weights.read("model/kernel"), whole)
    np.testing.assert_array_equal(weights.read("model/kernel", slice(1, 3)), whole[1:3])
    with pytest.raises(folders.BrokenCheckpoint, match="has no model/bias, which a model of its configuration has"):
        weights.read("model/bias")


def test_rows_of_a_weight_that_was_written_in_pieces(tmp_path, monkeypatch):
    whole = np.arange(21, dtype="float32").reshape(7, 3)
    bundles.write(tmp_path / "state", [("model/kernel", f"7 3 {start},{size}:-", whole[start:start + size])
                                       for start, size in ((0, 3), (3, 2), (5, 2))])
    monkeypatch.setattr(folders, "describe", lambda checkpoint: {
        "variables": {"model/kernel": {"shape": [7, 3], "dtype": "float32"}}})
    weights = StoredWeights(tmp_path)
    for rows in (slice(None), slice(2, 6), slice(5, 7), slice(0, 1)):
        np.testing.assert_array_equal(weights.read("model/kernel", rows), whole[rows])


def test_what_is_no_float_is_a_damaged_checkpoint(tmp_path, monkeypatch):
    bundles.write(tmp_path / "state", [("model/kernel", "", np.arange(3))])
    monkeypatch.setattr(folders, "describe", lambda checkpoint: {
        "variables": {"model/kernel": {"shape": [3], "dtype": "int64"}}})
    monkeypatch.setattr(folders, "is_complete", lambda checkpoint: True)
    with pytest.raises(folders.BrokenCheckpoint, match="is damaged"):
        StoredWeights(tmp_path).read("model/kernel")
