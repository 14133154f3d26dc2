"""`--backend` of the commands that run a layout: a binding of `Layout.backend`, and the last one."""

import functools
import json
import subprocess
import sys
import types

import pytest

from switch_tf import experiments
from switch_tf.cli import answering, main, options
from switch_tf.hardware import host
from switch_tf.installation import quiet
from switch_tf.partitioning.layout import BACKENDS, Layout
from switch_tf.training import processes

TINY = ["--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/docs_corpus_bytes.gin",
        "--gin_file=gin/runs/pretrain.gin"]
SMALL = ["--gin.SwitchConfig.num_encoder_layers=1", "--gin.SwitchConfig.num_decoder_layers=1",
         "--gin.SwitchConfig.encoder_sparse_step=1", "--gin.SwitchConfig.decoder_sparse_step=0",
         "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}", "--gin.BATCH_SIZE=8"]
COMMANDS = ("train", "eval", "verify-layout")


def _layout(*words):
    arguments = main._parse(["train", *TINY, "--gin.MODEL_DIR='run'", *words])
    return options.look(arguments).layout


def test_it_counts_more_than_files_and_bindings(tmp_path):
    (tmp_path / "mine.gin").write_text("from __gin__ import dynamic_registration\n"
                                       "from switch_tf.partitioning import layout\nlayout.Layout.backend = 'dtensor'\n")
    words = [f"--gin_file={tmp_path}/mine.gin"]
    assert _layout().backend == "auto"
    assert _layout(*words).backend == "dtensor"
    assert _layout("--backend=pjrt", *words, "--gin.Layout.backend='mirrored'").backend == "pjrt"


@pytest.fixture(scope="module")
def configuration_of():
    """A function from a back end to the configuration that a run of it records."""

    @functools.cache
    def record(backend):
        words = ["train", *TINY, "--gin.MODEL_DIR='run'", "--backend", backend]
        described = experiments.place_here(options.look(main._parse(words)))
        return experiments.make_trainer(described, words)[1]

    return record


def test_the_configuration_of_a_run_records_it(configuration_of):
    configuration = configuration_of("pjrt")
    assert "Layout.backend = 'pjrt'" in configuration
    assert "--backend pjrt" in configuration.splitlines()[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_one_is_refused_before_tensorflow_is_imported(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "run" / "operative_config.gin").write_text(
        "".join(f"include '{word.partition('=')[2]}'\n" for word in TINY) + "MODEL_DIR = 'run'\n")
    files = [f"--run={tmp_path / 'run'}"] if command == "eval" else [*TINY, f"--gin.MODEL_DIR='{tmp_path / 'run'}'"]
    monkeypatch.setattr(quiet, "import_tensorflow", lambda *arguments: pytest.fail("TensorFlow is imported"))
    assert main.main([command, *files, "--backend=pjtr"]) == 2
    assert capsys.readouterr().err == (
        f"switch-tf {command}: backend must be one of {', '.join(map(repr, BACKENDS))}, not 'pjtr'. "
        "Did you mean 'pjrt'?\n")


@pytest.mark.parametrize("words, has_tpu, backend, expected", [
    ([], True, "pjrt", "layout"), ([], True, "auto", "one device"), ([], False, "pjrt", "one device"),
    (["--backend=auto"], True, "pjrt", "one device"), (["--backend=pjrt"], False, "auto", "layout")])
def test_texts_are_answered_by_pjrt_if_asked_to_or_where_a_run_of_pjrt_has_a_tpu(
        words, has_tpu, backend, expected, configuration_of, tmp_path, monkeypatch):
    (tmp_path / "operative_config.gin").write_text(configuration_of(backend))
    loaded = []
    described = types.SimpleNamespace(layout=Layout(), config=types.SimpleNamespace(axis_sizes={}))
    monkeypatch.setattr(options, "load_run", lambda arguments, *others, on_one_device=False: loaded.append(
        ("one device" if on_one_device else "layout", arguments.gin_bindings)) or described)
    monkeypatch.setattr(host, "has_tpu", lambda: has_tpu)
    arguments = main._parse(["infer", f"--run={tmp_path}", "--input=-", *words])
    answering._load_to_answer(arguments, tmp_path)
    assert loaded == [(expected, ["Layout.backend='pjrt'"] if words == ["--backend=pjrt"] else [])]


def test_texts_are_answered_in_one_process(tmp_path, monkeypatch):
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(workers))
    arguments = main._parse(["serve", f"--run={tmp_path}", "--backend=pjrt"])
    with pytest.raises(ValueError, match="`switch-tf serve` answers in one process, and TF_CONFIG .* names 2; unset"):
        answering._load_to_answer(arguments, tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_lists_all_of_them(command, capsys):
    with pytest.raises(SystemExit):
        main.main([command, "--help"])
    assert ", ".join(BACKENDS) in " ".join(capsys.readouterr().out.split())


def test_it_is_passed_on_to_several_processes(monkeypatch):
    started = []
    monkeypatch.setattr(processes, "run", lambda words, *counts: started.append(words) or 0)
    words = ["train", *TINY, "--gin.MODEL_DIR='run'", "--backend=pjrt", "--processes=2"]
    assert main.main(words) == 0
    assert started == [words]
    assert main._parse([*started[0], "--processes=1"]).gin_bindings[-1] == "Layout.backend='pjrt'"


@pytest.mark.slow
def test_a_run_moves_between_back_ends_and_eval_takes_its_own(tmp_path):
    def call(command, *words):
        done = subprocess.run([sys.executable, "-m", "switch_tf.cli", command, *words, "--json"], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def losses(name, *moves):
        for step, move in enumerate(moves, 1):
            call("train", *TINY, *SMALL, f"--gin.MODEL_DIR='{name}'", f"--gin.TRAIN_STEPS={step * 6 // len(moves)}",
                 "--gin.LOG_PERIOD=1", "--gin.EVAL_PERIOD=0", *move)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}

    sharded = ["--gin_file=gin/layouts/fully_sharded.gin", "--devices=2"]
    stayed = losses("stayed", [])
    moved = losses("moved", [], ["--backend=pjrt", *sharded], ["--backend=pjrt"])
    assert list(moved) == [1, 2, 3, 4, 5, 6]
    assert moved == pytest.approx(stayed, rel=1e-5)
    assert "Layout.backend = 'pjrt'" in (tmp_path / "moved" / "operative_config.gin").read_text()
    (own,), (other,) = (call("eval", "--run=moved", "--examples=16", *words)["results"][0]["tasks"].values()
                        for words in ([], ["--backend=auto"]))
    assert own == pytest.approx(other, rel=1e-5)
    assert call("export", "--run=moved", "--output=saved")["step"] == 6


def test_a_damaged_configuration_does_not_choose_a_back_end(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    (tmp_path / "operative_config.gin").write_text("Layout.backend = 'pjrt'\n")
    arguments = main._parse(["infer", f"--run={tmp_path}", "--input=-"])
    assert answering._is_for_pjrt(arguments, tmp_path)
    (tmp_path / "operative_config.gin").write_text("Layout.backend = 'pjrt\n")
    assert not answering._is_for_pjrt(arguments, tmp_path)
