import io
import json
import re
import shutil
import sys

import pytest

from switch_tf.checkpoints import folders
from switch_tf.cli import answering, main
from switch_tf.refusals import Refusal


@pytest.fixture
def infer(run_folder, tmp_path, monkeypatch, call):
    """A function that has the run "run" of this folder answer; returns as `call` does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(run_folder)
    return lambda words, **options: call(f"infer --run=run {words}", **options)


def _records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_lines_are_answered_and_gone_on_with_and_scored(infer, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    (tmp_path / "lines.txt").write_bytes(b"the <extra_id_0> array\n\n" + b"word " * 60 + b"\nb\xff\n")
    words = "--input=lines.txt --output=out.jsonl --batch_size=2"
    assert "4 lines answered, 2 of them with an error, 1 cut to 24 tokens" in infer(words)[1]
    whole = output.read_text()
    records = _records(whole)
    assert [sorted(record) for record in records] == [
        ["input", "output", "score"], ["error", "input"], ["cut", "input", "output", "score"], ["error", "input"]]
    output.write_text(whole[:whole.index("\n") + 9])
    result, err = infer(f"{words} --json")
    assert output.read_text() == whole and "Going on after the 1 lines" in err
    assert result["lines"] == 3
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"inputs": records[0]["input"], "targets": "the"}) + "\n")
    (scored,) = _records(infer("--input=pairs.jsonl --score")[0])
    assert scored["target"] == "the" and -40 < scored["score"] < 0
    assert main.main(["infer", "--run=run", "--input=pairs.jsonl", "--score", "--json"]) == 0
    assert _records(capsys.readouterr().out)[0] == scored  # records stay on standard output
    assert "was begun with sampler 'Greedy()', and now it is 'Sample(" in infer(
        f"{words} --sampler=sample --top_k=3", status=2)[1]


def test_a_table_is_read_by_column_and_raw_text_is_another_output(infer, tmp_path):
    (tmp_path / "table.csv").write_bytes(b"\xef\xbb\xbfquestion,answer\n\"the\narray\",a\nof,b\n")
    words = "--input=table.csv --output=out.jsonl --field="
    infer(f"{words}question")
    records = _records((tmp_path / "out.jsonl").read_text())
    assert [(record["input"], "output" in record) for record in records] == [("the\narray", True), ("of", True)]
    settings = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    assert settings["reading"]["sentinels"] == "gaps"
    settings["reading"]["prefix"] = "label: "
    (tmp_path / "out.jsonl.settings.json").write_text(json.dumps(settings))
    assert "was begun with reading " in infer(f"{words}question --raw", status=2)[1]
    assert "line 1: the header has no column 'questions'" in infer(f"{words}questions", status=2)[1]


@pytest.fixture(scope="module")
def answered(run_folder, tmp_path_factory):
    """A folder with a line, its answer and the settings of the answer."""
    folder = tmp_path_factory.mktemp("answered")
    (folder / "lines.txt").write_text("the <extra_id_0> array\n")
    assert main.main(["infer", f"--run={run_folder}", *_again(folder).split()]) == 0
    return folder


def _again(folder):
    return f"--input={folder}/lines.txt --output={folder}/out.jsonl"


@pytest.mark.parametrize("change", ["weights", "vocabulary", "model"])
def test_an_output_is_of_the_same_weights_vocabulary_and_model(infer, answered, tmp_path, change):
    folder = shutil.copytree(answered, tmp_path / "answered")
    infer(_again(folder))
    settings = json.loads((folder / "out.jsonl.settings.json").read_text())
    settings[change] = "another"
    (folder / "out.jsonl.settings.json").write_text(json.dumps(settings))
    assert f"was begun with {change} 'another', and now it is" in infer(_again(folder), status=2)[1]


@pytest.mark.parametrize("binding, name", [("SwitchConfig.jitter_noise=0.5", "model"),
                                           ("VOCABULARY='bytes'", "vocabulary")])
def test_another_configuration_is_another_output(infer, answered, tmp_path, binding, name):
    folder = shutil.copytree(answered, tmp_path / "answered")
    assert f"was begun with {name} " in infer(f"{_again(folder)} --gin.{binding}", status=2)[1]


def test_the_hash_of_weights_is_of_their_values(tmp_path):
    import tensorflow as tf

    hashes = []
    for value in (1.0, 1.0, 2.0):
        tf.train.Checkpoint(weight=tf.Variable([value])).write(str(tmp_path / "state"))
        hashes.append(folders.hash_of_weights(tmp_path))
    assert hashes[0] == hashes[1] != hashes[2]


def test_an_empty_file_has_no_answers(infer, tmp_path):
    (tmp_path / "lines.txt").write_text("")
    assert "0 lines answered" in infer("--input=lines.txt --output=out.jsonl")[1]
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_a_run_of_another_layout_answers_on_one_device(run_folder, infer, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "other")
    with open(folder / "operative_config.gin", "a") as file:
        file.write('include "gin/layouts/fully_sharded_model.gin"\nMESH_SHAPE = "data=4,model=2"\n')
    (tmp_path / "lines.txt").write_text("the <extra_id_0> array\n")
    answer, _ = infer("--input=lines.txt")
    assert infer("--input=lines.txt --run=other")[0] == answer and "score" in answer


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--sampler=beam --num_results=2", "--sampler=sample --seed=3",
                                   "--score --batch_size=3"])
def test_pjrt_answers_under_a_layout_as_one_device_does(infer, tmp_path, words):
    inputs = ("the <extra_id_0> array", "", "a", "of numbers", "b " * 40)
    texts = [{"inputs": text, "targets": "the"} for text in inputs]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    found = [_records(infer(f"--input=lines.jsonl --field=inputs {words} {layout}")[0]) for layout in (
        "", "--backend=pjrt --gin_file=gin/layouts/expert.gin --gin.MESH_SHAPE='data=8'")]
    scores = [[[result.pop("score", 0) for result in (record, *record.get("others", ()))] for record in records]
              for records in found]
    assert found[0] == found[1] and len(found[0]) == len(texts)
    assert sum(scores[0], []) == pytest.approx(sum(scores[1], []), rel=1e-5)


def test_what_is_typed_is_answered_line_by_line(infer, monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO(b"the array\n\nof numbers\n"))
    monkeypatch.setattr(sys, "stdin", typed)
    out, err = infer("--interactive --sampler=beam --num_results=2")
    assert len(re.findall(r"^ +-\d+\.\d{3}  ", out, re.MULTILINE)) == 4 and "The line is empty." in err


@pytest.mark.parametrize("kind, given, expected", [
    ("lines", {}, ["inputs"]), ("tsv", {}, [2]), ("csv", {"field": "1", "score": True}, [1, 0]),
    ("tsv", {"field": "question"}, ["question"]), ("json", {"field": "question"}, ["question"]),
    ("json", {}, "name the key of the text with --field."),
    ("json", {"field": "question", "score": True}, "name the key of the text with --target_field.")])
def test_a_run_trained_on_numbered_columns_reads_other_kinds_of_files(kind, given, expected):
    arguments = (given.get("field"), None, given.get("score", False), (2, 0), kind)
    if isinstance(expected, list):
        assert answering._choose_fields(*arguments) == expected
    else:
        with pytest.raises(Refusal, match=expected):
            answering._choose_fields(*arguments)


def test_a_run_trained_on_numbered_columns_answers_lines_of_text(kept_run, infer, tmp_path):
    run = shutil.copytree(kept_run, tmp_path / "columns")
    described = json.loads((run / "config.json").read_text())
    described["reading"]["fields"] = [1, 2]
    (run / "config.json").write_text(json.dumps(described))
    (tmp_path / "lines.txt").write_text("the array\n")
    (tmp_path / "table.tsv").write_text("1\tthe array\tx\n")
    (tmp_path / "objects.jsonl").write_text('{"inputs": "the array"}\n')
    for name in ("lines.txt", "table.tsv"):
        assert json.loads(infer(f"--run=columns --input={name}")[0])["input"] == "the array"
    words = "--run=columns --input=objects.jsonl"
    assert "holds JSON objects: name the key of the text with --field." in infer(words, status=2)[1]
    infer(f"{words} --field=inputs")
