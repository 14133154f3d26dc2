"""Local copies of shards in buckets, because ArrayRecord reads at any place of a local file."""

import hashlib
import pathlib
import threading

from switch_tf import environment
from switch_tf.data.example_files import BadData, UnreachableData
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from switch_tf.storage.whole_file import reading, writing, written

_PART = 2**24  # bytes
_fetching = threading.Lock()


def fetched_shard(file: str, sha256: str) -> str:
    """Returns the path of a local file with the contents of a shard, which is fetched once for all runs of a machine.

    Args:
        file: Path of the shard, of this machine or of a bucket.
        sha256: Its checksum.

    Raises:
        BadData: The shard is damaged.
        UnreachableData: It cannot be fetched, or this machine has no room for it.
    """
    if places.is_local(file):
        return file
    copy = environment.cache_folder() / "shards" / f"{sha256}.array_record"
    with _fetching:
        if not copy.is_file():
            _fetch(file, sha256, copy)
    return str(copy)


def _fetch(file: str, sha256: str, copy: pathlib.Path):
    digest = hashlib.sha256()
    copy.parent.mkdir(parents=True, exist_ok=True)
    with written(copy) as unfinished:
        try:
            with writing(copy), open(unfinished, "wb") as local, reading(file), places.at(file).open("rb") as source:
                while part := source.read(_PART):
                    digest.update(part)
                    local.write(part)
        except Refusal as error:
            raise UnreachableData(str(error)) from error
        if digest.hexdigest() != sha256:
            raise BadData(f"{file} is damaged: its SHA-256 is not the one in its manifest; `switch-tf cache` with the "
                          "task's gin file and --overwrite writes it anew.")
