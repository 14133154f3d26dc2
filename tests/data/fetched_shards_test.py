"""Shards in a bucket are read from a local copy, which is fetched once and compared with its checksum."""

import hashlib

import pytest

from switch_tf import environment
from switch_tf.data import cache_files
from switch_tf.data.cache_files import fetched_shard
from switch_tf.data.example_files import BadData, UnreachableData
from switch_tf.storage import places

CONTENT = b"records" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def shard(bucket, tmp_path, monkeypatch):
    """The URL of a shard."""
    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path / "cache")
    file = places.at(bucket.new_folder()) / "00000-of-00001.array_record"
    file.write_bytes(CONTENT)
    return file


def test_a_local_shard_is_read_where_it_is(tmp_path):
    assert fetched_shard(str(tmp_path / "a"), SHA256) == str(tmp_path / "a")


def test_a_shard_is_fetched_once(shard, monkeypatch):
    copy = fetched_shard(str(shard), SHA256)
    with open(copy, "rb") as file:
        assert file.read() == CONTENT
    shard.unlink()
    assert fetched_shard(str(shard), SHA256) == copy


def test_a_damaged_shard_is_refused_and_leaves_nothing(shard, tmp_path):
    shard.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(BadData, match=f"{shard} is damaged"):
        fetched_shard(str(shard), SHA256)
    assert not list((tmp_path / "cache" / "shards").iterdir())


def test_a_bucket_or_a_disk_that_fails_is_no_damage(shard, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_files, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")),
                        raising=False)
    with pytest.raises(UnreachableData, match="make room"):
        fetched_shard(str(shard), SHA256)
    monkeypatch.undo()
    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path / "cache")
    shard.unlink()
    with pytest.raises(UnreachableData, match=f"{shard} could not be read"):
        fetched_shard(str(shard), SHA256)
