import io
import json
import re
import shutil
import sys

import pytest

from switch_tf.checkpoints import folders
from switch_tf.cli import answering, main
from switch_tf.refusals import Refusal


def test_lines_are_answered_and_gone_on_with_and_scored(run_folder, tmp_path, capsys):
    source, output = tmp_path / "lines.txt", tmp_path / "out.jsonl"
    source.write_bytes(b"the <extra_id_0> array\n\n" + b"word " * 60 + b"\nb\xff\n")
    command = ["infer", f"--run={run_folder}", f"--input={source}", f"--output={output}", "--batch_size=2"]
    assert main.main(command) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [sorted(record) for record in records] == [
        ["input", "output", "score"], ["error", "input"], ["cut", "input", "output", "score"], ["error", "input"]]
    assert "4 lines answered, 2 of them with an error, 1 cut to 24 tokens" in capsys.readouterr().err
    whole = output.read_text()
    output.write_text(whole[:whole.index("\n") + 9])
    assert main.main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert output.read_text() == whole and "Going on after the 1 lines" in err
    assert json.loads(out)["lines"] == 3
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"inputs": records[0]["input"], "targets": "the"}) + "\n")
    assert main.main(["infer", f"--run={run_folder}", f"--input={pairs}", "--score"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["target"] == "the" and -40 < scored["score"] < 0
    assert main.main(["infer", f"--run={run_folder}", f"--input={pairs}", "--score", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == scored  # records stay on standard output
    assert main.main([*command, "--sampler=sample", "--top_k=3"]) == 2
    assert "was begun with sampler 'Greedy()', and now it is 'Sample(" in capsys.readouterr().err


def test_a_table_is_read_by_column_and_raw_text_is_another_output(run_folder, tmp_path, capsys):
    (tmp_path / "table.csv").write_bytes(b"\xef\xbb\xbfquestion,answer\n\"the\narray\",a\nof,b\n")
    command = ["infer", f"--run={run_folder}", f"--input={tmp_path / 'table.csv'}", "--field=question",
               f"--output={tmp_path / 'out.jsonl'}"]
    assert main.main(command) == 0
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(record["input"], "output" in record) for record in records] == [("the\narray", True), ("of", True)]
    settings = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    assert settings["reading"]["sentinels"] == "gaps"
    settings["reading"]["prefix"] = "label: "
    (tmp_path / "out.jsonl.settings.json").write_text(json.dumps(settings))
    assert main.main([*command, "--raw"]) == 2
    assert "was begun with reading " in capsys.readouterr().err
    assert main.main([*command[:3], "--field=questions"]) == 2
    assert "line 1: the header has no column 'questions'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def answered(run_folder, tmp_path_factory):
    """A folder with a line, its answer and the settings of the answer."""
    folder = tmp_path_factory.mktemp("answered")
    (folder / "lines.txt").write_text("the <extra_id_0> array\n")
    assert main.main(_again(run_folder, folder)) == 0
    return folder


def _again(run, folder):
    return ["infer", f"--run={run}", f"--input={folder / 'lines.txt'}", f"--output={folder / 'out.jsonl'}"]


@pytest.mark.parametrize("change", ["weights", "vocabulary", "model"])
def test_an_output_is_of_the_same_weights_vocabulary_and_model(run_folder, answered, tmp_path, capsys, change):
    folder = shutil.copytree(answered, tmp_path / "answered")
    assert main.main(_again(run_folder, folder)) == 0
    settings = json.loads((folder / "out.jsonl.settings.json").read_text())
    settings[change] = "another"
    (folder / "out.jsonl.settings.json").write_text(json.dumps(settings))
    assert main.main(_again(run_folder, folder)) == 2
    assert f"was begun with {change} 'another', and now it is" in capsys.readouterr().err


@pytest.mark.parametrize("binding, name", [
    ("--gin.SwitchConfig.jitter_noise=0.5", "model"), ("--gin.VOCABULARY='bytes'", "vocabulary")])
def test_another_configuration_is_another_output(run_folder, answered, tmp_path, capsys, binding, name):
    folder = shutil.copytree(answered, tmp_path / "answered")
    assert main.main([*_again(run_folder, folder), binding]) == 2
    assert f"was begun with {name} " in capsys.readouterr().err


def test_the_hash_of_weights_is_of_their_values(tmp_path):
    import tensorflow as tf

    hashes = []
    for value in (1.0, 1.0, 2.0):
        tf.train.Checkpoint(weight=tf.Variable([value])).write(str(tmp_path / "state"))
        hashes.append(folders.hash_of_weights(tmp_path))
    assert hashes[0] == hashes[1] != hashes[2]


def test_an_empty_file_has_no_answers(run_folder, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("")
    assert main.main(["infer", f"--run={run_folder}", f"--input={tmp_path / 'lines.txt'}",
                      f"--output={tmp_path / 'out.jsonl'}"]) == 0
    assert (tmp_path / "out.jsonl").read_text() == "" and "0 lines answered" in capsys.readouterr().err


def test_a_run_of_another_layout_answers_on_one_device(run_folder, tmp_path, capsys):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    configuration = (folder / "operative_config.gin").read_text()
    configuration += 'include "gin/layouts/fully_sharded_model.gin"\nMESH_SHAPE = "data=4,model=2"\n'
    (folder / "operative_config.gin").write_text(configuration)
    (tmp_path / "lines.txt").write_text("the <extra_id_0> array\n")
    answers = []
    for run in (folder, run_folder):
        assert main.main(["infer", f"--run={run}", f"--input={tmp_path / 'lines.txt'}"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and "score" in answers[0]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--sampler=beam", "--num_results=2"], ["--sampler=sample", "--seed=3"],
                                   ["--score", "--batch_size=3"]], ids=" ".join)
def test_pjrt_answers_under_a_layout_as_one_device_does(run_folder, tmp_path, capsys, words):
    inputs = ("the <extra_id_0> array", "", "a", "of numbers", "b " * 40)
    texts = [{"inputs": text, "targets": "the"} for text in inputs]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    found = []
    for layout in ([], ["--backend=pjrt", "--gin_file=gin/layouts/expert.gin", "--gin.MESH_SHAPE='data=8'"]):
        assert main.main(["infer", f"--run={run_folder}", f"--input={tmp_path / 'lines.jsonl'}", "--field=inputs",
                          *words, *layout]) == 0
        found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    scores = [[[result.pop("score", 0) for result in (record, *record.get("others", ()))] for record in records]
              for records in found]
    assert found[0] == found[1] and len(found[0]) == len(texts)
    assert sum(scores[0], []) == pytest.approx(sum(scores[1], []), rel=1e-5)


def test_what_is_typed_is_answered_line_by_line(run_folder, monkeypatch, capsys):
    typed = io.TextIOWrapper(io.BytesIO(b"the array\n\nof numbers\n"))
    monkeypatch.setattr(sys, "stdin", typed)
    assert main.main(["infer", f"--run={run_folder}", "--interactive", "--sampler=beam", "--num_results=2"]) == 0
    out, err = capsys.readouterr()
    assert len(re.findall(r"^ +-\d+\.\d{3}  ", out, re.MULTILINE)) == 4 and "The line is empty." in err


@pytest.mark.parametrize("arguments, message", [
    ([], "Give --input, a file of lines or - for standard input, or --interactive"),
    (["--input=nowhere.txt"], "--input must be a file, or - for standard input; 'nowhere.txt' is none"),
    (["--interactive", "--input=-"], "leave out --input, --output and --score"),
    (["--interactive", "--field=question"], "leave out --input, --output and --score, and --field"),
    (["--input=-", "--target_field=answer"], "--target_field goes with --score"),
    (["--input=-", "--step=all"], "one checkpoint answers"),
    (["--input=-", "--step=5"], "a step with a checkpoint (7)"),
    (["--input=-", "--output=nowhere/out.jsonl"], "--output must be a file in a folder that is there, or -"),
    (["--input=-", "--output=."], "--output must be a file in a folder that is there"),
    (["--input=-", "--top_k=4"], "--top_k goes with --sampler sample, not greedy"),
    (["--input=-", "--batch_size=0"], "--batch_size must be an integer of at least 1, not 0"),
    (["--input=-", "--score", "--sampler=beam"], "--score decodes nothing"),
    (["--input=-", "--sampler=sample", "--top_p=2"], "top_p must be a number in (0, 1], not 2.0"),
    (["--input=-", "--run=nowhere"], "--run must name a run folder"),
    (["--input=-", "--backend=dtensor"], "--backend must be one of 'auto', 'pjrt', not 'dtensor'."),
    (["--input=-", "--devices=4"], "--devices goes with --backend=pjrt; otherwise one device answers."),
    (["--input=-", "--backend=pjrt", "--gin.MESH_SHAPE='data=16'"], "'data=16' is for 16 devices, but there are 8"),
    (["--input=-", "--gin.MESH_SHAPE='data=8'"], "not on 8; leave out the mesh, or add --backend=pjrt.")])
def test_mistakes_are_one_sentence(run_folder, capsys, arguments, message):
    assert main.main(["infer", f"--run={run_folder}", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


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


def test_the_output_is_another_file_than_the_input(run_folder, tmp_path, capsys):
    path = tmp_path / "lines.txt"
    path.write_text("a\n")
    assert main.main(["infer", f"--run={run_folder}", f"--input={path}", f"--output={path}"]) == 2
    assert "--output must be another file than --input" in capsys.readouterr().err
    assert path.read_text() == "a\n"


def test_a_run_trained_on_numbered_columns_answers_lines_of_text(kept_run, tmp_path, capsys):
    run = shutil.copytree(kept_run, tmp_path / "run")
    described = json.loads((run / "config.json").read_text())
    described["reading"]["fields"] = [1, 2]
    (run / "config.json").write_text(json.dumps(described))
    (tmp_path / "lines.txt").write_text("the array\n")
    (tmp_path / "table.tsv").write_text("1\tthe array\tx\n")
    (tmp_path / "objects.jsonl").write_text('{"inputs": "the array"}\n')
    for name in ("lines.txt", "table.tsv"):
        assert main.main(["infer", f"--run={run}", f"--input={tmp_path / name}"]) == 0
        assert json.loads(capsys.readouterr().out)["input"] == "the array"
    command = ["infer", f"--run={run}", f"--input={tmp_path / 'objects.jsonl'}"]
    assert main.main(command) == 2
    assert "holds JSON objects: name the key of the text with --field." in capsys.readouterr().err
    assert main.main([*command, "--field=inputs"]) == 0
