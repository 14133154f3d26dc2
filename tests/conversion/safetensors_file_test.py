"""Headers that a file contradicts. What is written is read by the package safetensors in checkpoint_files_test.py."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from switch_tf.conversion import checkpoint_files

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path, header, data=bytes(24)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def refusal(path):
    with pytest.raises(ValueError) as error:
        checkpoint_files.open_safetensors(path)
    return str(error.value)


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


@pytest.mark.parametrize("changes", [
    {"shape": [2**31, 2**31]}, {"shape": [-1, -6]}, {"shape": [6.0]}, {"shape": "23"}, {"shape": 6},
    {"shape": [True, 6]}, {"shape": [1] * 9}, {"dtype": []}, {"dtype": None}, {"dtype": "float32"},
    {"data_offsets": [-24, 0]},
    {"data_offsets": [24, 0]}, {"data_offsets": [0]}, {"data_offsets": None}, {"data_offsets": ["0", "24"]}])
def test_entries_that_the_format_does_not_have(changes, tmp_path):
    assert "its header does not describe 'w' as the format asks; download it again." in refusal(
        write(tmp_path / "a", {"w": {**ENTRY, **changes}}))
    assert "its header does not describe 'w'" in refusal(write(tmp_path / "a", {"w": [[[]]]}))


def test_offsets_that_the_file_contradicts(tmp_path):
    path = tmp_path / "a"
    assert "'w' ends at byte 25 of the 24" in refusal(write(path, {"w": {**ENTRY, "data_offsets": [1, 25]}}))
    assert "'w' of shape (2, 3) in F32 has 20 bytes" in refusal(write(path, {"w": {**ENTRY, "data_offsets": [0, 20]}}))
    assert "'w' begins at byte 0, where the tensor before it ends at byte 24" in refusal(
        write(path, {"w": ENTRY, "v": ENTRY}))
    assert "'w' begins at byte 4, where the tensor before it ends at byte 0" in refusal(
        write(path, {"w": {**ENTRY, "data_offsets": [4, 28]}}, bytes(28)))
    assert "its tensors end at byte 24 of the 25" in refusal(write(path, {"w": ENTRY}, bytes(25)))


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 1000])
def test_a_header_longer_than_the_file(length, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    assert f"its header of {length} bytes does not fit into 10" in refusal(path)
    path.write_bytes(b"\1\2")
    assert "is truncated or no safetensors file" in refusal(path)


def test_a_header_longer_than_any_model_needs(tmp_path):
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**40))
        file.truncate(2**41)  # a sparse file, which takes no room
    assert f"has a header of {2**40} bytes, and at most" in refusal(path)


@pytest.mark.parametrize(("text", "message"), [
    (b'{"w": 1, "w": 2}', "the key 'w' is there twice"), (b'{"w": ' * 100_000, "nested too deeply"),
    (b'{"w": ' * 40 + b"1" + b"}" * 40, "nested too deeply"), (b"{" + b"\xff}", "is not JSON"),
    (b"[]", "must hold a JSON object, not list"), (b'{"w": ' + b"9" * 5000 + b"}", "is not JSON")])
def test_headers_that_are_no_json_objects(text, message, tmp_path):
    assert message in refusal(write(tmp_path / "a", text))
