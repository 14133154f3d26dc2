"""Files of examples are read piece by piece, with a sentence for each unusable example."""

import csv
import errno
import gzip
import io
import json
import os

import pytest

from switch_tf import data
from switch_tf.data import example_files, rows

ROWS = [("a", "first text"), ("b", 'with a "quote", a comma'), ("c", "naïve ☃"), ("d", "x" * 50), ("e", "last")]


def _csv(rows, ending="\n"):
    text = io.StringIO()
    csv.writer(text, lineterminator=ending).writerows(rows)
    return text.getvalue()


CONTENTS = {
    "a.jsonl": "".join(json.dumps({"id": id_, "text": text}) + "\n" for id_, text in ROWS),
    "b.json": "\n".join(json.dumps({"text": text, "n": 5}, ensure_ascii=False) for _, text in ROWS),
    "c.tsv": "\n".join(f"{id_}\t{text}" for id_, text in [("id", "text"), *ROWS]) + "\n",
    "d.csv": _csv([("id", "text"), *ROWS]),
    "e.txt": "".join(f"{text}\r\n\r\n" for _, text in ROWS),
    "f.csv": "\ufeff" + _csv([("text", "id"), *((text, id_) for id_, text in ROWS)], "\r\n"),
}  # fmt: skip


def _write(folder, name, content):
    content = content if isinstance(content, bytes) else content.encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def _all(file):
    found = list(file.all())
    return [row for texts, _ in found for row in texts], [sentence for _, bad in found for sentence in bad]


@pytest.mark.parametrize("piece", [2**20, 7])
@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", CONTENTS)
def test_every_kind_of_file_has_the_same_texts_however_it_is_cut(tmp_path, monkeypatch, name, packed, piece):
    monkeypatch.setattr(example_files, "PIECE", piece)
    file = data.TextFile(_write(tmp_path, name + packed, CONTENTS[name]), ["text"])
    assert _all(file) == ([(text,) for _, text in ROWS], [])
    if not packed:
        assert (len(file.pieces()) > 3) == (piece == 7)


def test_several_fields_come_in_the_order_in_which_they_are_asked_for(tmp_path):
    for name in ("a.jsonl", "c.tsv", "d.csv", "f.csv"):
        file = data.TextFile(_write(tmp_path, name, CONTENTS[name]), ["text", "id"])
        assert _all(file)[0] == [(text, id_) for id_, text in ROWS]


def test_a_table_without_a_header_has_numbers_for_columns(tmp_path):
    file = data.TextFile(_write(tmp_path, "cola.tsv", 'gj04\t1\t\tThe "ship" sank.\ngj05\t0\t*\tSank "ship\n'), [3, 1])
    assert _all(file) == ([('The "ship" sank.', "1"), ('Sank "ship', "0")], [])


@pytest.mark.parametrize("piece", [2**20, 7])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_cell_of_csv_may_have_several_lines_and_lines_are_still_counted_right(tmp_path, monkeypatch, packed, piece):
    monkeypatch.setattr(example_files, "PIECE", piece)
    content = _csv([("id", "text"), ("1", 'two\nlines, "quoted"'), ("2", "more\n\nthan two"), ("3",), ("4", "end")])
    file = data.TextFile(_write(tmp_path, f"a.csv{packed}", content), ["text"])
    texts, [sentence] = _all(file)
    assert texts == [('two\nlines, "quoted"',), ("more\n\nthan two",), ("end",)]
    # The header, two lines, three lines: the short row is the seventh.
    assert sentence.endswith(f"a.csv{packed}, line 7: it has 1 column and needs 2, as the header has.")


