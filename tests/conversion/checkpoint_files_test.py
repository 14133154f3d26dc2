import functools
import json
import shutil
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from switch_tf.conversion import checkpoint_files
from tests.conversion.shared import GOLDEN, assert_same_values, refusal

refused = functools.partial(refusal, checkpoint_files.open_folder)


def write(folder, tensors, dtype="float32"):
    written = checkpoint_files.Shards(folder, {name: tensor.shape for name, tensor in tensors.items()}, dtype)
    for tensor in tensors.values():
        written.append(tensor)
    written.finish()


TENSORS = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.arange(6, dtype="float32").reshape(3, 2).T,
           "c": np.array([7.0], "float32")}


def test_the_package_safetensors_reads_what_is_written(tmp_path):
    write(tmp_path, TENSORS)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert_same_values(safetensors.numpy.load_file(tmp_path / "model.safetensors"), {
        name: np.ascontiguousarray(tensor) for name, tensor in TENSORS.items()})


def test_shards(tmp_path):
    # 24, 24 and 4 bytes: with at most 30 in a file, the last two go together.
    with mock.patch.object(checkpoint_files, "MAX_SHARD_BYTES", 30):
        write(tmp_path, TENSORS)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 52}, "weight_map": {"a": first, "b": second, "c": second}}
    assert {path.name for path in tmp_path.iterdir()} == {first, second, "model.safetensors.index.json"}
    read = checkpoint_files.open_folder(tmp_path)
    for name, tensor in TENSORS.items():
        assert read[name].shape == tensor.shape
        np.testing.assert_array_equal(read[name].read(), tensor)


def test_bin_shards(tmp_path):
    shutil.copy(GOLDEN / "tensors.bin", tmp_path / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"plain": "pytorch_model-00001-of-00001.bin"}}))
    read = checkpoint_files.open_folder(tmp_path)
    assert set(read) == {"plain"}
    np.testing.assert_array_equal(read["plain"].read(), np.load(GOLDEN / "tensors.npz")["plain"])


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_small_floats_become_float32_exactly(dtype, tmp_path):
    tensor = np.array([1.5, -2.0, 3.0e-5], dtype)
    safetensors.numpy.save_file({"a": tensor}, tmp_path / "model.safetensors")
    read = checkpoint_files.open_folder(tmp_path)["a"].read()
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, tensor.astype("float32"))


def test_a_folder_without_tensors(tmp_path):
    (tmp_path / "tf_model.h5").touch()
    message = refused(tmp_path)
    assert "neither model.safetensors nor pytorch_model.bin" in message and "['tf_model.h5']" in message


def test_a_truncated_file(tmp_path):
    write(tmp_path, TENSORS)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "model.safetensors is truncated or no safetensors file" in refused(tmp_path)


@pytest.mark.parametrize(("index", "message"), [
    ('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}',
     "names the file 'two.safetensors', which is not in"),
    ('{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}',
     "says that one.safetensors holds 'b', but it does not"),
    ('{"weight_map": {"a": "../one.safetensors"}}', "names the file '../one.safetensors', which is not in"),
    ('{"metadata": {}}', 'has no "weight_map"'), ("{", "is not JSON"),
    ("[]", "must hold a JSON object, not list")])
def test_incomplete_shards(index, message, tmp_path):
    safetensors.numpy.save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert message in refused(tmp_path)
