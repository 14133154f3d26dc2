import os
import pathlib
import pickle
import sys
import zipfile

import numpy as np
import pytest

from switch_tf.conversion import checkpoint_files

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"


def write(path, program, storages=(), compression=zipfile.ZIP_STORED, byte_order=b"little"):
    """An archive like torch.save's."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", byte_order)
        for key, numbers in enumerate(storages):
            archive.writestr(f"archive/data/{key}", numbers)
    return path


def tensor_program(offset=0, shape=(2,), strides=(1,), storage="FloatStorage", key="0"):
    """The pickle of {"w": tensor}, protocol 2 as torch.save writes it, put together by hand."""
    def plain(value):
        return pickle.dumps(value, protocol=2)[2:-1].replace(b"q\x00", b"")  # without header, end and memo

    storage = (b"(" + plain("storage") + f"ctorch\n{storage}\n".encode() + plain(key) + plain("cpu") + plain(4) + b"tQ")
    tensor = (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + plain(offset) + plain(shape) + plain(strides)
              + b"\x89ccollections\nOrderedDict\n)RtR")
    return b"\x80\x02}" + plain("w") + tensor + b"s."


def refusal(path):
    with pytest.raises(ValueError) as error:
        checkpoint_files.open_pytorch(path)
    return str(error.value)


def test_every_kind_of_tensor_that_pytorch_wrote():
    # float32, float16, bfloat16, float64, int64, scalars, parameters, and views that share one storage.
    tensors = checkpoint_files.open_pytorch(GOLDEN / "tensors.bin")
    expected = np.load(GOLDEN / "tensors.npz")
    assert set(tensors) == set(expected.files)
    for name in expected.files:
        array = tensors[name].load()
        assert array.shape == tensors[name].shape
        np.testing.assert_array_equal(array.astype("float32"), expected[name])
    dtypes = {name: str(tensors[name].load().dtype) for name in ("plain", "half", "bfloat16", "double", "integers")}
    assert dtypes == {"plain": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64",
                      "integers": "int64"}
    assert "torch" not in sys.modules


def test_a_tensor_by_hand(tmp_path):
    numbers = np.array([10, 11, 12, 13], "<f4").tobytes()
    program = tensor_program(offset=1, shape=(2, 2), strides=(1, 1))
    tensor = checkpoint_files.open_pytorch(write(tmp_path / "a.bin", program, [numbers]))["w"].load()
    # rows begin at elements 1 and 2
    np.testing.assert_array_equal(tensor, [[11, 12], [12, 13]])


def test_tensors_are_read_only():
    tensor = checkpoint_files.open_pytorch(GOLDEN / "tensors.bin")["plain"].load()
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 0


class Malicious:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("function", [os.mkdir, eval, open, getattr, pickle.loads])
def test_code_is_refused_and_not_run(function, protocol, tmp_path):
    target = tmp_path / "harm"
    argument = f"__import__('os').mkdir({str(target)!r})" if function is eval else str(target)
    program = pickle.dumps({"w": Malicious(function, argument)}, protocol=protocol)
    message = refusal(write(tmp_path / "a.bin", program))
    assert "is refused: its pickle " in message and message.endswith("take the model.safetensors of the same model.")
    assert not target.exists()


def test_the_refusal_names_what_was_asked_for(tmp_path):
    program = pickle.dumps(Malicious(os.system, "true"), protocol=2)
    assert "its pickle asks for posix.system, which no dictionary" in refusal(write(tmp_path / "a.bin", program))
    program = b"\x80\x02(i__builtin__\neval\n."
    assert "its pickle uses INST, which no dictionary" in refusal(write(tmp_path / "a.bin", program))


def test_only_known_functions_are_called_with_what_they_take(tmp_path):
    for program in (b"\x80\x02ctorch\nFloatStorage\n)R.", b"\x80\x02ccollections\nOrderedDict\n}\x85R.",
                    b"\x80\x02ccollections\nOrderedDict\n}b.", b"\x80\x02K\x01)R."):
        assert "is damaged, or holds something other" in refusal(write(tmp_path / "a.bin", program))


@pytest.mark.parametrize("program", [b"", b"\x80\x02}", b"\x80\x02K\x01.", b"\x80\x02}K\x01s.", b"\x80\x02h\x05.",
                                     b"\x80\x02t.", b"\x80\x02}K\x01K\x02s.", b"\x80\x02X\xff\xff\xff\x7fabc."])
def test_nonsense_is_refused(program, tmp_path):
    assert "is damaged, or holds something other" in refusal(write(tmp_path / "a.bin", program))


@pytest.mark.parametrize("described", [
    {"offset": 3}, {"offset": -1}, {"shape": (5,)}, {"shape": (2, 2), "strides": (3, 1)}, {"strides": (-1,)},
    {"shape": (0,)}, {"storage": "DoubleStorage", "shape": (3,)}])
def test_a_tensor_outside_its_storage_is_refused(described, tmp_path):
    message = refusal(write(tmp_path / "a.bin", tensor_program(**described), [bytes(16)]))
    assert "is damaged: 'w' of shape (" in message and "within the 16 bytes" in message


def test_something_that_is_no_tensor_is_named(tmp_path):
    program = pickle.dumps({"epoch": 3}, protocol=2)
    assert "holds something under 'epoch' that is not a tensor" in refusal(write(tmp_path / "a.bin", program))
    # its storage is not in the archive
    assert "under 'w' that is not a tensor" in refusal(write(tmp_path / "a.bin", tensor_program(key="7"), [bytes(16)]))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")  # how PyTorch began files before 1.6
    assert "is not a zip archive: it is truncated, or was saved by PyTorch before 1.6" in refusal(path)
    path.write_bytes((GOLDEN / "tensors.bin").read_bytes()[:-100])
    assert "is not a zip archive" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", "3")
    assert "but not one that torch.save wrote" in refusal(path)
    assert "but not one that torch.save wrote" in refusal(
        write(path, tensor_program(), [bytes(16)], zipfile.ZIP_DEFLATED))
    assert "big-endian" in refusal(write(path, tensor_program(), [bytes(16)], byte_order=b"big"))
    damaged = bytearray(write(path, tensor_program(), [bytes(16)]).read_bytes())
    damaged[damaged.index(b"_rebuild_tensor")] ^= 1
    path.write_bytes(damaged)
    assert "is damaged (Bad CRC-32" in refusal(path)
