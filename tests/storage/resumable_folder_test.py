"""Folders that are written in parts: complete or not at all, and gone on with after a kill."""

import shutil
import types

import pytest

from switch_tf.refusals import Refusal
from switch_tf.storage.resumable_folder import resumable_folder

IDENTITY = {"source": "a", "size": 3}


def write_two_parts(folder, identity=IDENTITY, error=None):
    """Writes those of parts 0 and 1 that are not finished yet. Returns the numbers of the others."""
    with resumable_folder(folder, "1", identity) as work:
        before = [entry["number"] for entry in work.finished]
        for number in range(len(before), 2):
            (work.folder / str(number)).write_text(f"part {number}")
            if number == 1 and error is not None:
                raise error
            work.finish({"number": number})
        (work.aside / "more").write_text("not kept")
    return before


def test_a_folder_appears_at_the_end_with_nothing_beside_it(tmp_path):
    (tmp_path / "out").mkdir()  # an empty one may be there
    assert write_two_parts(tmp_path / "out") == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert {file.name: file.read_text() for file in (tmp_path / "out").iterdir()} == {"0": "part 0", "1": "part 1"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "full"), RuntimeError("a bug")])
def test_an_interrupted_one_goes_on_with_the_part_that_is_not_finished(error, tmp_path):
    with pytest.raises(type(error)):
        write_two_parts(tmp_path / "out", error=error)
    assert [entry.name for entry in tmp_path.iterdir()] == [".out.unfinished"]
    assert write_two_parts(tmp_path / "out") == [0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_refusal_and_work_without_an_identity_leave_nothing(tmp_path):
    with pytest.raises(Refusal):
        write_two_parts(tmp_path / "out", error=Refusal("damaged"))
    with pytest.raises(KeyboardInterrupt):
        write_two_parts(tmp_path / "out", None, KeyboardInterrupt())
    assert not list(tmp_path.iterdir())


def test_a_line_that_a_kill_cut_short_does_not_count(tmp_path):
    lines = ['{"source": "a", "size": 3}\n', '{"number": 0}\n', '{"number": 1}\n']
    for number, (record, before) in enumerate((
            ("".join(lines)[:-1], [0, 1]), (lines[0] + lines[1] + "{", [0]), (lines[0] + lines[1][:-1], [0]),
            (lines[0], []), (lines[0][:-1], []), ("{", []), ("", []))):
        with pytest.raises(KeyboardInterrupt):
            write_two_parts(tmp_path / "out", error=KeyboardInterrupt())
        assert (tmp_path / ".out.unfinished" / "record.jsonl").read_text() == lines[0] + lines[1]
        (tmp_path / ".out.unfinished" / "record.jsonl").write_text(record)
        assert write_two_parts(tmp_path / "out") == before
        (tmp_path / "out").rename(tmp_path / f"out_{number}")


def test_other_work_is_refused_and_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_two_parts(tmp_path / "out", error=KeyboardInterrupt())
    for other, named in (({"source": "a", "size": 4}, "size"), ({"source": "a", "size": 3, "more": 1}, "more")):
        with pytest.raises(Refusal) as error:
            write_two_parts(tmp_path / "out", other)
        assert str(error.value) == (f"{tmp_path / '.out.unfinished'} is unfinished work on another {named}; give the "
                                    "command that began it to go on, or remove that folder to begin anew.")
    assert write_two_parts(tmp_path / "out") == [0]


def test_too_little_room_is_refused_before_anything_is_written_and_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: types.SimpleNamespace(free=10**9))
    with pytest.raises(Refusal) as error, resumable_folder(tmp_path / "out", "1", IDENTITY, 3 * 10**9):
        raise AssertionError
    assert str(error.value) == (f"{tmp_path / '.out.unfinished'} needs 3.0 GB, and the disk has 2.0 GB too few; make "
                                "room there, or use another folder.")
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        write_two_parts(tmp_path / "out", error=KeyboardInterrupt())
    with pytest.raises(Refusal), resumable_folder(tmp_path / "out", "1", IDENTITY, 3 * 10**9):
        raise AssertionError
    assert write_two_parts(tmp_path / "out") == [0]
    assert f"Going on with {tmp_path / '.out.unfinished'} (finished parts: 1)." in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="out could not be written .Not a directory.; "):
        write_two_parts(tmp_path / "file" / "out")
