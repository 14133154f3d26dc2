"""Lines without an end, files that change while they are read, and what only has the name of a file."""

import gzip
import io
import os
import pathlib
import socket
import tracemalloc

import pytest
import tensorflow as tf

from switch_tf import data
from switch_tf.data import example_files, rows


@pytest.fixture
def short_lines(monkeypatch):
    """Lines of 100 bytes at most, and pieces of 7."""
    monkeypatch.setattr(rows, "LONGEST_LINE", 100)
    monkeypatch.setattr(example_files, "PIECE", 7)


def _all(file):
    found = list(file.all())
    return [row for texts, _ in found for row in texts], [sentence for _, bad in found for sentence in bad]


ROWS = {
    "a.txt": (b"first\n", b"x" * 5000, b"\nlast\n"),
    "a.jsonl": (b'{"text": "first"}\n', b"[" * 5000, b'\n{"text": "last"}\n'),
    "a.tsv": (b"text\tn\nfirst\t1\n", b"x" * 5000, b"\nlast\t2"),
    "a.csv": (b"text,n\nfirst,1\n", b"x" * 5000, b"\nlast,2"),
}


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", ROWS)
def test_a_line_without_an_end_is_named_and_passed_over(tmp_path, short_lines, name, packed):
    path = tmp_path / (name + packed)
    content = b"".join(ROWS[name])
    path.write_bytes(gzip.compress(content) if packed else content)
    texts, bad = _all(data.TextFile(str(path), ["text"]))
    assert texts == [("first",), ("last",)]
    line = 1 + ROWS[name][0].count(b"\n")
    assert bad == [f"{path}, line {line}: it has 5,001 bytes, and a line may have 100 at most."]


def test_a_line_of_exactly_the_limit_is_read(tmp_path, short_lines):
    (tmp_path / "a.txt").write_bytes(b"x" * 99 + b"\n" + b"y" * 100 + b"\n" + b"z" * 100)
    texts, bad = _all(data.TextFile(str(tmp_path / "a.txt"), ["text"]))
    assert [text[:1] for text, in texts] == ["x", "z"] and "line 2: it has 101 bytes" in bad[0]


def test_a_row_of_many_lines_is_limited_as_well(tmp_path, short_lines):
    (tmp_path / "a.csv").write_bytes(b"text,n\n" + b'"a\nb",' * 40 + b"1\nlast,2\n")
    texts, bad = _all(data.TextFile(str(tmp_path / "a.csv"), ["text"]))
    assert "line 2: its row goes on beyond 100 bytes" in bad[0] and texts[-1:] == [("last",)]


def test_a_header_without_an_end_is_refused(tmp_path, short_lines):
    (tmp_path / "a.csv").write_bytes(b"text," * 100)
    with pytest.raises(ValueError, match=r"a.csv, line 1: it has 500 bytes, and a line may have 100 at most\.$"):
        data.TextFile(str(tmp_path / "a.csv"), ["text"])


def test_a_small_packed_file_that_holds_much_takes_little_memory(tmp_path):
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(bytes(2**20))
    tracemalloc.start()
    try:
        texts, [sentence] = _all(data.TextFile(str(path), ["text"]))
        assert tracemalloc.get_traced_memory()[1] < 3 * rows.LONGEST_LINE
    finally:
        tracemalloc.stop()
    assert not texts and sentence == f"{path}, line 1: it has 67,108,864 bytes, and a line may have 16,777,216 at most."


def test_a_long_last_line_that_has_grown_ends_the_reading(short_lines):
    lines = rows.Lines(io.BytesIO(b"x" * 150 + b"\n" + b"y" * 500), size=120)
    with pytest.raises(rows.Fault, match="it has 151 bytes"):
        next(lines)
    assert lines.bytes == 151 and not list(lines)


def test_lines_of_any_length_are_skipped_to_their_ends():
    stream, ends = io.BytesIO(b"ab\ncdefghijklmnopqrstuvwxyz\n\n\nx\nlast"), []
    while size := rows.skip_line(stream):
        ends.append(size)
    assert ends == [3, 25, 1, 1, 2, 4]


@pytest.mark.parametrize("make, words", [
    (os.mkfifo, "it is a named pipe"), (pathlib.Path.mkdir, "it is a folder"),
    (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    (lambda path: path.symlink_to("gone.txt"), "there is no such file, only a link to 'gone.txt', which is not there"),
    (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "it is a socket")])
def test_what_only_has_the_name_of_a_file_is_refused_at_once(tmp_path, monkeypatch, make, words):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make(pathlib.Path("a.txt"))
    with pytest.raises(data.BadData, match=rf"^a.txt cannot be read: {words}"):
        data.TextFile("a.txt", ["text"])


def test_a_link_to_nothing_is_found_out_by_name(tmp_path):
    (tmp_path / "a.txt").symlink_to("gone.txt")
    with pytest.raises(ValueError, match=r"there is no file .*a.txt', only a link to 'gone.txt', which is not there"):
        data.find_files("TRAIN_FILES", str(tmp_path / "a.txt"))


@pytest.mark.parametrize("change, words", [
    (lambda path: path.write_bytes(b""), "has 0 now"), (lambda path: os.truncate(path, 12), "has 12 now"),
    (lambda path: (path.unlink(), os.mkfifo(path)), "it is a named pipe"),
    (lambda path: path.unlink(), "cannot be read: No such file or directory")])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_file_that_changes_while_it_is_read_ends_the_reading(tmp_path, monkeypatch, change, words, packed):
    monkeypatch.setattr(example_files, "PIECE", 7)
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(gzip.compress(b"one line\n" * 9) if packed else b"one line\n" * 9)
    file = data.TextFile(str(path), ["text"])
    pieces = file.pieces()
    change(path)
    with pytest.raises(data.BadData, match=words):
        file.read(*pieces[-1])


def test_a_file_that_grows_is_read_as_it_was(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    file = data.TextFile(str(tmp_path / "a.txt"), ["text"])
    [piece] = file.pieces()
    with open(tmp_path / "a.txt", "a") as stream:
        stream.write(" more\nthree\n")
    assert file.read(*piece)[0] == [("one",), ("two",)]


def test_a_packed_file_that_is_empty_is_refused(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(b"")
    with pytest.raises(data.BadData, match="it is empty, and a .gz file of no text has some 20 bytes"):
        data.TextFile(str(tmp_path / "a.txt.gz"), ["text"])


def test_files_elsewhere_are_read_alike(short_lines):
    path = "ram://byte_lines_test/a.txt"
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(b"first\n" + b"x" * 500 + b"\nlast\n")
    texts, [sentence] = _all(data.TextFile(path, ["text"]))
    assert texts == [("first",), ("last",)] and "line 2: it has 501 bytes" in sentence
