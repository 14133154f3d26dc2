"""Reads JSON objects of untrusted files: bounded in size and depth, without duplicate keys."""

import json
import os
import pathlib

from switch_tf import checks
from switch_tf.conversion import lfs_pointers
from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading

# The largest published files are tokenizer.json of mT5 (16 MB) and the index of Switch-C's 120,000 tensors (14 MB).
MAX_BYTES = 64 * 2**20
_MAX_DEPTH = 32


def check_regular(path: pathlib.Path) -> None:
    """Checks that a path is a regular file or a link to one, as in the cache of the hub.

    Raises:
        Refusal: it is something else, such as a pipe or a device, which could block or never end, or a pointer of Git
            LFS.
    """
    if not path.is_file():
        raise Refusal(f"{path} must be a regular file, not a folder, a pipe, a device or a broken link; download it "
                      "again.")
    lfs_pointers.check_is_none(path)


def check_tree(folder: pathlib.Path) -> None:
    """Checks that a folder and its folders hold regular files alone, and no links to folders.

    Raises:
        Refusal: see `check_regular`.
    """
    for entry in folder.rglob("*"):
        if entry.is_symlink() or not entry.is_dir():
            check_regular(entry)


def read_object(path: pathlib.Path, max_bytes: int = MAX_BYTES) -> dict:
    """Returns the JSON object in a file.

    Raises:
        Refusal: the file is not regular, larger than `max_bytes`, not JSON, nested too deeply, or not an object.
    """
    check_regular(path)
    with reading(path), path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise Refusal(f"{path} is larger than the {max_bytes} bytes that are read of such a file; it is not what "
                      "its name says.")
    return parse_object(text, path)


def parse_object(text: bytes, path: pathlib.Path) -> dict:
    """Parses a JSON object. Errors name the file `path`."""
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:
        raise Refusal(f"{path} is not JSON ({error}); download it again.") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path} must hold a JSON object, not {type(content).__name__}; download it again.")
    _check_depth(content, path)
    return content


def _check_depth(content, path):
    """Refuses nesting that Python can parse, but not show or compare without running out of stack."""
    level = [content]
    for _ in range(_MAX_DEPTH):
        level = [child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent)
                 if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep(path)


def _too_deep(path):
    return Refusal(f"{path} is JSON that is nested too deeply to be read, beyond {_MAX_DEPTH} levels; download it "
                   "again.")


def write_object(path: pathlib.Path, content: dict) -> None:
    """Writes `content` as JSON with sorted keys, and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _without_duplicates(pairs):
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))
        raise ValueError(f"the key {checks.shown(twice)} is there twice")
    return content