BAD = {
    "no_json.jsonl": (b'{"text": "a"}\n{"text": "b",}\n', "it is no JSON ("),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b', "it is no JSON (Unterminated string starting at, column 10)"),
    "array.jsonl": (b'{"text": "a"}\n["a", "b"]\n',
                    "it must be an object such as {\"text\": \"...\"}, not ['a', 'b']."),
    "array.json": (b'[{"text": "a"},\n"b"]\n', "it must be an object such as {\"text\": \"...\"}, not 'b'."),
    "other.jsonl": (b'{"text": "a"}\n{"txt": "b", "n": 1}\n', "it has no field 'text', only 'txt', 'n'."),
    "number.jsonl": (b'{"text": "a"}\n{"text": 5}\n', "the field 'text' must be text, not 5."),
    "nothing.jsonl": (b'{"text": "a"}\n{"text": null}\n', "the field 'text' must be text, not None."),
    "half.jsonl": (b'{"text": "a"}\n{"text": "b \\ud83d"}\n',
                   "the field 'text' has half of a surrogate pair ('\\ud83d'), which is no character."),
    "digits.jsonl": (b'{"text": "a"}\n{"text": ' + b"1" * 5000 + b"}\n", "it is no JSON that can be read ("),
    "deep.jsonl": (b'{"text": "a"}\n' + b"[" * 100_000 + b"\n", "it is no JSON that can be read ("),
    "latin.txt": (b"a\nna\xefve\n", "it is not UTF-8 (byte 0xef after 2 others)."),
    "latin.csv": (b"text\nna\xefve\n", "it is not UTF-8 (byte 0xef after 2 others)."),
    "few.tsv": (b"text\tlabel\nonly one\n", "it has 1 column and needs 2, as the header has."),
    "many.csv": (b"text,label\na,b,c\n", "it has 3 columns and needs 2, as the header has."),
    "open.csv": (b'text,label\n"a,b\nc,d\n', "it is no CSV (unexpected end of data): a quotation mark is not closed"),
    "return.csv": (b'text,label\na\rx,b\nc,d\n', "it has a carriage return that ends no line, as in files with"),
    "return.tsv": (b'text\tlabel\na\rx\tb\nc\td\n', "it has a carriage return that ends no line, as in files with"),
    "return.jsonl": (b'{"text": "a"}\n{"text": "b"}\r{"text": "c"}\n', "it has a carriage return that ends no line"),
    "return.txt": (b'a\nb\rc\n', "it has a carriage return that ends no line, as in files with the line ends of"),
    "inner.csv": (b'text,label\n"a"b,c\n', "it is no CSV (',' expected after '\"'): a quotation mark is not closed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_told_with_file_and_line(tmp_path, name):
    content, sentence = BAD[name]
    path = _write(tmp_path, name, content)
    [told] = _all(data.TextFile(path, ["text"]))[1]
    assert told.startswith(f"{path}, line 2: {sentence.rstrip('.')}") and told.endswith(".")
    assert "\n" not in told


def test_reading_goes_on_after_what_cannot_be_used(tmp_path):
    path = _write(tmp_path, "a.csv", b'text\n"a"b\nna\xefve\nfine\n')
    texts, bad = _all(data.TextFile(path, ["text"]))
    assert texts == [("fine",)] and [sentence.split(": ")[0] for sentence in bad] == [
        f"{path}, line 2", f"{path}, line 3"]


@pytest.mark.parametrize(("name", "content", "fields", "message"), [
    ("a.docx", b"x", ["text"], "ends in none of .txt, .jsonl, .json, .tsv, .csv, with or without .gz"),
    ("a.tsv", b"inputs\ttarget\n", ["inputs", "targets"],
     "line 1: the header has no column 'targets', only 'inputs', 'target'; a table without a header has numbers of "
     "columns from 0. Did you mean 'target'?"),
    ("a.csv", b"", ["text"], "line 1: there is no header with the names of the columns."),
    ("a.csv", b"\xff\xfe", ["text"], "a.csv begins with the byte order mark of UTF-16 or UTF-32, and text is read as"),
    ("a.csv", b"\xe9", ["text"], "line 1: the header cannot be read"),
    ("a.txt", "one\ntwo\n".encode("utf-16-be"), ["text"], "a.txt has zero bytes between its characters, as UTF-16"),
    ("a.csv", b"inputs,targets\ra,b\rc,d\r", ["inputs"], "line 1: it has a carriage return that ends no line"),
    ("a.tsv", b"inputs\ttargets\ra\tb\r", ["inputs"], "line 1: it has a carriage return that ends no line"),
    ("a.json", b'{\n "text": "a"\n}\n', ["text"], "line 1: a JSON object begins here and goes on in the next line"),
    ("a.jsonl", b'\n{"text":\n "a"}\n{"text":\n"b"}', ["text"], "jq -c . FILE > NEW_FILE makes such lines."),
    ("a.txt", b"a\n", ["inputs", "targets"], "a.txt cannot be read so: it has one text a line, but 2"),
    ("a.jsonl", b"{}\n", [0], "must be names, not 0."),
    ("a.tsv", b"a\tb\n", ["a", 1], "must be names of its header, or numbers of columns from 0, not 'a', 1."),
    ("a.tsv", b"a\tb\n", [-1], "or numbers of columns from 0, not -1."),
    ("a.tsv", b"a\tb\n", [True], "or numbers of columns from 0, not True."),
    ("a.jsonl", b"{}\n", [["a"]], "its fields must be names, not ['a']."),
    ("gone/a.txt", None, ["text"], "gone/a.txt cannot be read: No such file or directory."),
])  # fmt: skip
def test_a_file_that_has_not_what_is_asked_for_is_refused_when_it_is_opened(tmp_path, name, content, fields, message):
    path = str(tmp_path / name) if content is None else _write(tmp_path, name, content)
    with pytest.raises(ValueError) as raised:
        data.TextFile(path, fields)
    assert message in str(raised.value) and name in str(raised.value)


ARRAY = json.dumps([{"id": id_, "text": text} for id_, text in ROWS], ensure_ascii=False)


@pytest.mark.parametrize("piece", [2**20, 7])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl"])
@pytest.mark.parametrize("content", [
    ARRAY, "\ufeff \r\n" + json.dumps(json.loads(ARRAY), indent=2) + "\n\n", ARRAY.replace("}, {", "}\n,\n{")])
def test_an_array_of_json_is_read_element_by_element(tmp_path, monkeypatch, piece, name, content):
    monkeypatch.setattr(example_files, "PIECE", piece)
    monkeypatch.setattr(rows, "BLOCK", piece)
    path = _write(tmp_path, name, content)
    assert _all(data.TextFile(path, ["text", "id"])) == ([(text, id_) for id_, text in ROWS], [])
    assert [one.texts for one in data.TextFile(path, ["text"]).examples()] == [(text,) for _, text in ROWS]


def test_elements_of_an_array_that_cannot_be_used_are_told_with_their_lines(tmp_path):
    path = _write(tmp_path, "a.json", '[\n{"text": "a"},\n5,\n{"txt":\n"b"}, {"text": "c"}\n]')
    assert _all(data.TextFile(path, ["text"])) == ([("a",), ("c",)], [
        f'{path}, line 3: it must be an object such as {{"text": "..."}}, not 5.',
        f"{path}, line 4: it has no field 'text', only 'txt'."])
    assert _all(data.TextFile(_write(tmp_path, "none.json", "[ ]"), ["text"])) == ([], [])


@pytest.mark.parametrize("content, line, message", [
    (b'[{"text": "a"},\n{"text": "b",}]', 2, "the array is no JSON (Expecting property name enclosed in double"),
    (b'[{"text": "a"},\n{"text": "b"', 2, "the array is no JSON (Expecting ',' delimiter)"),
    (b'[{"text": "a"}\n', 2, "the array has no closing bracket"),
    (b'[{"text": "a"}\n{"text": "b"}]', 2, "a comma or a closing bracket is missing after an element of the array"),
    (b'[{"text": "a"}]\n[{"text": "b"}]', 2, "there is more after the array, and a file holds one array or lines"),
    (b'[{"text": "a"},\n]', 2, "a comma stands before the array's closing bracket"),
    (b'["\xff"]', 1, "it is not UTF-8 (byte 0xff)"), (b'[' + b"[" * 99_999, 1, "the array cannot be read ("),
    (b'[\n' + b"1" * 5000 + b"]", 2, "the array cannot be read (")])
def test_a_broken_array_ends_the_reading_whatever_may_be_left_out(tmp_path, content, line, message):
    path = _write(tmp_path, "a.json", content)
    with pytest.raises(data.BadData) as raised:
        _all(data.TextFile(path, ["text"]))
    assert str(raised.value).startswith(f"{path}, line {line}: {message}") and str(raised.value).endswith(".")


@pytest.mark.parametrize("name", ["a.jsonl", "b.json", "e.txt"])  # a table has its header once
def test_concatenated_files_may_have_byte_order_marks_between_them(tmp_path, name):
    path = _write(tmp_path, name, ("\ufeff" + CONTENTS[name].rstrip("\n") + "\n") * 2)
    assert _all(data.TextFile(path, ["text"])) == ([(text,) for _, text in ROWS] * 2, [])


@pytest.mark.parametrize("name, content, count", [
    ("a.txt", "one\n\nthree", 3), ("a.txt", "one\ntwo\n", 2), ("a.txt", "", 0), ("a.jsonl", CONTENTS["a.jsonl"], 5),
    ("a.json", json.dumps([{"text": "one"}, {"text": "two"}]), None), ("c.tsv", CONTENTS["c.tsv"], None),
    ("a.txt.gz", "one\n", None)])
def test_lines_are_counted_where_each_is_an_example(tmp_path, name, content, count):
    file = data.TextFile(_write(tmp_path, name, content), ["text"])
    assert file.num_lines() == count
    assert count is None or count == len(list(file.examples()))


def test_a_stream_whose_lines_lack_the_fields_is_refused():
    with pytest.raises(ValueError, match="The lines cannot be read so: its fields must be names, not 0"):
        data.examples_of_lines(io.BytesIO(b"{}"), "json", [0])


def test_every_line_of_a_file_is_there_in_its_order_with_what_stands_in_it(tmp_path):
    path = _write(tmp_path, "a.csv", b'text,n\r\n"two\r\nlines",1\r\n\r\na\x00b,2\r\n"x"y,3\r\nb\xff,4\r\nlast,5')
    found = [(one.texts, one.fault[:11], one.raw) for one in data.TextFile(path, ["text"]).examples()]
    assert found == [(("two\r\nlines",), "", b""), (None, "", b"\r\n"), (("a\0b",), "", b""),
                     (None, "it is no CS", b'"x"y,3\r\n'), (None, "it is not U", b"b\xff,4\r\n"), (("last",), "", b"")]


def test_a_packed_file_that_is_none_or_is_cut_off_is_told(tmp_path):
    (tmp_path / "plain.txt.gz").write_bytes(b"not packed\n")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(9999)))[:-2000])
    with pytest.raises(data.BadData, match=r"plain.txt.gz cannot be read: Not a gzipped file"):
        _all(data.TextFile(str(tmp_path / "plain.txt.gz"), ["text"]))
    with pytest.raises(data.BadData, match=r"cut.txt.gz cannot be read: Compressed file ended before"):
        _all(data.TextFile(str(tmp_path / "cut.txt.gz"), ["text"]))


