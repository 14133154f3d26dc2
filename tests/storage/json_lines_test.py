import json
import math
import os

import pytest

from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, places


def _strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_null():
    value = {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": (1, "NaN"), "e": True}
    assert _strict(json_lines.dumps(value)) == {"a": None, "b": [1.5, None, {"c": None}], "d": [1, "NaN"], "e": True}


def test_what_nests_too_deeply_is_not_written():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match="it is nested too deeply"):
        json_lines.dumps(value)


def test_files_of_older_versions_are_read():
    assert json_lines.loads('{"a": NaN, "b": [-Infinity]}') == {"a": None, "b": [None]}


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": 1} x', b"\x00"])
def test_what_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        json_lines.loads(text)


@pytest.mark.parametrize("bad", [b'{"step": 4', b"\xff\xfe", b"[]", b"[" * 100_000, b"", b'{"step": "4"}',
                                 b'{"step": true}', b'{"step": -1}'])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_line_anywhere_costs_that_line_and_a_word(tmp_path, capsys, bad, place):
    lines = [b'{"step": 1}', b'{"step": 2, "name": "\xe2\x80\xa8"}']
    lines.insert(place, bad)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\n".join(lines))
    records = [record["step"] for _, record in json_lines.read(path, lambda one: json_lines.is_step(one.get("step")))]
    assert records == [1, 2]
    if bad or place < 2:  # an empty last line is none
        assert f"skipped 1 unreadable line (line {place + 1})" in capsys.readouterr().err


def test_a_line_that_a_kill_cut_short_is_removed_and_one_that_lacks_its_end_gets_it(tmp_path):
    path = tmp_path / "scores.jsonl"
    json_lines.append(path, [{"step": 1}])
    path.write_bytes(path.read_bytes() + b'{"step": 2, "ev')
    json_lines.append(path, [{"step": 3, "value": math.nan}])
    assert [record for _, record in json_lines.read(path)] == [{"step": 1}, {"step": 3, "value": None}]
    path.write_bytes(path.read_bytes()[:-1])
    json_lines.append(path, [{"step": 4}])
    assert [record["step"] for _, record in json_lines.read(path)] == [1, 3, 4]
    for whole in (b"", b'{"step": 5}\n'):  # a torn line of several blocks
        path.write_bytes(whole + b'{"text": "' + b"x" * 200_000)
        json_lines.mend_end(path)
        assert path.read_bytes() == whole


def test_no_file_and_a_folder_hold_no_records(tmp_path):
    assert [*json_lines.read(tmp_path / "nothing")] == [*json_lines.read(tmp_path)] == []


def test_lines_of_a_bucket_are_read(bucket):
    path = places.at("gs://bucket/json_lines_test/a.jsonl")
    path.write_bytes(b'{"a": 1}\n[]\n{"a": 2}')
    assert [record for _, record in json_lines.read(path)] == [{"a": 1}, {"a": 2}]


def test_a_pipe_and_an_endless_line_are_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refusal, match="pipe must be a file of lines"):
        next(json_lines.lines(tmp_path / "pipe"))
    with pytest.raises(ValueError, match="it is no file"):
        json_lines.load(tmp_path / "pipe")
    with pytest.raises(Refusal, match="gs://bucket/a must be a file of lines"):
        next(json_lines.lines(tmp_path / "pipe", shown="gs://bucket/a"))
    monkeypatch.setattr(json_lines, "_LONGEST", 2**20)
    (tmp_path / "long").write_bytes(b"{}\n" + bytes(2**22))
    lines = json_lines.lines(tmp_path / "long")
    assert next(lines) == b"{}\n"
    with pytest.raises(Refusal, match="has a line of over 1 MiB"):
        next(lines)
    with pytest.raises(OSError, match="its last line is too long"):
        json_lines.mend_end(tmp_path / "long")
