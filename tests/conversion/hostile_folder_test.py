"""Folders that would hang, exhaust the memory or end in a traceback: each is refused in one sentence, and soon."""

import json
import os
import pathlib
import shutil
import struct
import zipfile

import numpy as np
import pytest

from switch_tf import conversion
from switch_tf.conversion import checkpoint_files

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"


@pytest.fixture
def folder(tmp_path):
    return pathlib.Path(shutil.copytree(GOLDEN / "t5_1_1", tmp_path / "in"))


def refusal(folder):
    with pytest.raises(ValueError) as error:
        conversion.from_hugging_face(folder)
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    return message


def say(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def add_tensors(folder, names):
    """Adds tensors of one number each after those of the file."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    for name in names:
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        data += bytes(4)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_layer_far_beyond_the_others(folder):
    add_tensors(folder, ["encoder.block.1000000.layer.0.SelfAttention.q.weight"])
    assert "has tensors of encoder layer 1000000, but none of encoder layer 2" in refusal(folder)


def test_more_layers_than_any_model(folder):
    add_tensors(folder, [f"decoder.block.{layer}.layer.0.layer_norm.weight" for layer in range(3, 1000)])
    assert "decoder has tensors of 1000 layers, and at most 512 are read" in refusal(folder)


@pytest.mark.parametrize("key", ["vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_layers",
                                 "num_decoder_layers", "relative_attention_num_buckets"])
@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 10**4000, -1, 1.5, "8", [], True])
def test_sizes_are_compared_before_anything_is_allocated(key, size, folder):
    message = refusal(say(folder, **{key: size}))
    assert any(word in message for word in (key, "num_encoder_layers", str(size)[:20]))


def test_more_experts_than_tensors(tmp_path):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "switch", tmp_path / "in"))
    assert "config.json says num_experts=2147483647, but the checkpoint has only" in refusal(
        say(folder, num_experts=2**31 - 1))


@pytest.mark.parametrize("values", [
    {"model_type": []}, {"model_type": {}}, {"model_type": None}, {"model_type": "x" * 10**6},
    {"feed_forward_proj": []}, {"feed_forward_proj": {"a": 1}}, {"scale_decoder_outputs": "no"},
    {"scale_decoder_outputs": []}, {"architectures": 5}, {"dropout_rate": "much"},
    {"layer_norm_epsilon": 1e400}, {"eos_token_id": {}}])
def test_values_of_another_kind(values, folder):
    assert next(iter(values)) in refusal(say(folder, **values))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "{" * 100_000, '{"a":' * 100_000, '{"a":' * 50 + "1" + "}" * 50,
                                     "", "nul", "[]", "9" * 5000])
def test_damaged_json(name, content, folder):
    (folder / name).write_text(content)
    assert name in refusal(folder)


def test_files_that_are_not_regular(folder):
    for name in ("model.safetensors", "config.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        message = refusal(folder)
        assert "must be a regular file" in message or "must be a folder with config.json" in message
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)  # a link to itself
        assert "must be a" in refusal(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    assert conversion.from_hugging_face(folder)


def test_links_into_the_cache_of_the_hub_are_followed(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert conversion.from_hugging_face(folder)


@pytest.mark.parametrize("shard", ["../in/model.safetensors", "/etc/passwd", "..", ".", "", "a\0b", "x" * 300,
                                   "sub/model.safetensors", "missing.safetensors", "\ud800"])
def test_shards_outside_of_the_folder(shard, folder):
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / "sub").mkdir()
    shutil.copy(folder / "shard.safetensors", folder / "sub" / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"shared.weight": shard}}))
    assert "names the file" in refusal(folder)


def test_a_hundred_thousand_shards(folder):
    (folder / "model.safetensors").unlink()
    weight_map = {f"w{number}": f"{number}.safetensors" for number in range(10**5)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "names the file '0.safetensors', which is not in" in refusal(folder)


def test_a_very_long_name(folder):
    add_tensors(folder, ["x" * 10**6])
    assert "whose name has 1000000 characters" in refusal(folder)


@pytest.mark.parametrize("program", [
    b"\x80\x02})" + b"\x85" * 10**6 + b"K\x01s.",  # a tuple in a million tuples as a key
    b"\x80\x02})" + b"\x85" * 10**6 + b")R.",  # as a function
    b"\x80\x02}X\x01\0\0\0w(" + b")" + b"\x85" * 10**6 + b"tsU.",  # within a description
    b"\x80\x02}" + b"N0" * 3 * 10**6 + b".",  # an instruction that is refused
    b"\x80\x02}" + b"NN\x86" * 10**6 + b".",  # three million instructions
    b"\x80\x02" + b"}X\x01\0\0\0w" * 10**5 + b"}" + b"s" * 10**5 + b".",  # dictionaries in dictionaries
    b"\x80\x02}" + b"X\xff\xff\xff\x7f" + b".", b"\x80\x02\x8a\xff" + b"\xff" * 255 + b"."])
def test_pickles(program, folder):
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", program)
    message = refusal(folder)
    assert any(words in message for words in ("is damaged", "is refused", "is not a tensor"))


def test_zip_bombs(folder):
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100 * 2**20))
    assert "not one that torch.save wrote" in refusal(folder)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(33 * 2**20))
    assert "archive/data.pkl has 34603008 bytes, and at most" in refusal(folder)
    content = bytearray(path.read_bytes()[:-22])  # the end of central directory is 22 bytes
    path.write_bytes(content + b"PK\5\6" + bytes(8) + b"\xff" * 8 + bytes(2))
    assert "is damaged" in refusal(folder) or "is not a zip archive" in refusal(folder)


def test_a_tensor_that_repeats_one_number(folder):
    (folder / "model.safetensors").unlink()
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
    program = (b"\x80\x02}X\x0d\0\0\0shared.weightctorch._utils\n_rebuild_tensor_v2\n(" + storage
               + b"K\0J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86K\0K\0\x86\x89ccollections\nOrderedDict\n)RtRs.")
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", np.zeros(4, "<f4").tobytes())
    assert "'shared.weight' of shape (2147483647, 2147483647) does not lie within the 16 bytes" in refusal(folder)


def test_a_model_larger_than_the_machine(folder, monkeypatch):
    monkeypatch.setattr("switch_tf.hardware.host.memory", lambda entry: 1000)
    assert "for its float32 weights, and this machine has 0.0 GB of memory" in refusal(folder)


def test_float8_is_refused_by_name(folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    name = next(name for name in header if name != "__metadata__")
    for dtype in ("F8_E4M3", "F8_E5M2", "F4", "I32", "C64", "Q"):
        header[name]["dtype"] = dtype
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length:])
        assert refusal(folder).startswith(
            f"A weight must be float32, float16 or bfloat16, but {name!r} is {dtype!r}; save the checkpoint anew")
    assert checkpoint_files.open_folder(GOLDEN / "t5_1_1")
