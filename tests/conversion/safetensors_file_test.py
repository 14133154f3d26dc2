"""Headers that a file contradicts. What is written is read by the package safetensors in checkpoint_files_test.py."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest

from switch_tf.conversion import checkpoint_files
from tests.conversion.shared import refusal

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path, header, data=bytes(24)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.fixture
def refused(tmp_path):
    """A function that writes a file; returns the sentence with which it is refused."""
    return lambda *arguments: refusal(checkpoint_files.open_safetensors, write(tmp_path / "a", *arguments))


def test_a_tensor_by_hand(tmp_path):
    path = write(tmp_path / "a", {"__metadata__": {"format": "pt"}, "w": ENTRY}, np.arange(6, dtype="<f4").tobytes())
    tensor = checkpoint_files.open_safetensors(path)["w"]
    assert (tensor.dtype, tensor.shape) == ("float32", (2, 3))
    np.testing.assert_array_equal(tensor.load(), [[0, 1, 2], [3, 4, 5]])


def test_scalars_empty_tensors_and_bfloat16(tmp_path):
    numbers = np.array([1.5, 2.0, 3.0], ml_dtypes.bfloat16)
    path = write(tmp_path / "a", {
        "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]},
        "scalar": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]},
        "row": {"dtype": "BF16", "shape": [2], "data_offsets": [2, 6]},
        "last": {"dtype": "F16", "shape": [0], "data_offsets": [6, 6]}}, numbers.tobytes())
    found = {name: np.asarray(tensor.load(), "float32")
             for name, tensor in checkpoint_files.open_safetensors(path).items()}
    assert {name: value.tolist() for name, value in found.items()} == {
        "empty": [], "scalar": 1.5, "row": [2.0, 3.0], "last": []}
    assert found["empty"].shape == (0, 3)


@pytest.mark.parametrize("name, values", [
    ("shape", ([2**31, 2**31], [-1, -6], [6.0], "23", 6, [True, 6], [1] * 9)), ("dtype", ([], None, "float32")),
    ("data_offsets", ([-24, 0], [24, 0], [0], None, ["0", "24"]))])
def test_entries_that_the_format_does_not_have(name, values, refused):
    for entry in (*({**ENTRY, name: value} for value in values), [[[]]]):
        assert "its header does not describe 'w' as the format asks; download it again." in refused({"w": entry})


@pytest.mark.parametrize(("header", "size", "message"), [
    ({"w": {**ENTRY, "data_offsets": [1, 25]}}, 24, "'w' ends at byte 25 of the 24"),
    ({"w": {**ENTRY, "data_offsets": [0, 20]}}, 24, "'w' of shape (2, 3) in F32 has 20 bytes"),
    ({"w": ENTRY, "v": ENTRY}, 24, "'w' begins at byte 0, where the tensor before it ends at byte 24"),
    ({"w": {**ENTRY, "data_offsets": [4, 28]}}, 28, "'w' begins at byte 4, where the tensor before it ends at byte 0"),
    ({"w": ENTRY}, 25, "its tensors end at byte 24 of the 25")])
def test_offsets_that_the_file_contradicts(header, size, message, refused):
    assert message in refused(header, bytes(size))


@pytest.mark.parametrize(("content", "message"), [
    *((struct.pack("<Q", length) + b"{}", f"its header of {length} bytes does not fit into 10")
      for length in (2**60, 2**64 - 1, 1000)), (b"\1\2", "is truncated or no safetensors file")])
def test_a_header_longer_than_the_file(content, message, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(content)
    assert message in refusal(checkpoint_files.open_safetensors, path)


def test_a_header_longer_than_any_model_needs(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<Q", 2**40))
    os.truncate(path, 2**41)  # a sparse file, which takes no room
    assert f"has a header of {2**40} bytes, and at most" in refusal(checkpoint_files.open_safetensors, path)


@pytest.mark.parametrize(("text", "message"), [
    (b'{"w": 1, "w": 2}', "the key 'w' is there twice"), (b'{"w": ' * 100_000, "nested too deeply"),
    (b'{"w": ' * 40 + b"1" + b"}" * 40, "nested too deeply"), (b"{" + b"\xff}", "is not JSON"),
    (b"[]", "must hold a JSON object, not list"), (b'{"w": ' + b"9" * 5000 + b"}", "is not JSON")])
def test_headers_that_are_no_json_objects(text, message, refused):
    assert message in refused(text)
