import pathlib

import pytest

from switch_tf.whole_file import write_whole


def test_a_file_takes_the_place_of_another_one(tmp_path):
    write_whole(tmp_path / "a.json", "é")
    write_whole(tmp_path / "a.json", b"two")
    assert (tmp_path / "a.json").read_bytes() == b"two"
    assert [*tmp_path.iterdir()] == [tmp_path / "a.json"]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    write_whole(tmp_path / "a.json", "one")
    write_bytes = pathlib.Path.write_bytes

    def half(self, content):
        write_bytes(self, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a.json", "another one")
    assert (tmp_path / "a.json").read_text() == "one"
    assert [*tmp_path.iterdir()] == [tmp_path / "a.json"]
