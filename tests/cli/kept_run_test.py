"""A run folder is enough to use its model: moved, without its gin file, its tasks and the files that it was made of."""

import json
import pathlib
import shutil
import sys

import pytest

from switch_tf.checkpoints import run_config
from switch_tf.cli import main, options

LINE = "the <extra_id_0> array\n"


@pytest.fixture
def moved(kept_run, tmp_path, monkeypatch):
    """The run in another place, and a working directory that has nothing to do with either."""
    folder = shutil.copytree(kept_run, tmp_path / "sent" / "renamed")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "lines.txt").write_text(LINE)
    return folder


def test_a_run_answers_from_its_data_as_from_its_gin_file(run_folder, moved, capsys, monkeypatch):
    assert main.main(["infer", f"--run={run_folder}", "--input=lines.txt"]) == 0
    expected = capsys.readouterr().out
    (moved / "operative_config.gin").unlink()
    monkeypatch.setattr(options.gin_syntax, "read", None)
    monkeypatch.setattr(options, "load", None)
    assert main.main(["infer", "--run=../sent/renamed", "--input=lines.txt", "--output=out.jsonl"]) == 0
    assert pathlib.Path("out.jsonl").read_text() == expected and "score" in expected


@pytest.mark.slow
def test_a_run_is_exported_from_its_data(moved):
    (moved / "operative_config.gin").unlink()
    assert main.main(["export", "--run=../sent/renamed", "--output=exported", "--json"]) == 0
    assert "docs_corpus_span_corruption" in pathlib.Path("exported/MODEL_CARD.md").read_text()


def test_what_the_data_say_is_what_the_gin_file_says(kept_run):
    saved = run_config.read(kept_run)
    assert (saved.task, saved.task_feature_lengths) == ("docs_corpus_span_corruption", {"inputs": 24, "targets": 5})
    assert (saved.model.d_model, saved.model.num_experts, saved.dtype, saved.activation_dtype) == (
        16, 8, "float32", "auto")
    assert saved.vocabularies["inputs"]["name"] == "docs_corpus" and saved.policies == {}
    assert [path.name for path in (kept_run / "vocabulary").iterdir()] == ["inputs.model"]


def test_the_gin_file_is_read_when_the_command_line_changes_it(moved, capsys, monkeypatch):
    """With the copy of the vocabulary, unless another one is chosen."""
    chosen = []
    reading_of = sys.modules["switch_tf.data"].reading_of
    monkeypatch.setattr("switch_tf.data.reading_of",
                        lambda task, vocabulary: chosen.append(vocabulary) or reading_of(task, vocabulary))
    assert main.main(["infer", f"--run={moved}", "--input=lines.txt", "--gin.SwitchConfig.jitter_noise=0.5"]) == 0
    assert main.main(["infer", f"--run={moved}", "--input=lines.txt", "--gin.VOCABULARY='bytes'"]) == 0
    assert chosen == [f"{moved}/vocabulary/inputs.model", "bytes"]


@pytest.mark.parametrize("inside", ["", "checkpoints/step_00000007"])
def test_a_run_is_inspected(kept_run, capsys, inside):
    assert main.main(["inspect", str(kept_run / inside), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    sizes = found["sizes"]
    assert (found["task"], found["vocabulary"], sizes["d_model"], sizes["num_heads"], sizes["num_experts"]) == (
        "docs_corpus_span_corruption", "docs_corpus", 16, 4, 8)
    assert "vocabulary  docs_corpus\n" in captured.err and found["step"] == 7


def test_a_run_that_has_neither_its_data_nor_its_gin_file_is_told(moved, capsys):
    found = json.loads((moved / "config.json").read_text())
    found["vocabularies"]["inputs"] = {"kind": "other", "name": "mine", "size": 50}
    (moved / "config.json").write_text(json.dumps(found))
    (moved / "operative_config.gin").write_bytes(b"\xff\xfe = 1\n")
    assert main.main(["infer", f"--run={moved}", "--input=lines.txt"]) == 2
    assert "operative_config.gin cannot be read" in capsys.readouterr().err
    (moved / "operative_config.gin").unlink()
    assert main.main(["infer", f"--run={moved}", "--input=lines.txt"]) == 2
    assert "has no operative_config.gin, which this command needs" in capsys.readouterr().err


def test_a_damaged_description_does_not_hide_the_checkpoint(moved, capsys):
    (moved / "config.json").write_text("[" * 100_000)
    assert main.main(["inspect", str(moved)]) == 0
    captured = capsys.readouterr()
    assert "step 7" in captured.out and "nested too deeply" in captured.err


@pytest.mark.parametrize("command", [["infer", "--input=lines.txt"], ["export", "--output=new"]])
@pytest.mark.parametrize("change, message", [
    (lambda found: found["model"].update(d_ff=2**31 - 1), "The configuration describes a model of"),
    (lambda found: found["model"].update(vocab_size=2**31 - 1), "The configuration describes a model of"),
    (lambda found: found["model"].update(d_ff=25), "has shape"),
    (lambda found: found["model"].update(routing_policy="mine"), "routing_policy must be one of"),
    (lambda found: found["vocabularies"]["inputs"].update(file="../../etc/passwd"),
     "must name a file in the folder 'vocabulary'"),
    (lambda found: found["vocabularies"]["inputs"].update(sha256="0" * 64), "its SHA-256 differs"),
    (lambda found: found["reading"].update(inputs_end="yes"), "inputs_end must be True or False"),
    (lambda found: found["reading"].update(more=1), "A reading must have the keys"),
])
def test_what_is_wrong_with_the_data_is_one_sentence(moved, capsys, command, change, message):
    found = json.loads((moved / "config.json").read_text())
    change(found)
    (moved / "config.json").write_text(json.dumps(found))
    assert main.main([*command, f"--run={moved}"]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize("command", [["eval"], ["infer", "--input=-", "--gin.SEED=1"],
                                     ["export", "--output=new", "--gin_file=gin/layouts/single.gin"]])
def test_no_command_runs_the_gin_file_of_a_stranger(run_folder, tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(run_folder, tmp_path / "run")
    text = (folder / "operative_config.gin").read_text()
    (folder / "operative_config.gin").write_text(
        "from __gin__ import dynamic_registration\n" "import subprocess\n" + text +
        f"INITIAL_CHECKPOINT = @subprocess.getoutput()\nsubprocess.getoutput.cmd = 'touch {tmp_path}/ran'\n")
    assert main.main([*command, "--run=run"]) == 2
    assert "imports 'subprocess', which switch_tf does not ship" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
