"""Folders that would hang, exhaust the memory or end in a traceback: each is refused in one sentence, and soon."""

import json
import os
import shutil
import struct
import zipfile

import pytest

from switch_tf import conversion
from tests.conversion.shared import copy, refusal


@pytest.fixture
def folder(tmp_path):
    return copy("t5_1_1", tmp_path / "in")


def refused(folder):
    message = refusal(conversion.from_hugging_face, folder)
    assert len(message) < 600
    return message


def change_header(folder, change):
    """Changes the description of tensors by a function of it."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length:])


def pickled(folder, content, compression=zipfile.ZIP_STORED):
    """Writes a file of PyTorch with that pickle in the place of the safetensors; returns its path."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
    return path


def sharded(folder, weight_map):
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(("names", "message"), [
    (["encoder.block.1000000.layer.0.SelfAttention.q.weight"],
     "has tensors of encoder layer 1000000, but none of encoder layer 2"),
    ([f"decoder.block.{layer}.layer.0.layer_norm.weight" for layer in range(3, 1000)],
     "decoder has tensors of 1000 layers, and at most 512 are read"),
    (["x" * 10**6], "whose name has 1000000 characters")], ids=range(3))
def test_names_of_more_tensors(names, message, folder):
    """Empty tensors lie after the values of the file."""
    def add(header):
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header.update(dict.fromkeys(names, {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}))

    change_header(folder, add)
    assert message in refused(folder)


@pytest.mark.parametrize("key", ["vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_layers",
                                 "num_decoder_layers", "relative_attention_num_buckets"])
@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 10**4000, -1, 1.5, "8", [], True])
def test_sizes_are_compared_before_anything_is_allocated(key, size, tmp_path):
    message = refused(copy("t5_1_1", tmp_path, **{key: size}))
    assert any(word in message for word in (key, "num_encoder_layers", str(size)[:20]))


def test_more_experts_than_tensors(tmp_path):
    assert "config.json says num_experts=2147483647, but the checkpoint has only" in refused(
        copy("switch", tmp_path, num_experts=2**31 - 1))


@pytest.mark.parametrize("name, values", [
    ("model_type", ([], {}, None, "x" * 10**6)), ("feed_forward_proj", ([], {"a": 1})),
    ("scale_decoder_outputs", ("no", [])), ("architectures", (5,)), ("dropout_rate", ("much",)),
    ("layer_norm_epsilon", (1e400,)), ("eos_token_id", ({},))])
def test_values_of_another_kind(name, values, tmp_path):
    for value in values:
        assert name in refused(copy("t5_1_1", tmp_path, **{name: value}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "{" * 100_000, '{"a":' * 100_000, '{"a":' * 50 + "1" + "}" * 50,
                                     "", "nul", "[]", "9" * 5000])
def test_damaged_json(name, content, folder):
    (folder / name).write_text(content)
    assert name in refused(folder)


def test_files_that_are_not_regular(folder):
    for name in ("model.safetensors", "config.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        message = refused(folder)
        assert "must be a regular file" in message or "must be a folder with config.json" in message
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)  # a link to itself
        assert "must be a" in refused(folder)
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
    (folder / "sub").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "sub")
    sharded(folder, {"shared.weight": shard})
    assert "names the file" in refused(folder)


def test_a_hundred_thousand_shards(folder):
    sharded(folder, {f"w{number}": f"{number}.safetensors" for number in range(10**5)})
    assert "names the file '0.safetensors', which is not in" in refused(folder)


@pytest.mark.parametrize("program", [
    b"\x80\x02})" + b"\x85" * 10**6 + b"K\x01s.",  # a tuple in a million tuples as a key
    b"\x80\x02})" + b"\x85" * 10**6 + b")R.",  # as a function
    b"\x80\x02}X\x01\0\0\0w(" + b")" + b"\x85" * 10**6 + b"tsU.",  # within a description
    b"\x80\x02}" + b"N0" * 3 * 10**6 + b".",  # an instruction that is refused
    b"\x80\x02}" + b"NN\x86" * 10**6 + b".",  # three million instructions
    b"\x80\x02" + b"}X\x01\0\0\0w" * 10**5 + b"}" + b"s" * 10**5 + b".",  # dictionaries in dictionaries
    b"\x80\x02}" + b"X\xff\xff\xff\x7f" + b".", b"\x80\x02\x8a\xff" + b"\xff" * 255 + b"."])
def test_pickles(program, folder):
    pickled(folder, program)
    message = refused(folder)
    assert any(words in message for words in ("is damaged", "is refused", "is not a tensor"))


def test_zip_bombs(folder):
    pickled(folder, bytes(100 * 2**20), zipfile.ZIP_DEFLATED)
    assert "not one that torch.save wrote" in refused(folder)
    path = pickled(folder, bytes(33 * 2**20))
    assert "archive/data.pkl has 34603008 bytes, and at most" in refused(folder)
    content = bytearray(path.read_bytes()[:-22])  # the end of central directory is 22 bytes
    path.write_bytes(content + b"PK\5\6" + bytes(8) + b"\xff" * 8 + bytes(2))
    message = refused(folder)
    assert "is damaged" in message or "is not a zip archive" in message


def test_a_model_larger_than_the_machine(folder, monkeypatch):
    monkeypatch.setattr("switch_tf.hardware.host.memory", lambda entry: 1000)
    assert "for its float32 weights, and this machine has 0.0 GB of memory" in refused(folder)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "I32", "C64", "Q"])
def test_other_dtypes_are_refused_by_name(dtype, folder):
    changed = []

    def change(header):
        changed.append(next(name for name in header if name != "__metadata__"))
        header[changed[0]]["dtype"] = dtype

    change_header(folder, change)
    assert refused(folder).startswith(
        f"A weight must be float32, float16 or bfloat16, but {changed[0]!r} is {dtype!r}; save the checkpoint anew")
