"""A run, a cache, predictions of a teacher and answers that an earlier version wrote go on.

`golden/earlier_run.zip` was written on 2026-11-28, by the last version whose configurations gin itself wrote.
"""

import json
import pathlib
import zipfile

import pytest

from switch_tf import Experiment
from switch_tf.cli import main

EARLIER = pathlib.Path(__file__).parents[1] / "golden" / "earlier_run.zip"
# Losses that the same version came to when it went on.
LOSSES = {4: 6.183752536773682, 5: 5.676392555236816}
EVALUATION = 5.639603055756668


@pytest.fixture
def folder(tmp_path, monkeypatch):
    with zipfile.ZipFile(EARLIER) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_described_as_it_was(folder):
    described = Experiment.from_run("run")
    assert (described.config.d_model, described.config.num_experts) == (8, 2)
    assert (described.run.train_steps, described.run.vocabulary, described.activation_dtype) == (3, "bytes", "auto")
    assert described.optimizer.arguments["learning_rate"].arguments == {"base": 1.0, "warmup_steps": 10000}


@pytest.mark.slow
def test_a_run_is_trained_on_and_evaluated(folder, capsys):
    words = ["--gin_file=run/operative_config.gin", "--gin.TRAIN_STEPS=5", "--gin.EVAL_PERIOD=5"]
    assert main.main(["train", *words]) == 0
    assert "Going on from step 3" in capsys.readouterr().err
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    losses = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    assert {step: loss for step, loss in losses.items() if step > 3} == pytest.approx(LOSSES, rel=1e-5)
    (evaluated,) = (record for record in records if record["step"] == 5 and "eval/text_files/loss" in record)
    assert evaluated["eval/text_files/loss"] == pytest.approx(EVALUATION, rel=1e-5)
    assert main.main(["eval", "--run=run", "--step=3", "--json"]) == 0


@pytest.mark.slow
def test_its_cache_and_a_teachers_predictions_are_read_and_its_answers_gone_on_with(folder, capsys):
    words = ["--gin_file=run/operative_config.gin", "--gin.USE_CACHED_TASKS=True", "--gin.CACHE_DIR='cache'",
             "--gin.MODEL_DIR='cached'"]
    assert main.main(["train", *words]) == 0
    words = ["--gin_file=run/operative_config.gin", "--gin_file=gin/runs/distill.gin", "--gin.MODEL_DIR='student'",
             "--gin.VOCABULARY='bytes'", "--gin.BATCH_SIZE=4", "--gin.TEACHER='run'", "--gin.TRAIN_STEPS=3",
             "--gin.TEACHER_PREDICTIONS='predictions'", "--gin.EVAL_PERIOD=0"]
    assert main.main(["train", *words]) == 0
    settings = folder / "answers.jsonl.settings.json"
    settings.write_text(settings.read_text().replace("FOLDER", str(folder)))
    before = (folder / "answers.jsonl").read_text()
    (folder / "lines.txt").write_text((folder / "lines.txt").read_text() + "one more\n")
    assert main.main(["infer", "--run=run", "--input=lines.txt", "--output=answers.jsonl", "--max_length=4"]) == 0
    after = (folder / "answers.jsonl").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 3
    assert main.main(["convert", "--input=run", "--output=converted", "--to=hugging_face",
                      "--expert_capacity=24"]) == 0
