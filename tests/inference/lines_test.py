"""Whatever stands in a file of lines has its record, in order; and what was written is gone on with."""

import io
import json

import pytest

from switch_tf import data
from switch_tf.inference import lines
from switch_tf.inference.text_model import Answer, Inputs
from switch_tf.refusals import Refusal


class Echo:
    """A model that answers a text with itself; texts of more than 9 letters are cut, "!" alone is nothing to it."""

    batch_size = 2

    def __init__(self, num_results=1):
        self.num_results = num_results
        self.asked = []

    def read(self, text):
        if text == "!":
            raise Refusal("There is no text in it.")
        return Inputs([text[:9]], max(0, len(text) - 9))

    read_target = read

    def answer(self, inputs, rows):
        self.asked.append(rows)
        return [[Answer(ids[0], -float(result), []) for result in range(self.num_results)] for ids in inputs]

    def score(self, inputs, targets):
        return [-float(len(one[0]) + len(other[0])) for one, other in zip(inputs, targets, strict=True)]


def read(raw, kind="lines", fields=("inputs",)):
    return lines.read(data.examples_of_lines(io.BytesIO(b"".join(raw)), kind, fields))


def answered(raw, model=None, kind="lines", fields=("inputs",), has_targets=False):
    return [record for records in lines.answers(read(raw, kind, fields), model or Echo(), has_targets)
            for record in records]


def test_each_line_has_a_record_in_order():
    model = Echo()
    assert answered([b"one\n", b"\n", b"two\r\n", b"b\xffd\n", b"!\n", b"a longer text\n", b"last"], model) == [
        {"input": "one", "output": "one", "score": 0.0}, {"input": "", "error": "The line is empty."},
        {"input": "two", "output": "two", "score": 0.0},
        {"input": "b\ufffdd", "error": "It is not UTF-8 (byte 0xff after 1 others)."},
        {"input": "!", "error": "There is no text in it."},
        {"input": "a longer text", "cut": 4, "output": "a longer ", "score": 0.0},
        {"input": "last", "output": "last", "score": 0.0}]
    assert model.asked == [[0, 2], [5, 6]]  # a line draws by its number, whatever the batch


def test_further_results_stand_beside_the_best():
    assert answered([b"x\n"], Echo(3))[0]["others"] == [{"output": "x", "score": -1.0}, {"output": "x", "score": -2.0}]


def test_json_lines_and_targets():
    raw = [b'{"inputs": "ab", "targets": "c"}\n', b'{"inputs": "ab", "targets": "0123456789ab"}\n',
           b'{"inputs": "ab"}\n', b'{"inputs": 3, "targets": "c"}\n', b'[1]\n', b'{"a\n', b'\n',
           b'{"inputs": "!", "targets": "c"}\n']
    found = answered(raw, kind="json", fields=("inputs", "targets"), has_targets=True)
    assert found[:2] == [{"input": "ab", "target": "c", "score": -3.0},
                         {"input": "ab", "target": "0123456789ab", "target_cut": 3, "score": -11.0}]
    assert [record["error"] for record in found[2:]] == [
        "It has no field 'targets', only 'inputs'.", "The field 'inputs' must be text, not 3.",
        "It must be an object such as {\"inputs\": \"...\"}, not [1].",
        "It is no JSON (Unterminated string starting at, column 2), and a line is one whole object.",
        "The line is empty.", "There is no text in it."]
    assert [record["input"] for record in found[2:]] == [
        '{"inputs": "ab"}', '{"inputs": 3, "targets": "c"}', "[1]", '{"a', "", "!"]


def test_many_bad_lines_are_written_as_they_come():
    batches = list(lines.answers(read([b"\n"] * 70), Echo()))
    assert [len(batch) for batch in batches] == [32, 32, 6]


RAW = [b"one\n", b"two\n", b"b\xffd\n", b"four\n"]


@pytest.fixture
def write(tmp_path):
    """A function that answers lines into one file."""

    def write(raw, count=99, **settings):
        output = lines.Output(tmp_path / "out.jsonl", {"step": 3, **settings})
        found = output.after_what_is_there(read(raw))
        for records, _ in zip(lines.answers(found, Echo()), range(count), strict=False):
            output.write(records)
        output.close()
        return (tmp_path / "out.jsonl").read_text()

    return write


def test_what_was_written_is_gone_on_with_and_half_a_line_is_written_anew(write, tmp_path):
    whole = write(RAW)
    for left in (0, 5, len(whole) // 2, len(whole) - 1, len(whole)):
        (tmp_path / "out.jsonl").write_text(whole[:left])
        assert write(RAW) == whole
    assert [json.loads(line)["input"] for line in whole.splitlines()] == ["one", "two", "b\ufffdd", "four"]


def test_a_long_half_line_is_cut_off_and_half_a_character_has_its_record(tmp_path):
    raw = [b'{"inputs": "a"}\n', b'{"inputs": "b \\ud800"}\n', b'{"inputs": "c"}\n']
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        output = lines.Output(path, {})
        for records in lines.answers(output.after_what_is_there(read(raw, "json")), Echo()):
            output.write(records)
        output.close()
        assert [json.loads(line)["input"] for line in path.read_text().splitlines()] == [
            "a", '{"inputs": "b \\ud800"}', "c"]
        with open(path, "a") as file:
            file.write("x" * 200_000)


def test_another_output_is_not_gone_on_with(write, tmp_path):
    whole = write(RAW, 1)
    with pytest.raises(ValueError, match="was begun with step 3, and now it is 4; use the same, or name another"):
        write(RAW, step=4)
    with pytest.raises(ValueError, match="Line 2 of .* answers 'two', and of the input that is 'too'"):
        write([b"one\n", b"too\n"])
    with pytest.raises(ValueError, match="Line 2 of .* answers 'two', and of the input it ends before"):
        write(RAW[:1])
    assert (tmp_path / "out.jsonl").read_text() == whole
    (tmp_path / "out.jsonl").write_text("my own notes\n")
    with pytest.raises(ValueError, match="Line 1 of .* is no record of this command"):
        write(RAW)
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match="exists and is no unfinished output of this command"):
        write(RAW)
    assert (tmp_path / "out.jsonl").read_text() == "my own notes\n"


def test_a_score_that_is_not_finite_is_null(tmp_path):
    output = lines.Output(tmp_path / "out.jsonl", {})
    output.write([{"input": "a", "score": float("-inf")}])
    output.close()
    assert (tmp_path / "out.jsonl").read_text() == '{"input": "a", "score": null}\n'
