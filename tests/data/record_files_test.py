"""Files of records appear whole, and a full disk is a sentence that names the file."""

import hashlib

import pytest
from array_record.python import array_record_module

from switch_tf.data import cache_files, cache_writing
from switch_tf.data.cache_writing import Shard
from switch_tf.refusals import Refusal


def test_records_come_back_with_size_and_checksum(tmp_path):
    path = tmp_path / "a.array_record"
    sums = cache_files.write_records(path, [b"one", b"", b"three"])
    content = path.read_bytes()
    assert sums == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert array_record_module.ArrayRecordReader(str(path)).read_all() == [b"one", b"", b"three"]
    assert list(tmp_path.iterdir()) == [path]


class Full:
    """A writer whose disk is full at the first record, or when it is closed."""

    def __init__(self, path, options):
        open(path, "w").close()

    def write(self, record):
        pass

    def close(self):
        raise RuntimeError("write() failed: No space left on device; writing a; at byte 0")


class FullAtOnce(Full):
    def write(self, record):
        self.close()


@pytest.mark.parametrize("writer", [Full, FullAtOnce])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(array_record_module, "ArrayRecordWriter", writer)
    with pytest.raises(Refusal, match=r"array_record could not be written \(No space left on device\); the disk"):
        cache_files.write_records(tmp_path / "a.array_record", [b"one"])
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_records_passes_and_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="source"):
        cache_files.write_records(tmp_path / "a.array_record", map(open, ["source"]))
    assert not list(tmp_path.iterdir())


def test_shards_without_description_or_reason_are_a_sentence(tmp_path):
    shards = [Shard(str(tmp_path), "task", "train", None, index, 2) for index in range(2)]
    shards[0].description.write_text("{}")
    with pytest.raises(Refusal, match="1 of 2 shards could not be written to .*; make room there"):
        cache_writing._check_failures(shards, 2)
