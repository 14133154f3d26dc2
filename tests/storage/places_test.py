"""Paths in a bucket behave like those of a disk, with the same errors."""

import errno
import os
import pathlib

import pytest
import tensorflow as tf

from switch_tf import checks
from switch_tf.refusals import Refusal
from switch_tf.storage import places, whole_file


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path):
    """A new folder, on the disk or in a bucket."""
    return places.at(tmp_path if request.param == "disk" else request.getfixturevalue("bucket").new_folder())


def test_a_file_is_written_found_and_removed(folder):
    file = folder / "deep" / "a.txt"
    assert not file.exists() and not file.is_file() and not (folder / "deep").is_dir()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("é\n")
    assert file.read_bytes() == b"\xc3\xa9\n" and file.stat().st_size == 3 if places.is_local(file) else True
    assert file.is_file() and not file.is_dir() and (folder / "deep").is_dir()
    assert [entry.name for entry in folder.iterdir()] == ["deep"]
    assert list(folder.glob("*/*.txt")) == [file]
    with (folder / "b").open("wb") as opened:
        opened.write(b"two")
    with (folder / "b").open("rb") as opened:
        assert opened.read() == b"two"
    file.unlink()
    file.unlink(missing_ok=True)
    assert not file.exists()
    whole_file.remove_tree(folder)
    assert (not folder.exists()) if places.is_local(folder) else not places.urls_of(folder)


def test_what_is_missing_is_no_file(folder):
    with pytest.raises(FileNotFoundError):
        (folder / "nothing").read_bytes()
    with pytest.raises(FileNotFoundError):
        (folder / "nothing").unlink()
    with pytest.raises(FileNotFoundError):
        list((folder / "nothing").iterdir())
    with pytest.raises(FileNotFoundError), (folder / "nothing").open("rb") as opened:
        opened.read()


def test_a_local_copy_has_the_same_content(folder):
    (folder / "in").mkdir()
    (folder / "in" / "a").write_text("one")
    with places.fetched(folder / "in" / "a") as copy:
        assert isinstance(copy, pathlib.Path) and copy.read_text() == "one"


def test_a_part_of_a_file_in_a_bucket_is_read_without_the_rest(bucket):
    file = places.at(bucket.new_folder()) / "a"
    file.write_bytes(bytes(range(100)))
    before = bucket.control()["bytes_read"]
    assert file.read_bytes(slice(10, 13)) == bytes([10, 11, 12])
    assert bucket.control()["bytes_read"] == before + 3


def test_files_of_a_local_folder_are_written(folder):
    with places.uploaded(folder) as local:
        assert isinstance(local, pathlib.Path)
        (local / "in").mkdir()
        (local / "in" / "a").write_text("one")
    assert (folder / "in" / "a").read_text() == "one"


def test_who_may_not_write_gets_an_os_error(bucket):
    with pytest.raises(places.BucketError) as raised:
        places.at("gs://locked/a").write_text("one")
    assert raised.value.errno == errno.EACCES and raised.value.filename == "gs://locked/a"
    with pytest.raises(FileNotFoundError):
        places.at("gs://missing/a").read_text()


@pytest.mark.slow
def test_a_store_that_fails_now_and_then_is_asked_again(bucket):
    file = places.at(bucket.new_folder()) / "a"
    bucket.control(fail=0.3)
    for number in range(8):
        file.write_text(str(number))
        assert file.read_text() == str(number)


@pytest.mark.exhaustive
def test_a_store_that_fails_for_good_gives_an_os_error(bucket):
    bucket.control(fail=1)  # TensorFlow tries for three minutes, and has no setting for it
    with pytest.raises(OSError, match="retry attempts failed") as raised:
        (places.at(bucket.new_folder()) / "a").write_text("one")
    assert raised.value.errno == errno.EIO


def test_another_scheme_is_refused():
    with pytest.raises(Refusal, match="'ftp://x/y' has the scheme 'ftp', which is unknown here; use gs://"):
        places.at("ftp://x/y")
    assert places.at("x:y") == pathlib.Path("x:y") and places.is_local("c:/x")


@pytest.mark.parametrize("name", ["lr=0.1,[1]", "a*?", "back\\slash", "plain"])
def test_tensorflow_reads_a_checkpoint_whatever_its_folder_is_called(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    prefix = pathlib.Path(tf.train.Checkpoint(x=tf.Variable([1.0, 2.0])).write(str(folder / "state")))
    (tmp_path / "1").mkdir()  # which a pattern would find
    before = len(os.listdir("/proc/self/fd"))
    literal = places.Literal(prefix)
    key = "x/.ATTRIBUTES/VARIABLE_VALUE"
    assert tf.train.load_checkpoint(str(literal)).get_tensor(key).tolist() == [1.0, 2.0]
    del literal
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(places.Literal(tmp_path / "missing[1]" / "state")) == str(tmp_path / "missing[1]" / "state")


def test_in_a_bucket_a_name_that_tensorflow_takes_for_a_pattern_is_refused():
    with pytest.raises(Refusal, match=r"MODEL_DIR must have none of \* \? \[ \] and \\ in a bucket, where TensorFlow "
                                      r"takes it for a pattern, not 'gs://b/\[1\]'; use another name\."):
        checks.place("MODEL_DIR", "gs://b/[1]")
