"""infer reads every form of file that training reads, and has one record for each line, row or element."""

import gzip
import json

import pytest

from switch_tf import data
from switch_tf.inference import lines

ROWS = ["one", "two, quoted", "three\nlines"]
FILES = {
    "bom.jsonl": "\ufeff" + "".join(json.dumps({"x": row, "y": "c"}) + "\n" for row in ROWS),
    "windows.jsonl": "".join(json.dumps({"x": row, "y": "c"}) + "\r\n" for row in ROWS),
    "array.json": json.dumps([{"x": row, "y": "c"} for row in ROWS], indent=1),
    "table.csv": '\ufeffy,x\r\nc,one\r\nc,"two, quoted"\r\nc,"three\nlines"',
}


def records(path, fields=("x",)):
    return [(texts, record["input"], record.get("error"))
            for _, record, texts in lines.read(data.TextFile(str(path), fields).examples())]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_every_form_of_file_has_a_record_for_each_text(tmp_path, name, packed):
    content = FILES[name].encode()
    (tmp_path / (name + packed)).write_bytes(gzip.compress(content) if packed else content)
    assert records(tmp_path / (name + packed)) == [((row,), row, None) for row in ROWS]
    trained = [row for texts, _ in data.TextFile(str(tmp_path / (name + packed)), ["x"]).all() for row in texts]
    assert trained == [(row,) for row in ROWS]


def test_what_cannot_be_used_has_its_record_where_it_stands(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\n\xef\xbb\xbftwo\r\nthree\rfour\n")
    found = records(tmp_path / "a.txt", ["inputs"])
    assert [shown for _, shown, _ in found] == ["one", "", "two", "three\rfour"]
    assert [error and error[:25] for _, _, error in found] == [
        None, "The line is empty.", None, "It has a carriage return "]
    (tmp_path / "a.tsv").write_bytes(b"a\t1\nb\nc\t3")
    assert [(texts, error) for texts, _, error in records(tmp_path / "a.tsv", [1, 0])] == [
        (("1", "a"), None), ((), "It has 1 column and needs at least 2."), (("3", "c"), None)]


def test_a_file_of_another_kind_is_read_as_it_is_asked_for(tmp_path):
    (tmp_path / "questions").write_text('{"x": "one"}\n')
    assert [one.texts for one in data.TextFile(str(tmp_path / "questions"), ["x"], "json").examples()] == [("one",)]
    assert data.kind_of("a.CSV.gz") == "csv" and data.kind_of("questions") is None


def test_an_output_is_gone_on_with_in_a_table_whose_rows_span_lines(tmp_path):
    (tmp_path / "a.csv").write_text(FILES["table.csv"].removeprefix("\ufeff"), newline="")
    for count in range(4):
        written = "".join(json.dumps({"input": row}) + "\n" for row in ROWS[:count])
        (tmp_path / "out.jsonl").write_text(written)
        (tmp_path / "out.jsonl.settings.json").write_text("{}")
        output = lines.Output(tmp_path / "out.jsonl", {})
        rest = output.after_what_is_there(lines.read(data.TextFile(str(tmp_path / "a.csv"), ["x"]).examples()))
        assert ([record["input"] for _, record, _ in rest], output.num_known) == (ROWS[count:], count)
        output.close()
