"""The index of a checkpoint with shapes for which TensorFlow's reader aborts its process."""

import struct

import pytest
import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from switch_tf.checkpoints import bundles
from switch_tf.conversion import mesh_tensorflow_file
from switch_tf.refusals import Refusal


def number(value):
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def block(entries):
    """A block of entries without common beginnings of keys, and its trailer."""
    content = b"".join(number(0) + number(len(key)) + number(len(value)) + key + value for key, value in entries)
    return content + struct.pack("<II", 0, 1)


def write_index(path, sizes, change=lambda content: content):
    """Writes an index with one variable "a" whose dimensions are `sizes`."""
    header = tensor_bundle_pb2.BundleHeaderProto(num_shards=1).SerializeToString()
    entry = tensor_bundle_pb2.BundleEntryProto(dtype=1, size=4)
    for size in sizes:
        entry.shape.dim.add(size=size)
    data = block([(b"", header), (b"a", entry.SerializeToString())])
    index = block([(b"a", number(0) + number(len(data)))])
    place = number(len(data) + 5) + number(len(index))
    footer = (number(0) + number(0) + place).ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    path.write_bytes(change(data + bytes(5) + index + bytes(5) + footer))


@pytest.mark.parametrize("sizes", [[], [0], [2**62], [3] + [1] * 253])
def test_a_possible_shape_is_accepted(sizes, tmp_path):
    write_index(tmp_path / "a.index", sizes)
    bundles.check(tmp_path / "a.index")


@pytest.mark.parametrize("sizes", [[1] * 300, [-1], [2**40, 2**40], [2**63 - 1, 2]])
def test_an_impossible_shape_is_refused_before_tensorflow_reads_it(sizes, tmp_path):
    write_index(tmp_path / "model.ckpt-1.index", sizes)
    with pytest.raises(ValueError, match=rf"b'a' has an impossible shape, of {len(sizes)} dimensions"):
        bundles.check(tmp_path / "model.ckpt-1.index")
    (tmp_path / "model.ckpt-1.data-00000-of-00001").write_bytes(bytes(4))
    with pytest.raises(Refusal, match=r"model.ckpt-1.index cannot be read \(b'a' has an impossible shape"):
        mesh_tensorflow_file.open_variables(tmp_path / "model.ckpt-1", bool)


@pytest.mark.parametrize(("change", "message"), [
    (lambda content: b"", "does not end as an index"), (lambda content: content[:-1], "does not end as an index"),
    (lambda content: content[20:], "an entry is cut off"), (lambda content: b"\xff" * 400, "does not end as an index"),
    (lambda content: b"\xff" * 8 + content[8:], "a number is too long|an entry is cut off"),
    (lambda content: content[:-48] + b"\x80" * 40 + content[-8:], "a number is too long"),
    (lambda content: content[:1] + b"\x7f" + content[2:], "an entry is cut off")])
def test_damage_is_a_value_error(change, message, tmp_path):
    write_index(tmp_path / "a.index", [2], change)
    with pytest.raises(ValueError, match=message):
        bundles.check(tmp_path / "a.index")


def test_every_index_that_tensorflow_writes_is_accepted(tmp_path):
    """Also one of many blocks, of entries in slices and of texts."""
    variables = {f"name_{index}": tf.Variable(tf.zeros((index % 7, 3))) for index in range(2000)}
    tf.train.Checkpoint(texts=tf.Variable(["a", "b"]), **variables).write(str(tmp_path / "a"))
    bundles.check(tmp_path / "a.index")
    tf.raw_ops.SaveV2(prefix=str(tmp_path / "b"), tensor_names=["x"], shape_and_slices=["4 2 0,2:-"],
                      tensors=[tf.zeros((2, 2))])
    bundles.check(tmp_path / "b.index")
