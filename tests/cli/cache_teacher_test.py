"""`switch-tf cache --teacher` stores predictions for TEACHER_PREDICTIONS, and refuses mistakes in one sentence."""

import json
import shutil

import pytest

from switch_tf.cli import main

STUDENT = ["--gin_file=gin/models/t5_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin"]
DISTILL = [*STUDENT, "--gin_file=gin/runs/distill.gin"]
SMALL = ["--gin.SwitchConfig.d_model=16", "--gin.SwitchConfig.d_ff=24", "--gin.SwitchConfig.num_encoder_layers=1",
         "--gin.SwitchConfig.num_decoder_layers=1", "--gin.BATCH_SIZE=4", "--gin.TRAIN_STEPS=2",
         "--gin.TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 6}"]


def refused(capsys, *words):
    """Returns the error output of a refused `switch-tf cache`."""
    assert main.main(["cache", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("switch-tf cache: ")]
    assert len(lines) == 1
    return lines[0]


def test_mistakes_are_sentences(tmp_path, capsys, sparse_run):
    output, teacher = f"--output={tmp_path / 'predictions'}", f"--teacher={sparse_run}"
    assert "--teacher needs the gin files of its student" in refused(capsys, teacher, output)
    assert "--teacher needs an --output" in refused(capsys, teacher, *DISTILL)
    assert "--top_k must be an integer of at least 1, not 0" in refused(capsys, teacher, output, *DISTILL, "--top_k=0")
    assert "TASK does not go with --teacher" in refused(capsys, "docs_corpus", teacher, output, *DISTILL)
    assert "--split does not go with --teacher" in refused(capsys, teacher, output, *DISTILL, "--split", "train")
    assert "leave out -- --runner=x" in refused(capsys, teacher, output, *DISTILL, "--", "--runner=x")
    assert "--top_k goes with --teacher" in refused(capsys, "docs_corpus_span_corruption", "--top_k=3")
    assert "These gin files have no distillation" in refused(
        capsys, teacher, output, *STUDENT, "--gin_file=gin/runs/pretrain.gin", *SMALL)
    assert "--top_k must be at most the vocab_size of 4096, not 5000" in refused(
        capsys, teacher, output, *DISTILL, *SMALL, "--top_k=5000")
    assert "--teacher must be a folder: Hugging Face's, which holds config.json" in refused(
        capsys, "--teacher=nowhere", output, *DISTILL, *SMALL)
    assert "A teacher needs the student's vocab_size, 512" in refused(
        capsys, teacher, output, *DISTILL, *SMALL, "--gin.SwitchConfig.vocab_size=512",
        "--gin_file=gin/tasks/docs_corpus_bytes.gin")
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "thesis.tex").write_text("")
    assert "has thesis.tex; name another one" in refused(capsys, teacher, output, *DISTILL, *SMALL, "--overwrite")
    assert (tmp_path / "predictions" / "thesis.tex").exists()


@pytest.mark.slow
def test_a_student_trains_from_the_folder_when_the_teacher_is_gone(tmp_path, capfd, monkeypatch, sparse_run):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sparse_run, "teacher")
    words = ["cache", "--teacher=teacher", *DISTILL, *SMALL, "--output=predictions", "--json"]
    assert main.main(words) == 0
    out, err = capfd.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["rows"] == result["new_rows"] == 8 and result["teacher_predictions"] == "predictions"
    assert "--gin.TEACHER_PREDICTIONS=\"'predictions'\"" in err
    assert main.main(words) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["new_rows"] == 0
    assert "its top_k was 32 and is 8" in refused(capfd, *words[1:], "--top_k=8")
    assert main.main([*words, "--top_k=8", "--overwrite"]) == 0

    shutil.rmtree("teacher")
    train = ["train", *DISTILL, *SMALL, "--gin.TEACHER='gone'", "--gin.INITIAL_CHECKPOINT=None", "--gin.EVAL_PERIOD=0",
             "--gin.TEACHER_PREDICTIONS='predictions'", "--gin.MODEL_DIR='student'", "--gin.LOG_PERIOD=1"]
    assert main.main([*train, "--gin.SEED=1"]) == 2
    assert "A row of the next batch has no predictions in predictions" in capfd.readouterr().err
    shutil.rmtree("student")
    assert main.main(train) == 0
    line = json.loads((tmp_path / "student" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["train/teacher_cross_entropy"] > line["train/distillation"] > 0
