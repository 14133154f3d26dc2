"""`switch-tf vocabulary`: from text files to a vocabulary that every task takes."""

import json
import os
import subprocess
import sys

import pytest

from switch_tf import data, sentencepiece_training
from switch_tf.cli import main
from switch_tf.tasks import docs_corpus  # noqa: F401  (registers)

LINES = [f"line {number}: a few words of plain text, number {number * 37}" for number in range(300)]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(LINES[:150]))
    (tmp_path / "b.csv").write_text("id,body\n" + "".join(f'{n},"{line}"\n' for n, line in enumerate(LINES[150:])))


def _refusal(capsys, *words):
    assert main.main(["vocabulary", *words]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("switch-tf vocabulary: ")]
    assert len(error) == 1
    return error[0].removeprefix("switch-tf vocabulary: ")


def test_a_vocabulary_is_trained_on_files_of_several_kinds_and_serves_a_task(capsys, tmp_path):
    status = main.main(["vocabulary", "--input", "*.txt", "b.csv", "--field", "body", "--size", "440", "--output",
                        "own.model", "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    result = json.loads(captured.out)
    # 440 pieces and 100 sentinels; 540 rows are no multiple of 128, 640 are.
    assert 1 < result.pop("characters_per_token") < 20
    assert result == {"output": "own.model", "num_texts": 300, "num_sentences": 300, "num_pieces": 440, "num_ids": 540,
                      "vocab_size": 640}
    assert "--gin.VOCABULARY=\"'own.model'\" --gin.SwitchConfig.vocab_size=640" in captured.err
    assert "candidates left" in captured.err
    assert data.vocabulary_size("docs_corpus_span_corruption", "own.model") == 540
    assert sentencepiece_training.train(LINES, 440) == (tmp_path / "own.model").read_bytes()


@pytest.mark.parametrize(("size", "message"), [
    (9000, r"--size must be at most \d+ for this text, which has no more pieces, not 9000\."),
    (20, r"--size must be more than \d+ for this text, because every byte and its frequent characters need"),
    (0, r"--size must be an integer of at least 1, not 0\."),
])
def test_sizes_that_the_text_does_not_allow_are_refused_and_nothing_is_left(capsys, tmp_path, size, message):
    import re

    assert re.match(message, _refusal(capsys, "--input", "a.txt", "--size", str(size), "--output", "own.model"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "b.csv"]


@pytest.mark.parametrize(("words", "message"), [
    (["--input", "gone.txt"], "--input: there is no file 'gone.txt'"),
    (["--input", "b.csv"], "b.csv, line 1: the header has no column 'text', only 'id', 'body';"),
    (["--input", "b.csv", "--field", "0", "body"], "must be names of its header, or numbers of columns from 0"),
    (["--input", "bad.jsonl"], "bad.jsonl, line 1: the field 'text' must be text, not 5."),
    (["--input", "empty.txt"], "There is no text in empty.txt."),
    (["--input", "a.txt", "--output", "b.csv"], "--output 'b.csv' is there already"),
    (["--input", "a.txt", "--output", "gone/own.model"], "--output 'gone/own.model' cannot be written, because 'gone'"),
    (["--input", "a.txt", "--output", "s3://bucket/own.model"], "--output must be a path of this machine or of a"),
    (["--input", "a.txt", "--output", "."], "--output must be a file, not '.'."),
])  # fmt: skip
def test_wrong_files_are_refused_in_a_sentence(capsys, tmp_path, words, message):
    (tmp_path / "bad.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "empty.txt").write_text("\n\n")
    assert message in _refusal(capsys, "--size", "400", "--output", "own.model", *words)
    assert not (tmp_path / "own.model").exists()


def test_a_training_that_is_killed_is_told(monkeypatch, capsys):
    started = subprocess.Popen

    def killed(command, **options):
        return started(["sh", "-c", "kill -9 $$"], **options)

    monkeypatch.setattr(sentencepiece_training.subprocess, "Popen", killed)
    assert "ended by signal 9, mostly for want of memory" in _refusal(
        capsys, "--input", "a.txt", "--size", "400", "--output", "own.model")


@pytest.mark.slow
def test_a_run_learns_a_users_own_text_with_a_users_own_vocabulary_by_gin_alone(tmp_path):
    """Everything a user types, in processes of their own: a vocabulary, a run, its goings-on, and what is refused."""
    rows = [json.dumps({"text": f"{line} and again {line}"}) for line in LINES * 3]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))

    def command(*words):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TPU_SKIP_MDS_QUERY": "1"}
        done = subprocess.run([sys.executable, "-m", "switch_tf.cli", *words], cwd=tmp_path, env=environment,
                              capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def train(steps, *bindings):
        files = [f"--gin_file=gin/{kind}.gin" for kind in ("models/switch_tiny", "tasks/text_files", "runs/pretrain")]
        return command("train", *files, "--gin.MODEL_DIR='run'", "--gin.TRAIN_FILES='a.jsonl'",
                       "--gin.VOCABULARY='own.model'", "--gin.SwitchConfig.vocab_size=640", "--gin.BATCH_SIZE=8",
                       "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}", "--gin.LOG_PERIOD=2",
                       "--gin.EVAL_PERIOD=2", "--gin.CHECKPOINT_PERIOD=2", f"--gin.TRAIN_STEPS={steps}", *bindings)

    made = command("vocabulary", "--input", "a.jsonl", "--size", "440", "--output", "own.model")
    assert made.returncode == 0 and "vocab_size=640" in made.stdout, made.stderr
    assert train(2).returncode == 0
    (tmp_path / "own.model").rename(tmp_path / "moved.model")
    gone = train(4)
    assert gone.returncode == 2 and "VOCABULARY 'own.model' is not there any more; this run keeps a copy" in gone.stderr
    assert train(4, "--gin.VOCABULARY='moved.model'").returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/text_files/loss" in line] == [0, 2, 4]
    assert [line["step"] for line in lines if "train/loss" in line] == [2, 4]
    (tmp_path / "a.jsonl").write_text("\n".join(reversed(rows)))
    changed = train(6, "--gin.VOCABULARY='moved.model'")
    assert changed.returncode == 2 and "other data: the training data, text_files: a.jsonl, was" in changed.stderr
