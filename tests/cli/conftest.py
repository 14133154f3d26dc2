"""A run that commands on trained runs can work on."""

import shutil

import pytest

from switch_tf import SwitchTransformer
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


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder with a checkpoint of a model that was not trained."""
    return _write_run(tmp_path_factory.mktemp("run"), CONFIGURATION)


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def kept_run(run_folder, tmp_path_factory):
    """A copy of it that keeps itself as data, as `train` leaves one."""
    from switch_tf.training import trainer

    folder = shutil.copytree(run_folder, tmp_path_factory.mktemp("kept") / "run")
    described = Experiment.from_run(folder)
    model, run = SwitchTransformer(described.config), described.run
    trainer.keep_config(folder, model, run, "auto", print)
    return folder


