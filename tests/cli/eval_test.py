import json
import os
import sys
import types

import pytest

from switch_tf import SwitchConfig
from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import select
from switch_tf.cli import options
from switch_tf.configs.run import Run, StepSettings
from switch_tf.evaluation import split_evaluator
from switch_tf.partitioning import cluster
from switch_tf.partitioning.partitioner import Partitioner

TASKS = '''
import seqio
import tensorflow as tf
from t5.evaluation import metrics
from switch_tf.tasks import preprocessors, vocabularies

def numbers(split, shuffle_files=False, seed=None):
    return tf.data.Dataset.range({"train": 100, "validation": 9}[split]).map(lambda number: {
        "inputs": tf.strings.join(["parity: ", tf.as_string(number)]),
        "targets": tf.where(number % 2 == 0, "even", "odd")})

def score(targets, scores):
    return {"score": float(sum(scores))}

score.lower_is_better = False

for name, function in (("toy_parity", metrics.accuracy), ("toy_scored", score)):
    seqio.TaskRegistry.add(
        name, source=seqio.FunctionDataSource(numbers, splits=["train", "validation"],
                                              num_input_examples={"train": 100, "validation": 9}),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features=preprocessors.output_features(vocabularies.byte()), metric_fns=[function])
seqio.MixtureRegistry.add("toys", ["toy_parity", "toy_scored"], default_rate=1.0)
'''
GIN = '''
from __gin__ import dynamic_registration
import toy_tasks
MIXTURE_OR_TASK_NAME = "toys"
TASK_FEATURE_LENGTHS = {"inputs": 12, "targets": 6}
'''


@pytest.fixture
def run_folder(tmp_path):
    """A run folder that holds a configuration and empty checkpoints."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "operative_config.gin").write_text("# nothing\n")
    for step in (10, 20):
        folders.path_of(tmp_path / "run" / "checkpoints", step).mkdir(parents=True)
    return tmp_path / "run"


def test_weights_and_checkpoints_are_no_runs_and_the_way_on_is_named(run_folder, tmp_path, refused):
    for folder, way_on in (("converted", "holds weights alone; train from them, with --initial_checkpoint="
                            "converted."), ("run/checkpoints/step_00000010", "give --run=run, and --step to")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "checkpoint.json").write_text("{}")
        for command in ("eval", "export --output=exported"):
            told = refused(f"{command} --run={folder}")
            assert f"which holds operative_config.gin, and {folder} " in told and way_on in told


def test_a_run_without_checkpoints_says_so(run_folder, refused):
    for step in (10, 20):
        folders.path_of(run_folder / "checkpoints", step).rmdir()
    assert "has no checkpoint yet; train it first, or add --follow" in refused("eval --run=run")


def test_several_processes_do_not_follow(run_folder, monkeypatch, refused):
    variables = {}
    cluster.put(variables, ["127.0.0.1:1", "127.0.0.1:2"], 0)
    monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])
    assert "--follow works in one process" in refused("eval --run=run --follow")


def test_steps_are_chosen_by_number_or_word(run_folder):
    def chosen(step):
        return [int(path.name.removeprefix("step_")) for path in select(run_folder, step)]

    assert chosen("all") == [10, 20]
    assert chosen("last") == [20]
    assert chosen("10") == [10]
    folders.set_best(run_folder / "checkpoints", step=10, metric="eval/task/f1", value=0.5)
    assert chosen("best") == [10]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_passed_over_and_a_broken_one_told(
        run_folder, monkeypatch, call, is_removed):
    def evaluate(checkpoint):
        if checkpoint.name == "step_00000010":
            if is_removed:
                checkpoint.rmdir()
            raise folders.BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json.")
        return {"step": 20, "tasks": {"task": {"f1": 0.5}}, "average": None, "num_examples": {"task": 1234}}

    monkeypatch.setattr(options, "load", lambda *arguments, **options: None)
    monkeypatch.setattr("switch_tf.experiments.place_here", lambda described, is_checked: types.SimpleNamespace(
        config=SwitchConfig(), run=Run("run", "task", {"inputs": 8, "targets": 8}, 20, 2), settings=StepSettings(),
        partitioner=Partitioner()))
    monkeypatch.setattr(folders, "check_size", lambda config, checkpoint: None)
    monkeypatch.setattr(split_evaluator, "CheckpointEvaluator", lambda *arguments: types.SimpleNamespace(
        output="output", close=lambda: None, evaluate=evaluate))
    out, err = call(f"eval --run={run_folder} --step=all", status=0 if is_removed else 2)
    assert ("step_00000010 was removed by its run" in err) == is_removed
    assert ("task  " in out and "f1 0.5000  (1,234 examples)" in out) == is_removed


@pytest.mark.slow
def test_checkpoints_of_a_mixture_score_alike_with_any_batch_and_layout(tmp_path, process):
    (tmp_path / "toy_tasks.py").write_text(TASKS)
    (tmp_path / "toys.gin").write_text(GIN)

    def call(line):
        return process(f"{line} --json", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))[0]

    call("train --gin_file=gin/models/switch_tiny.gin --gin_file=toys.gin --gin_file=gin/runs/pretrain.gin "
         "--gin.SwitchConfig.num_encoder_layers=1 --gin.SwitchConfig.num_decoder_layers=1 "
         "--gin.SwitchConfig.encoder_sparse_step=1 --gin.MODEL_DIR='run' --gin.TRAIN_STEPS=45 --gin.BATCH_SIZE=16 "
         "--gin.EVAL_PERIOD=15 --gin.CHECKPOINT_PERIOD=15 --gin.LOG_PERIOD=15 "
         "--gin.BEST_METRIC='eval/toy_scored/score'")
    every = call("eval --run=run --trust --step=all --gin.BATCH_SIZE=7")["results"]
    assert [result["step"] for result in every] == [15, 30, 45]
    assert set(every[-1]["tasks"]) == {"toy_parity", "toy_scored"}
    (by_layout,) = call("eval --run=run --trust --gin.BATCH_SIZE=32 --gin_file=gin/layouts/expert_model.gin "
                        "--devices=8")["results"]
    assert by_layout["step"] == 45
    assert by_layout["tasks"]["toy_parity"] == every[-1]["tasks"]["toy_parity"]
    assert by_layout["tasks"]["toy_scored"]["score"] == pytest.approx(every[-1]["tasks"]["toy_scored"]["score"],
                                                                     rel=1e-4)
    best = folders.best(tmp_path / "run" / "checkpoints")
    assert best["value"] == pytest.approx(max(result["tasks"]["toy_scored"]["score"] for result in every), rel=1e-4)
    # What training wrote of the same examples.
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    written = {line["step"]: line["eval/toy_scored/score"] for line in lines if "eval/toy_scored/score" in line}
    assert {result["step"]: pytest.approx(result["tasks"]["toy_scored"]["score"], rel=1e-4) for result in every} == {
        step: score for step, score in written.items() if step}
    predictions = tmp_path / "run" / "eval" / "validation" / "step_00000045" / "toy_parity.jsonl"
    records = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert [record["inputs"] for record in records] == [f"parity: {number}" for number in range(9)]
    assert len((tmp_path / "run" / "eval" / "scores.jsonl").read_text().splitlines()) == 4
