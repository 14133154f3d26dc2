"""Runs that commands on trained runs can work on, and functions that run a command line."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from switch_tf import SwitchTransformer
from switch_tf.cli import main
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.experiment import Experiment

CONFIGURATION = """
include "gin/models/switch_tiny.gin"
include "gin/tasks/docs_corpus.gin"
include "gin/runs/pretrain.gin"
include "gin/layouts/single.gin"
MODEL_DIR = "run"
MESH_SHAPE = "data=1"
SwitchConfig.d_model = 16
SwitchConfig.d_ff = 24
SwitchConfig.num_encoder_layers = 1
SwitchConfig.num_decoder_layers = 1
TASK_FEATURE_LENGTHS = {"inputs": 24, "targets": 5}
"""


SPARSE = """
TASK_FEATURE_LENGTHS = {"inputs": 24, "targets": 6}
SwitchConfig.encoder_sparse_step = 1
BATCH_SIZE = 4
Run.eval_batches = 2
"""


LOADING = ("cache", "export", "infer", "serve", "vocabulary")  # these say first what they do


def caller(captured):
    def run(line, *words, status=0):
        words = [*line.split(), *words]
        assert main.main(words) == status
        out, err = captured.readouterr()
        return (json.loads(out.splitlines()[-1]) if out and "--json" in words else out), err

    return run


@pytest.fixture
def call(capsys):
    """A function that runs a command line; returns its output, of --json the object, and its error output."""
    return caller(capsys)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """A function that runs a command line in the folder of the test, which the command refuses and leaves as it was;
    returns its one sentence."""
    monkeypatch.chdir(tmp_path)

    def written():
        return {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")
                if "__pycache__" not in path.parts}

    def run(line, *words):
        command, *_ = words = [*line.split(), *words]
        before = written()
        assert main.main(words) == 2
        error = capsys.readouterr().err
        told = [line for line in error.splitlines() if line.startswith(f"switch-tf {command}: ")]
        assert len(told) == 1 and "Traceback" not in error, error
        assert command in LOADING or error == f"{told[0]}\n"
        assert written() == before
        return told[0]

    return run


@pytest.fixture
def process(tmp_path):
    """A function that runs a command line in a process of its own; returns the object of --json and its error output.
    """

    def run(line, *words, status=0, **environ):
        done = subprocess.run([sys.executable, "-m", "switch_tf.cli", *line.split(), *words], cwd=tmp_path,
                              capture_output=True, text=True, env=os.environ | environ)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        return done.stdout and json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A run folder with a checkpoint of a model that was not trained."""
    return _write_run(tmp_path_factory.mktemp("run"), CONFIGURATION)


@pytest.fixture(scope="session")
def sparse_run(tmp_path_factory):
    """A run folder with two checkpoints of a model with eight experts in its encoder, which say so."""
    return _write_run(tmp_path_factory.mktemp("sparse"), CONFIGURATION + SPARSE, steps=(6, 7), has_record=True)


def _write_run(folder, configuration, steps=(7,), has_record=False):
    import tensorflow as tf

    from switch_tf import data
    from switch_tf.checkpoints import continuation, tensors
    from switch_tf.checkpoints.checkpointer import Checkpointer

    (folder / "operative_config.gin").write_text(configuration)
    model = SwitchTransformer(gin_syntax.read([str(folder / "operative_config.gin")]).part(parts.CONFIG).make())
    model.build()
    batches = data.Batches({None: iter(tf.data.Dataset.range(9))}, batch_size=1)
    checkpointer = Checkpointer(folder / "checkpoints", tensors.state_variables(model), batches, keep=2,
                                configuration=continuation.record_of(model.config) if has_record else None)
    for step in steps:
        checkpointer.save(step, {})
        checkpointer.wait()
    return folder


@pytest.fixture(scope="session")
def kept_run(run_folder, tmp_path_factory):
    """A copy of it that keeps itself as data, as `train` leaves one."""
    from switch_tf.training import trainer

    folder = shutil.copytree(run_folder, tmp_path_factory.mktemp("kept") / "run")
    described = Experiment.from_run(folder)
    model, run = SwitchTransformer(described.config), described.run
    trainer.keep_config(folder, model, run, "auto", print)
    return folder
