"""Two variants of a tiny model, trained in turns from the command line; what is refused, and what a stop keeps."""

import functools
import json
import signal
import subprocess
import sys
import time

import pytest

COMPARISON = """
from __gin__ import dynamic_registration
from switch_tf import comparison

MODEL_DIR = "out"
SEEDS = (0,)
comparison.Comparison:
  model_dir = %MODEL_DIR
  seeds = %SEEDS
  turn = 2
  variants = {
      "dense": ["gin/models/t5_tiny.gin"],
      "sparse": ["gin/models/switch_tiny.gin", "NUM_EXPERTS=4"],
  }
  common = [
      "gin/tasks/docs_corpus_bytes.gin", "gin/runs/pretrain.gin", "gin/layouts/single.gin",
      "SwitchConfig.vocab_size=384", "SwitchConfig.d_model=16", "SwitchConfig.d_ff=24", "SwitchConfig.init_scale=1.0",
      "SwitchConfig.num_encoder_layers=1", "SwitchConfig.num_decoder_layers=1", "SwitchConfig.encoder_sparse_step=1",
      "SwitchConfig.decoder_sparse_step=1", "TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 9}", "BATCH_SIZE=8",
      "TRAIN_STEPS=6", "LOG_PERIOD=2", "EVAL_PERIOD=2", "CHECKPOINT_PERIOD=4", "Run.eval_batches=2",
  ]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compare.gin").write_text(COMPARISON)
    return tmp_path


@pytest.fixture
def compare(folder, call):
    """A function that runs the comparison; returns as `call` does."""
    return functools.partial(call, "compare --gin_file=compare.gin")


def losses(folder, variant, seed=0):
    """Returns the logged steps of a run without their times."""
    lines = (folder / "out" / variant / f"seed_{seed}" / "metrics.jsonl").read_text().splitlines()
    lines = [{name: value for name, value in json.loads(line).items() if "second" not in name and "input_wait" not in
              name and "utilization" not in name} for line in lines]
    return [line for line in lines if len(line) > 1]


@pytest.mark.slow
def test_variants_train_in_turns_on_the_same_batches_and_any_command_works_on_their_runs(folder, compare, call):
    found, err = compare("--json")
    assert [variant["name"] for variant in found["variants"]] == ["dense", "sparse"]
    assert found["baseline"] == "dense" and found["variants"][1]["num_experts"] == 4
    assert found == json.loads((folder / "out" / "comparison.json").read_text()) | {"exit_status": 0}
    assert found["variants"][1]["seeds"][0]["curves"]["steps"] == [2, 4, 6]
    # In turns, in an order that rotates.
    assert _logged(err) == ["dense", "sparse", "sparse", "dense", "dense", "sparse"]
    assert len((folder / "out" / "batches_0.jsonl").read_text().splitlines()) == 6
    for name in ("comparison.png", "comparison.html", "dense/seed_0/operative_config.gin"):
        assert (folder / "out" / name).is_file()
    # Once more: nothing is left to train.
    out, err = compare()
    assert "Seed 0: all variants are trained." in err and not _logged(err)
    assert "sparse" in out and "Report: out/comparison.html" in out
    # By itself, for longer than it was trained in company.
    run = folder / "out" / "sparse" / "seed_0"
    assert "Going on from step 6" in call(f"train --gin_file={run}/operative_config.gin --gin.TRAIN_STEPS=8")[1]
    # Finished runs, wherever they are from.
    again, _ = call("compare --runs out/dense/seed_0 out/sparse/seed_0 --output=again --json")
    assert any(remark.startswith("TRAIN_STEPS is 6 in dense and 8 in sparse") for remark in again["not_equal"])
    assert again["target_loss"] == found["target_loss"] and (folder / "again" / "comparison.html").is_file()
    call("compare --runs out --output=whole")


def _logged(err):
    """The variants of the lines that a comparison logs."""
    return [line.partition(":")[0] for line in err.splitlines() if "s/step  MFU" in line]


@pytest.mark.slow
def test_a_teacher_is_trained_first_and_its_students_learn_from_it(folder, compare, call):
    """Also when the comparison was stopped between both, and the numbers are those of `train` by itself."""
    last = '"NUM_EXPERTS=4"],\n'
    text = COMPARISON.replace(last, last + """
      "student": ["gin/models/t5_tiny.gin", "gin/runs/distill.gin", "TEACHER='{sparse}'",
                  "INITIAL_CHECKPOINT=%TEACHER"],
