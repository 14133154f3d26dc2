import io

import pytest

from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import reading, remove, write_whole, writing


def test_a_file_takes_the_place_of_another_one(tmp_path):
    write_whole(tmp_path / "a.json", "é")
    write_whole(tmp_path / "a.json", b"two")
    assert (tmp_path / "a.json").read_bytes() == b"two"
    assert [*tmp_path.iterdir()] == [tmp_path / "a.json"]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    write_whole(tmp_path / "a.json", "one")

    class Half(io.FileIO):
        def writelines(self, parts):
            (content,) = parts
            self.write(content[: len(content) // 2])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("switch_tf.storage.whole_file.open", Half, raising=False)
    with pytest.raises(Refusal, match="No space left"):
        write_whole(tmp_path / "a.json", "another one")
    assert (tmp_path / "a.json").read_text() == "one"
    assert [*tmp_path.iterdir()] == [tmp_path / "a.json"]


def test_a_folder_is_not_removed_as_a_file(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(OSError):
        remove(tmp_path / "config.json")
    assert (tmp_path / "config.json").is_dir()


def test_a_file_may_come_in_parts(tmp_path):
    write_whole(tmp_path / "a", (part for part in (b"one ", b"two")))
    assert (tmp_path / "a").read_text() == "one two"


@pytest.mark.parametrize(("number", "way_out"), [(28, "make room there"), (37, "locks"), (13, "rights"), (5, "folder")])
def test_an_error_names_the_file_the_reason_and_the_way_out(tmp_path, number, way_out):
    with pytest.raises(Refusal) as raised, writing(tmp_path / "outer"), writing(tmp_path / "a.json"):
        raise OSError(number, "A reason")
    assert str(raised.value).startswith(f"{tmp_path / 'a.json'} could not be written (A reason); ")
    assert way_out in str(raised.value)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    message = r"a.json could not be read \(Permission denied\); mend its rights"
    with pytest.raises(Refusal, match=message), reading(tmp_path / "a.json"):
        raise PermissionError(13, "Permission denied")
