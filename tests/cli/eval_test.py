import json
import os
import subprocess
import sys
import types

import pytest

from switch_tf import SwitchConfig
from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import select
from switch_tf.cli import main, options
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


@pytest.mark.parametrize(("arguments", "message"), [
    (["--run=nowhere"], "--run must name a run folder, which holds operative_config.gin; 'nowhere' does not."),
    (["--run=runn"], "'runn' does not. Did you mean 'run'?"),
    (["--run=run", "--step=15"], "--step must be best, last, all or a step with a checkpoint (10, 20), not '15'."),
    (["--run=run", "--step=-1"], "not '-1'"),
    (["--run=run", "--step=best"], "keeps no best checkpoint; give --step=last"),
    (["--run=run", "--examples=0"], "--examples must be an integer of at least 1, not 0."),
    (["--run=run"], "describe no run"),
])
def test_mistakes_are_one_sentence(run_folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(run_folder.parent)
    before = sorted(run_folder.rglob("*"))
    assert main.main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("switch-tf eval: ")
    assert error.count("\n") == 1
    assert sorted(run_folder.rglob("*")) == before


def test_weights_and_checkpoints_are_no_runs_and_the_way_on_is_named(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, way_on in (("converted", "holds weights alone; train from them, with --gin.INITIAL_CHECKPOINT="
                            "\"'converted'\"."), ("run/checkpoints/step_00000010", "give --run=run, and --step to")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "checkpoint.json").write_text("{}")
        for command in (["eval"], ["export", "--output=exported"]):
            assert main.main([*command, f"--run={folder}"]) == 2
            assert f"which holds operative_config.gin, and {folder} " in (told := capsys.readouterr().err)
            assert way_on in told and told.count("\n") == 1


def test_a_run_without_checkpoints_says_so(run_folder, capsys):
    for step in (10, 20):
        folders.path_of(run_folder / "checkpoints", step).rmdir()
    assert main.main(["eval", f"--run={run_folder}"]) == 2
    assert "has no checkpoint yet; train it first, or add --follow" in capsys.readouterr().err


def test_several_processes_do_not_follow(run_folder, monkeypatch, capsys):
    variables = {}
    cluster.put(variables, ["127.0.0.1:1", "127.0.0.1:2"], 0)
    monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])
    assert main.main(["eval", f"--run={run_folder}", "--follow"]) == 2
    assert "--follow works in one process" in capsys.readouterr().err


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
        run_folder, monkeypatch, capsys, is_removed):
    def evaluate(checkpoint):
        if checkpoint.name == "step_00000010":
            if is_removed:
                checkpoint.rmdir()
            raise folders.BrokenCheckpoint(f"{checkpoint} has no readable checkpoint.json.")
        return {"step": 20, "tasks": {"task": {"f1": 0.5}}, "average": None}

    monkeypatch.setattr(options, "load", lambda *arguments, **options: None)
    monkeypatch.setattr("switch_tf.experiments.on_this_machine", lambda described, is_checked: types.SimpleNamespace(
        config=SwitchConfig(), run=Run("run", "task", {"inputs": 8, "targets": 8}, 20, 2), settings=StepSettings(),
        partitioner=Partitioner()))
    monkeypatch.setattr(folders, "check_size", lambda config, checkpoint: None)
    monkeypatch.setattr(split_evaluator, "CheckpointEvaluator", lambda *arguments: types.SimpleNamespace(
        output="output", close=lambda: None, evaluate=evaluate))
    assert main.main(["eval", f"--run={run_folder}", "--step=all"]) == (0 if is_removed else 2)
    out, err = capsys.readouterr()
    assert ("step_00000010 was removed by its run" in err) == is_removed
    assert ("task  " in out and "f1 0.5000" in out) == is_removed


@pytest.mark.slow
def test_checkpoints_of_a_mixture_score_alike_with_any_batch_and_layout(tmp_path):
    (tmp_path / "toy_tasks.py").write_text(TASKS)
    (tmp_path / "toys.gin").write_text(GIN)

    def call(*arguments):
        done = subprocess.run([sys.executable, "-m", "switch_tf.cli", *arguments], cwd=tmp_path, capture_output=True,
                              text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    call("train", "--json", "--gin_file=gin/models/switch_tiny.gin", "--gin_file=toys.gin",
         "--gin_file=gin/runs/pretrain.gin", "--gin.MODEL_DIR='run'", "--gin.TRAIN_STEPS=45", "--gin.BATCH_SIZE=16",
         "--gin.EVAL_PERIOD=15", "--gin.CHECKPOINT_PERIOD=15", "--gin.LOG_PERIOD=15",
         "--gin.BEST_METRIC='eval/toy_scored/score'")
    every = call("eval", "--json", "--run=run", "--trust", "--step=all", "--gin.BATCH_SIZE=7")["results"]
    assert [result["step"] for result in every] == [15, 30, 45]
    assert set(every[-1]["tasks"]) == {"toy_parity", "toy_scored"}
    by_layout = call("eval", "--json", "--run=run", "--trust", "--gin.BATCH_SIZE=32",
                     "--gin_file=gin/layouts/expert_model.gin", "--devices=8")["results"]
    assert by_layout[0]["step"] == 45
    assert by_layout[0]["tasks"]["toy_parity"] == every[-1]["tasks"]["toy_parity"]
    assert by_layout[0]["tasks"]["toy_scored"]["score"] == pytest.approx(every[-1]["tasks"]["toy_scored"]["score"],
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