""").replace("  turn = 2", """  turn = 2
  trained_first = ["sparse"]
  may_differ = ["objective", "INITIAL_CHECKPOINT", "Run.initial_variables"]""")
    (folder / "compare.gin").write_text(text)
    result, err = compare("--json")
    logged = _logged(err)
    assert logged[:3] == ["sparse"] * 3 and sorted(logged[3:]) == ["dense"] * 3 + ["student"] * 3
    found = {variant["name"]: variant for variant in result["variants"]}
    assert found["student"]["distilled"]["teacher"] == "sparse" and found["dense"]["distilled"] is None
    assert len((folder / "out" / "batches_0.jsonl").read_text().splitlines()) == 6
    _, err = compare()
    assert "Seed 0: sparse is trained." in err and not _logged(err)
    again, _ = call("compare --runs out --output=again --json")
    (student,) = (variant for variant in again["variants"] if variant["name"] == "student")
    assert student["distilled"] == found["student"]["distilled"]


@pytest.mark.exhaustive
def test_variants_learn_the_same_on_pjrt(folder, compare):
    for backend in ("auto", "pjrt"):
        compare(f"--gin.Layout.backend='{backend}'", "--gin.TRAIN_STEPS=2")
        (folder / "out").rename(folder / backend)
    for variant in ("dense", "sparse"):
        runs = [folder / backend / variant / "seed_0" for backend in ("auto", "pjrt")]
        assert "Layout.backend = 'pjrt'" in (runs[1] / "operative_config.gin").read_text()
        found = [{name: value for line in (run / "metrics.jsonl").read_text().splitlines()
                  for name, value in json.loads(line).items() if name.endswith("loss")} for run in runs]
        assert len(found[0]) > 1 and found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("words, message", {
    "--gin.Comparison.turn=0": "Comparison.turn must be an integer of at least 1, not 0.",
    "--gin.Comparison.trun=1": "Comparison doesn't have a parameter named 'trun'. Did you mean 'turn'?",
    "--gin.SEED=3": "each run gets its own SEED",
    "--gin.SEEDS=(1,1)": "Comparison.seeds must be a list of different integers",
    "--gin.SwitchConfig.d_modle=8": "SwitchConfig doesn't have a parameter named 'd_modle'",
    "--gin.NO_SUCH=8": "dense: No gin file defines NO_SUCH.",
    "--gin.NUM_EXPERTS=-1": "dense: num_experts must be an integer of at least 0, not -1.",
    "--gin.Comparison.variants={'a':['gin/models/t5_tiny.gin'],'b':['gin/models/t5_tiny.gin','SwitchConfig.d_ff=48']} "
    "--gin.SwitchConfig.d_kv=8": "'b' does",
    "--gin.Comparison.variants={'a':['gin/models/t5_tiny.gin']}": "at least two variants",
    "--gin_file=gin/models/t5_tiny.gin": "These gin files bind SwitchConfig.vocab_size",
    "--output=x": "--output goes with --runs", "--runs a b": "leave out --gin_file",
    "--gin.MIXTURE_OR_TASK_NAME='no_such'": "dense: No task or mixture",
    # Only the whole run shows this:
    "--gin.Comparison.variants={'a':['gin/models/t5_tiny.gin'],'b':['gin/models/t5_tiny.gin','BATCH_SIZE=16']}":
        "BATCH_SIZE is 8 in 'a' and 16 in 'b'",
    "--gin.BEST_METRIC='eval/x/loss' --gin.PATIENCE=2": "leave PATIENCE at 0",
    "--gin.EVAL_PERIOD=0": "set EVAL_PERIOD above 0"}.items())
def test_mistakes_are_one_sentence_and_write_nothing(folder, refused, monkeypatch, words, message):
    # Reading data takes a second for each variant; tests/data/examples_test.py is about it.
    monkeypatch.setattr("switch_tf.data.check_examples", lambda description: None)
    assert message in refused(f"compare --gin_file=compare.gin {words}")


@pytest.mark.slow
def test_a_batch_that_changed_stops_all_and_keeps_what_was_learnt(folder, compare):
    compare("--gin.TRAIN_STEPS=4")
    batches = folder / "out" / "batches_0.jsonl"
    lines = [json.loads(line) for line in batches.read_text().splitlines()]
    batches.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "step": 4}]))
    assert "compare: dense: The batch after step 4 of 'dense' is not the one that" in compare(
        "--gin.TRAIN_STEPS=6", status=2)[1]
    assert losses(folder, "sparse")[-1]["step"] == 4


@pytest.mark.slow
def test_killed_and_interrupted_comparisons_go_on_with_the_same_curves(folder):
    """In processes of their own: SIGKILL in the middle of a turn, then SIGINT long before the end, then to the end."""
    command = [sys.executable, "-m", "switch_tf.cli", "compare", "--gin_file=compare.gin", "--gin.SEEDS=(3,)",
               "--gin.TRAIN_STEPS=24", "--gin.EVAL_PERIOD=8"]
    straight = subprocess.run([*command, "--gin.MODEL_DIR='straight'"], capture_output=True, text=True)
    assert straight.returncode == 0, straight.stderr
    for number, line in ((signal.SIGKILL, "dense: step 6/24"), (signal.SIGINT, "sparse: step 10/24")):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for told in process.stderr:
            if told.startswith(line):
                break
        time.sleep(0.05)
        process.send_signal(number)
        process.communicate()
        assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    curves, wanted = ([{**seed["curves"], "seconds": None, "tokens": None} for variant in found["variants"]
                       for seed in variant["seeds"]] for found in (
                           json.loads((folder / name / "comparison.json").read_text()) for name in ("out", "straight")))
    assert curves == wanted
    assert all(losses(folder, variant, 3)[-1]["step"] == 24 for variant in ("dense", "sparse"))
