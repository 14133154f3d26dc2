"""Files that grow locally appear in the bucket."""

import time

import pytest

from switch_tf.storage import places, whole_file
from switch_tf.storage.whole_file import Mirror


def test_files_appear_when_flushed_and_at_the_end(bucket):
    folder = places.at(bucket.new_folder())
    (folder / "lines").write_text("one\n")
    mirrored = Mirror(folder)
    file = mirrored.fetch("lines")
    assert file.read_text() == "one\n" and not mirrored.fetch("nothing").exists()
    with open(file, "a") as lines:
        lines.write("two\n")
    (mirrored.local / "deep").mkdir()
    (mirrored.local / "deep" / "a").write_text("three")
    assert (folder / "lines").read_text() == "one\n"
    mirrored.flush()
    assert (folder / "lines").read_text() == "one\ntwo\n" and (folder / "deep" / "a").read_text() == "three"
    with open(file, "a") as lines:
        lines.write("four\n")
    mirrored.close()
    assert (folder / "lines").read_text() == "one\ntwo\nfour\n" and not mirrored.local.exists()


def test_files_appear_by_themselves_also_after_a_failure(bucket, monkeypatch):
    monkeypatch.setattr(whole_file, "UPLOAD_PERIOD", 0.05)
    failures = [OSError("503"), OSError("503")]
    put = whole_file.put

    def fail_twice(target, content):
        if failures:
            raise failures.pop()
        put(target, content)

    monkeypatch.setattr(whole_file, "put", fail_twice)
    folder = places.at(bucket.new_folder())
    mirrored = Mirror(folder)
    (mirrored.local / "a").write_text("one")
    due = time.monotonic() + 20
    while not (folder / "a").is_file():
        assert time.monotonic() < due
        time.sleep(0.05)
    assert not failures
    mirrored.close()


def test_a_failure_at_the_end_is_raised(bucket, monkeypatch):
    mirrored = Mirror(bucket.new_folder())
    (mirrored.local / "a").write_text("one")

    def fail(target, content):
        raise places.BucketError(5, "503")

    monkeypatch.setattr(whole_file, "put", fail)
    with pytest.raises(places.BucketError):
        mirrored.close()


def test_only_what_has_changed_is_uploaded(bucket, monkeypatch):
    uploaded, put = [], whole_file.put
    monkeypatch.setattr(whole_file, "put", lambda path, content: (uploaded.append(path.name), put(path, content)))
    mirrored = Mirror(bucket.new_folder())
    (mirrored.local / "a").write_text("one")
    (mirrored.local / "b").write_text("one")
    mirrored.flush()
    (mirrored.local / "b").write_text("one two")
    mirrored.flush()
    mirrored.close()
    assert uploaded == ["a", "b", "b"]


def test_a_file_that_cannot_be_fetched_ends_the_uploads(bucket, monkeypatch):
    mirrored = Mirror(bucket.new_folder())

    def fail(path):
        raise places.BucketError(5, "503")

    monkeypatch.setattr(type(places.at("gs://bucket/x")), "is_file", fail)
    with pytest.raises(places.BucketError):
        mirrored.fetch("lines")
    mirrored._thread.join(timeout=10)
    assert not mirrored._thread.is_alive()