def test_a_packed_file_goes_on_from_any_place_where_a_piece_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(example_files, "PIECE", 20)
    path = _write(tmp_path, "a.txt.gz", "".join(f"line {n}\n" for n in range(20)))
    [(place, end)] = data.TextFile(path, ["text"]).pieces()
    whole, places = data.TextFile(path, ["text"]), []
    while place >= 0:
        places.append((place, *whole.read(place, end)))
        place = places[-1][-1]
    assert len(places) > 5
    for place, *found in reversed(places):
        assert list(data.TextFile(path, ["text"]).read(place, end)) == found
        assert list(whole.read(place, end)) == found


def test_files_are_found_by_paths_globs_and_lists_each_once(tmp_path):
    for name in ("b.txt", "a.txt", "[1].txt"):
        _write(tmp_path, name, "x\n")
    paths = [str(tmp_path / name) for name in ("[1].txt", "a.txt", "b.txt")]
    assert data.find_files("FILES", str(tmp_path / "*.txt")) == paths
    assert data.find_files("FILES", [paths[0], str(tmp_path / "?.txt"), paths[1]]) == paths
    for wrong, message in (
            (str(tmp_path / "*.csv"), r"FILES: there is no file '.*\*.csv'"),
            (str(tmp_path), r"FILES: '.*' is a folder; name its files, for example"),
            ([], r"FILES must be a path, a glob, or a list of them, not \[\]"),
            (None, "FILES must be a path, a glob, or a list of them, not None"),
            ([""], "FILES must be text that is not empty")):
        with pytest.raises(ValueError, match=message):
            data.find_files("FILES", wrong)


def test_a_link_to_a_file_on_a_disk_that_fails_is_no_link_to_nothing(tmp_path, monkeypatch):
    (tmp_path / "link.txt").symlink_to(_write(tmp_path, "a.txt", "text\n"))
    file, status = data.TextFile(str(tmp_path / "link.txt"), ["text"]), os.stat

    def stat(path, **options):
        if str(path).endswith("link.txt"):
            raise OSError(errno.EIO, "Input/output error")
        return status(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(example_files.UnreachableData, match="link.txt cannot be read: Input/output error"):
        _all(file)
