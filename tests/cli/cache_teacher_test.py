"""`switch-tf cache --teacher` stores predictions for TEACHER_PREDICTIONS, and refuses mistakes in one sentence."""

import json
import shutil

import pytest

STUDENT = "--gin_file=gin/models/t5_tiny.gin --gin_file=gin/tasks/docs_corpus.gin"
DISTILL = f"{STUDENT} --gin_file=gin/runs/distill.gin"
SMALL = ("--gin.SwitchConfig.d_model=16 --gin.SwitchConfig.d_ff=24 --gin.SwitchConfig.num_encoder_layers=1 "
         "--gin.SwitchConfig.num_decoder_layers=1 --gin.BATCH_SIZE=4 --gin.TRAIN_STEPS=2 "
         "--gin.TASK_FEATURE_LENGTHS={'inputs':24,'targets':6}")


@pytest.mark.parametrize("words, message", {
    "--output=x": "--teacher needs the gin files of its student", DISTILL: "--teacher needs an --output",
    f"--output=x {DISTILL} --top_k=0": "--top_k must be an integer of at least 1, not 0",
    f"--output=x {DISTILL} docs_corpus_span_corruption": "names no shipped gin file",
    f"--output=x {DISTILL} --split train": "--split does not go with --teacher",
    f"--output=x {DISTILL} -- --runner=x": "leave out -- --runner=x",
    f"--output=x {STUDENT} --gin_file=gin/runs/pretrain.gin {SMALL}": "These gin files have no distillation",
    f"--output=x {DISTILL} {SMALL} --top_k=5000": "--top_k must be at most the vocab_size of 4096, not 5000",
    f"--output=x {DISTILL} {SMALL} --teacher=nowhere":
        "--teacher must be a folder: Hugging Face's, which holds config.json",
    f"--output=x {DISTILL} {SMALL} --gin.SwitchConfig.vocab_size=512 --gin_file=gin/tasks/docs_corpus_bytes.gin":
        "A teacher needs the student's vocab_size, 512",
    f"--output=mine {DISTILL} {SMALL} --overwrite": "has thesis.tex; name another one"}.items())
def test_mistakes_are_sentences(words, message, tmp_path, refused, sparse_run):
    (tmp_path / "teacher").symlink_to(sparse_run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert message in refused(f"cache --teacher=teacher {words}")


@pytest.mark.slow
def test_a_student_trains_from_the_folder_when_the_teacher_is_gone(tmp_path, call, monkeypatch, sparse_run):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sparse_run, "teacher")
    words = f"cache --teacher=teacher {DISTILL} {SMALL} --output=predictions --json"
    result, err = call(words)
    assert result["rows"] == result["new_rows"] == 8 and result["teacher_predictions"] == "predictions"
    assert "--gin.TEACHER_PREDICTIONS=\"'predictions'\"" in err
    assert call(words)[0]["new_rows"] == 0
    assert "its top_k was 32 and is 8" in call(f"{words} --top_k=8", status=2)[1]
    call(f"{words} --top_k=8 --overwrite")

    shutil.rmtree("teacher")
    train = (f"train {DISTILL} {SMALL} --gin.TEACHER='gone' --gin.INITIAL_CHECKPOINT=None --gin.EVAL_PERIOD=0 "
             "--gin.TEACHER_PREDICTIONS='predictions' --gin.MODEL_DIR='student' --gin.LOG_PERIOD=1")
    assert "A row of the next batch has no predictions in predictions" in call(f"{train} --gin.SEED=1", status=2)[1]
    shutil.rmtree("student")
    call(train)
    lines = map(json.loads, (tmp_path / "student" / "metrics.jsonl").read_text().splitlines())
    line = next(line for line in lines if "train/loss" in line)
    assert line["train/teacher_cross_entropy"] > line["train/distillation"] > 0
