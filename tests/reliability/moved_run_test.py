"""A run is moved, and used or trained further from there, in processes of their own, as a user types it."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from switch_tf.checkpoints import folders
from switch_tf.cli import main
from switch_tf.storage import places

SAVED, STEPS = 2, 6
SMALL_RUN = [
    "--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus.gin", "--gin_file=gin/runs/pretrain.gin",
    "--gin.SwitchConfig.d_model=32", "--gin.SwitchConfig.d_ff=64", "--gin.SwitchConfig.num_encoder_layers=1",
    "--gin.SwitchConfig.num_decoder_layers=1", "--gin.SwitchConfig.encoder_sparse_step=1",
    "--gin.SwitchConfig.vocab_size=4096", "--gin.SwitchConfig.num_experts=4", "--gin.DROPOUT_RATE=0.1",
    "--gin.RsqrtDecay.warmup_steps=100", "--gin.BATCH_SIZE=8", "--gin.CACHE_PARTS=4", "--gin.LOG_PERIOD=1",
    "--gin.EVAL_PERIOD=0", f"--gin.CHECKPOINT_PERIOD={SAVED}", "--gin.Run.keep_checkpoints=20"]
PIECES = "--gin_file=gin/layouts/fully_sharded.gin"
FOUR_DEVICES = [PIECES, "--gin.MESH_SHAPE='data=4'", "--devices=4"]
TWO_BY_TWO = ["--gin_file=gin/layouts/expert_model.gin", "--gin.MESH_SHAPE='data=2,model=2'", "--devices=4"]
ONE_DEVICE = ["--gin_file=gin/layouts/single.gin"]
TWO_PROCESSES = [PIECES, "--gin.MESH_SHAPE='data=2'", "--devices=2", "--processes=2", "--backend=pjrt"]
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


@pytest.fixture(scope="module", params=["dtensor", pytest.param("pjrt", marks=pytest.mark.exhaustive)])
def unmoved(request, tmp_path_factory):
    """The folder of a run of STEPS steps on four devices."""
    folder = tmp_path_factory.mktemp("unmoved")
    _go_on(folder, folder / "run", STEPS, *FOUR_DEVICES, f"--backend={request.param}")
    return folder / "run"


@pytest.fixture(params=[pytest.param("disk", marks=pytest.mark.exhaustive), "bucket"])
def moved(request, unmoved, tmp_path):
    """A copy of the run as it was when it saved its first checkpoint, on the disk or in the bucket."""
    copy = tmp_path / "copy"
    later = [path.name for path in folders.newest_first(unmoved / "checkpoints")][:-1]
    shutil.copytree(unmoved, copy, ignore=shutil.ignore_patterns(*later))
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= SAVED))
    if request.param == "disk":
        return copy
    target = places.at(request.getfixturevalue("bucket").new_folder()) / "run"
    places.upload(copy, target)
    shutil.rmtree(copy)
    return target


def _go_on(folder, run, steps, *layout):
    return _command(folder, "train", *SMALL_RUN, f"--gin.MODEL_DIR='{run}'", f"--gin.TRAIN_STEPS={steps}", *layout)


def _losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def _assert_same_losses(run, unmoved, steps=STEPS):
    """Sums over other devices are taken in another order, so the last digits of float32 differ."""
    expected = {step: loss for step, loss in _losses(unmoved).items() if step <= steps}
    assert list(expected) == list(range(1, steps + 1)) and _losses(run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TWO_BY_TWO, ONE_DEVICE], ids=["two_by_two", "one"])
def test_a_run_on_four_devices_goes_on_with_other_ones_where_it_was_copied(layout, moved, unmoved, tmp_path):
    assert f"Going on from step {SAVED} " in _go_on(tmp_path, moved, STEPS, *layout).stderr
    _assert_same_losses(moved, unmoved)


@pytest.mark.slow
def test_a_copied_run_goes_on_in_two_processes_and_then_in_one(moved, unmoved, tmp_path, capsys):
    """Each of the two writes its own pieces, in a bucket too, and the one joins them."""
    done = _go_on(tmp_path, moved, SAVED + 2, *TWO_PROCESSES)
    assert f"Going on from step {SAVED} " in done.stderr
    _assert_same_losses(moved, unmoved, SAVED + 2)
    description = folders.describe(folders.path_of(moved / "checkpoints", SAVED + 2))
    assert {"state.index", "state.data-00000-of-00002", "state.data-00001-of-00002"} <= description["files"].keys()
    assert description["layout"]["processes"] == 2
    assert main.main(["inspect", str(moved), "--verify"]) == 0
    assert capsys.readouterr().out.count("is whole") == 2
    assert f"Going on from step {SAVED + 2} " in _go_on(tmp_path, moved, STEPS, *ONE_DEVICE).stderr
    _assert_same_losses(moved, unmoved)
