"""A fine-tuned run is moved and used from there, in processes of their own, as a user types it."""

import json
import os
import subprocess
import sys

import pytest

WORDS = ["the", "router", "sends", "each", "token", "to", "one", "expert", "and", "back", "again"]


def _command(folder, *words):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run([sys.executable, "-m", "switch_tf.cli", *words], cwd=folder, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def _train(folder, task, run, *bindings):
    files = [f"--gin_file=gin/{name}.gin" for name in ("models/switch_tiny", f"tasks/{task}", f"runs/{run}")]
    _command(folder, "train", *files, "--gin.SwitchConfig.vocab_size=640", "--gin.SwitchConfig.d_model=32",
             "--gin.BATCH_SIZE=8", "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 8}", "--gin.EVAL_PERIOD=0",
             "--gin.TRAIN_STEPS=2", *bindings)


@pytest.mark.slow
def test_a_fine_tuned_run_is_used_from_another_folder(tmp_path):
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir(), elsewhere.mkdir()
    texts = [" ".join(WORDS[i % 7:] + [f"number {i}"]) for i in range(200)]
    (work / "texts.txt").write_text("\n".join(texts))
    (work / "pairs.jsonl").write_text("\n".join(json.dumps({"inputs": text, "targets": "one"}) for text in texts))
    _command(work, "vocabulary", "--input", "texts.txt", "--size", "372", "--output", "own.model")
    _train(work, "text_files", "pretrain", "--gin.TRAIN_FILES='texts.txt'", "--gin.VOCABULARY='own.model'",
           "--gin.MODEL_DIR='first'")
    (work / "own.model").unlink()  # the first run keeps it, and so does the second
    _train(work, "text_to_text_files", "finetune", "--gin.TRAIN_FILES='pairs.jsonl'", "--gin.MODEL_DIR='tuned'",
           "--gin.INITIAL_CHECKPOINT='first'", "--gin.PREFIX='say: '")
    (work / "lines.txt").write_text("the router\n")
    before = _command(work, "infer", "--run=tuned", "--input=lines.txt").stdout
    (work / "tuned").rename(elsewhere / "sent")
    (work / "first").rename(work / "gone")
    (work / "lines.txt").rename(elsewhere / "lines.txt")
    assert _command(elsewhere, "infer", "--run=sent", "--input=lines.txt").stdout == before
    _command(elsewhere, "export", "--run=sent", "--output=exported")
    found = _command(elsewhere, "eval", "--run=sent", f"--gin.TRAIN_FILES='{work}/pairs.jsonl'", "--json").stdout
    assert json.loads(found)["results"][0]["step"] == 2
