"""Checks the index of a TensorFlow checkpoint. TensorFlow's reader aborts its process if a shape is impossible.

An index is a sorted table (LevelDB's format): blocks of entries, a block with the places of these, and a footer with
the place of that. The value of an entry is a `BundleEntryProto`.
"""

from collections.abc import Iterator
from typing import Any

from etils import epy

from switch_tf.checkpoints import folders

with epy.lazy_imports():  # which imports TensorFlow
    from tensorflow.core.protobuf import tensor_bundle_pb2

_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57
_TRAILER = 5  # bytes after a block: its compression and its checksum
_LARGEST = 2**30  # bytes; the index of Switch-C's 120,000 variables has 20 MB


def check(path: Any) -> None:
    """Raises ValueError if the index in a file is damaged or has an impossible shape. The text is half a sentence."""
    if (size := path.stat().st_size) > _LARGEST:
        raise ValueError(f"it has {size} bytes")
    content = path.read_bytes()
    try:
        if int.from_bytes(content[-8:], "little") != _MAGIC:
            raise ValueError("it does not end as an index does")
        position = len(content) - _FOOTER
        for _ in range(2):  # a block that is not used, and that of the blocks
            start, position = _number(content, position)
            length, position = _number(content, position)
        for _, place in _entries(content, start, length):
            start, position = _number(place, 0)
            length, _ = _number(place, position)
            for key, value in _entries(content, start, length):
                if key:  # the first entry is the header
                    _check_shape(key, value)
    except IndexError:
        raise ValueError("it is cut off") from None


def _check_shape(key, value):
    entry = tensor_bundle_pb2.BundleEntryProto()
    try:
        entry.ParseFromString(value)
    except Exception as error:  # of protobuf's implementation in use
        raise ValueError(f"the entry {key[:99]!r} is damaged") from error
    sizes = [one.size for one in entry.shape.dim]
    if entry.shape.unknown_rank or not folders.is_shape(sizes):
        raise ValueError(f"{key[:99]!r} has an impossible shape, of {len(sizes)} dimensions")


def _entries(content, start, length) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block."""
    if start + length + _TRAILER > len(content) or content[start + length]:
        raise ValueError("a block is cut off or compressed")
    block = content[start:start + length]
    end, position, key = length - 4 - 4 * int.from_bytes(block[-4:], "little"), 0, b""
    while position < end:
        shared, position = _number(block, position)
        added, position = _number(block, position)
        size, position = _number(block, position)
        if shared > len(key) or position + added + size > end:
            raise ValueError("an entry is cut off")
        key = key[:shared] + block[position:position + added]
        position += added
        yield key, block[position:position + size]
        position += size


def _number(content, position):
    """Returns a number of 7 bits a byte, the lowest first, and the position after it."""
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
