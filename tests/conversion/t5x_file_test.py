"""The msgpack file of a T5X checkpoint: what is found in it, and what is refused."""

import flax.serialization
import msgpack
import numpy as np
import pytest

from switch_tf.conversion import t5x_file
from switch_tf.conversion.t5x_file import Reference
from switch_tf.conversion.untrusted_files import DTYPES, Tensor
from switch_tf.refusals import Refusal

SPEC = {"driver": "zarr", "kvstore": {"driver": "file", "path": "target.b/"}, "metadata": {"shape": [2]}}


def leaves(folder, content):
    (folder / "checkpoint").write_bytes(content if isinstance(content, bytes) else msgpack.packb(content))
    return t5x_file.read_leaves(folder, "target")


def refusal(folder, content):
    with pytest.raises(Refusal) as error:
        leaves(folder, content)
    assert "\n" not in str(error.value)
    return str(error.value)


def flax_bytes(tree):
    return flax.serialization.msgpack_serialize(tree)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (40,), (300, 70), (0, 2)])
@pytest.mark.parametrize("dtype", ["int8", "float32", "bfloat16"])
def test_arrays_in_the_file_are_located(shape, dtype, tmp_path):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    content = flax_bytes({"version": 3, "optimizer": {"target": {"a": {"b": array}}, "state": {"step": 1}}})
    found = leaves(tmp_path, content)["target/a/b"]
    assert (found.shape, found.dtype) == (shape, dtype)
    if dtype in DTYPES:
        np.testing.assert_array_equal(found.load(), array)


def test_references_are_read_in_every_form(tmp_path):
    target = {"a": SPEC, "b": {**SPEC, "kvstore": {"driver": "gcs", "bucket": "x"}, "path": "target.b"},
              "c": "PLACEHOLDER://target.b"}
    assert leaves(tmp_path, {"target": target, "state": {}}) == {
        f"target/{name}": Reference("target.b") for name in "abc"}


def test_the_optimizers_state_is_not_looked_at(tmp_path):
    state = {"step": 3, "param_states": {"a": {"v": [1, None, b"x"]}}}
    assert leaves(tmp_path, {"version": 3, "optimizer": {"state": state, "target": {"a": SPEC}}}).keys() == {"target/a"}


@pytest.mark.parametrize("place", ["", ".", "..", "../target.b", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 256, 3,
                                   None])
def test_paths_out_of_the_folder_are_refused(place, tmp_path):
    spec = {**SPEC, "kvstore": {"driver": "file", "path": place}}
    assert "which is no folder beside the file" in refusal(tmp_path, {"target": {"a": spec}})
    if isinstance(place, str):
        assert "which is no folder beside the file" in refusal(tmp_path, {"target": {"a": f"PLACEHOLDER://{place}"}})


@pytest.mark.parametrize(("content", "message"), [
    (b"", "it is empty"),
    (msgpack.packb([1]), "it holds no map"),
    (msgpack.packb({"target": {}}) + b"\0", "its map ends at byte 9 of 10"),
    ({"version": 3, "optimizer": {"state": {}}}, "must hold weights under \"target\""),
    ({"params": {}}, "must hold weights under \"target\""),
    ({"target": {"a": None}}, "'target/a' is None and no array"),
    ({"target": {"a": [1, 2]}}, "and no array"),
    ({"target": {"a": b"x" * 5000}}, "and no array"),
    ({"target": {"a": msgpack.ExtType(2, b"x")}}, "and no array"),
    ({"target": {"a": msgpack.ExtType(1, msgpack.packb([1, 2]))}}, "does not consist of shape, dtype and bytes"),
    ({"target": {"a": msgpack.ExtType(1, msgpack.packb([[1], "int8", b"xy"]) + b"z")}}, "does not consist of shape"),
    ({"target": {"a": msgpack.ExtType(1, msgpack.packb([[-1], "int8", b"xy"]))}}, "does not consist of shape"),
    ({"target": {"a": {**SPEC, "driver": "n5"}}}, "the tensorstore driver 'n5'"),
    ({"target": {3: SPEC}}, "a key at byte 9 is no text"),
    (b"\x82\xa1a\x01\xa1a\x02", "the key 'a' is there twice")])
def test_other_files_are_refused(content, message, tmp_path):
    assert message in refusal(tmp_path, content)


def test_deep_nesting_is_refused(tmp_path):
    content = b"\x81\xa1a" * 100_000 + b"\x01"
    assert "nested beyond 32 levels" in refusal(tmp_path, content)
    (tmp_path / "checkpoint").write_bytes(b"\x82\xa5state" + content + b"\xa6target\x80")
    with pytest.raises(Refusal, match="is truncated or no checkpoint of T5X"):
        t5x_file.read_leaves(tmp_path, "target")


def test_every_truncation_is_a_sentence_and_no_flipped_bit_is_a_traceback(tmp_path):
    content = flax_bytes({"version": 3, "optimizer": {
        "target": {"a": np.ones((2, 3), "float32"), "b": SPEC, "c": "PLACEHOLDER://target.b"}, "state": {"step": 1}}})
    for end in range(len(content)):
        refusal(tmp_path, content[:end])
    outcomes = set()
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            try:
                found = leaves(tmp_path, bytes(changed))
            except Refusal as error:
                assert "\n" not in str(error)
                outcomes.add("refused")
            else:
                assert all(isinstance(leaf, Tensor | Reference) for leaf in found.values())
                outcomes.add("read")
    assert outcomes == {"refused", "read"}
