import os
import pickle
import sys
import zipfile

import numpy as np
import pytest

from switch_tf.conversion import checkpoint_files
from tests.conversion.shared import GOLDEN, refusal


def write(path, program, storages=(bytes(16),), compression=zipfile.ZIP_STORED, byte_order=b"little"):
    """An archive like torch.save's."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", byte_order)
        for key, numbers in enumerate(storages):
            archive.writestr(f"archive/data/{key}", numbers)
    return path


@pytest.fixture
def refused(tmp_path):
    """A function that writes an archive; returns the sentence with which it is refused."""
    return lambda *arguments, **options: refusal(
        checkpoint_files.open_pytorch, write(tmp_path / "a.bin", *arguments, **options))


def tensor_program(offset=0, shape=(2,), strides=(1,), storage="FloatStorage", key="0"):
    """The pickle of {"w": tensor}, protocol 2 as torch.save writes it, put together by hand."""
    def plain(value):
        return pickle.dumps(value, protocol=2)[2:-1].replace(b"q\x00", b"")  # without header, end and memo

    storage = (b"(" + plain("storage") + f"ctorch\n{storage}\n".encode() + plain(key) + plain("cpu") + plain(4) + b"tQ")
    tensor = (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + plain(offset) + plain(shape) + plain(strides)
              + b"\x89ccollections\nOrderedDict\n)RtR")
    return b"\x80\x02}" + plain("w") + tensor + b"s."


def test_every_kind_of_tensor_that_pytorch_wrote():
    # float32, float16, bfloat16, float64, int64, scalars, parameters, and views that share one storage.
    tensors = checkpoint_files.open_pytorch(GOLDEN / "tensors.bin")
    expected = np.load(GOLDEN / "tensors.npz")
    assert set(tensors) == set(expected.files)
    arrays = {name: tensor.load() for name, tensor in tensors.items()}
    for name, array in arrays.items():
        assert array.shape == tensors[name].shape
        np.testing.assert_array_equal(array.astype("float32"), expected[name])
    for name, dtype in (("plain", "float32"), ("half", "float16"), ("bfloat16", "bfloat16"), ("double", "float64"),
                        ("integers", "int64")):
        assert arrays[name].dtype == dtype
    assert "torch" not in sys.modules
    with pytest.raises(ValueError, match="read-only"):
        arrays["plain"][0] = 0


def test_a_tensor_by_hand(tmp_path):
    numbers = np.array([10, 11, 12, 13], "<f4").tobytes()
    program = tensor_program(offset=1, shape=(2, 2), strides=(1, 1))
    tensor = checkpoint_files.open_pytorch(write(tmp_path / "a.bin", program, [numbers]))["w"].load()
    # rows begin at elements 1 and 2
    np.testing.assert_array_equal(tensor, [[11, 12], [12, 13]])


class Malicious:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("function", [os.mkdir, eval, open, getattr, pickle.loads])
def test_code_is_refused_and_not_run(function, protocol, refused, tmp_path):
    target = tmp_path / "harm"
    argument = f"__import__('os').mkdir({str(target)!r})" if function is eval else str(target)
    message = refused(pickle.dumps({"w": Malicious(function, argument)}, protocol=protocol))
    assert "is refused: its pickle " in message and message.endswith("take the model.safetensors of the same model.")
    assert not target.exists()


@pytest.mark.parametrize(("program", "message"), [
    (pickle.dumps(Malicious(os.system, "true"), protocol=2),
     "its pickle asks for posix.system, which no dictionary"),
    (b"\x80\x02(i__builtin__\neval\n.", "its pickle uses INST, which no dictionary"),
    # Known functions with something other than what they take.
    *((program, "is damaged, or holds something other") for program in (
        b"\x80\x02ctorch\nFloatStorage\n)R.", b"\x80\x02ccollections\nOrderedDict\n}\x85R.",
        b"\x80\x02ccollections\nOrderedDict\n}b.", b"\x80\x02K\x01)R.", b"", b"\x80\x02}", b"\x80\x02K\x01.",
        b"\x80\x02}K\x01s.", b"\x80\x02h\x05.", b"\x80\x02t.", b"\x80\x02}K\x01K\x02s.",
        b"\x80\x02X\xff\xff\xff\x7fabc.")),
    (pickle.dumps({"epoch": 3}, protocol=2), "holds something under 'epoch' that is not a tensor"),
    (tensor_program(key="7"), "under 'w' that is not a tensor")])  # its storage is not in the archive
def test_other_programs_are_refused(program, message, refused):
    assert message in refused(program)


@pytest.mark.parametrize("described", [
    {"offset": 3}, {"offset": -1}, {"shape": (5,)}, {"shape": (2, 2), "strides": (3, 1)}, {"strides": (-1,)},
    {"shape": (0,)}, {"storage": "DoubleStorage", "shape": (3,)}, {"shape": (2**31 - 1,) * 2, "strides": (0, 0)}])
def test_a_tensor_outside_its_storage_is_refused(described, refused):
    message = refused(tensor_program(**described))
    assert "is damaged: 'w' of shape (" in message and "within the 16 bytes" in message


def test_other_files_are_refused(refused, tmp_path):
    deflated = refused(tensor_program(), compression=zipfile.ZIP_DEFLATED)
    assert "but not one that torch.save wrote" in deflated
    assert "big-endian" in refused(tensor_program(), byte_order=b"big")
    path = tmp_path / "b.bin"
    content = write(path, tensor_program()).read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", "3")
    for damaged, message in (
            (path.read_bytes(), "but not one that torch.save wrote"),
            # The first bytes of PyTorch's files before 1.6.
            (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
             "is not a zip archive: it is truncated, or was saved by PyTorch before 1.6"),
            ((GOLDEN / "tensors.bin").read_bytes()[:-100], "is not a zip archive"),
            (content.replace(b"_rebuild_tensor", b"_rebuild_tenser", 1), "is damaged (Bad CRC-32")):
        path.write_bytes(damaged)
        assert message in refusal(checkpoint_files.open_pytorch, path)
