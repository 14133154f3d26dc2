"""An objective from outside of the package, distillation in thirty lines, trains a run by a line of gin."""

import importlib
import json
import sys

import keras
import pytest

from switch_tf import SwitchTransformer
from switch_tf.aot.lower import lower_step
from switch_tf.cli import main
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.layout import Layout
from switch_tf.reporting import report

MODULE = '''
import tensorflow as tf

from switch_tf.metrics import Mean
from switch_tf.evaluation.objectives import Objective, target_features


class Distillation(Objective):
    """A quarter of the loss is the cross-entropy to the probabilities of a teacher."""

    coefficients = {"cross_entropy": 0.75, "distillation": 0.25}

    def __init__(self, teacher):
        self.teacher = teacher

    def build(self, partitioner):
        partitioner.build(self.teacher)

    def restore(self):
        for variable in self.teacher.variables:
            variable.assign(0.5 * variable)

    @property
    def variables(self):
        return self.teacher.variables

    def measure(self, config, features, logits, router_stats, settings):
        measured = super().measure(config, features, logits, router_stats, settings)
        probs = tf.stop_gradient(tf.nn.softmax(self.teacher.forward(features, training=False)[0]))
        weights = tf.cast(features[target_features(config)[1]], logits.dtype)
        losses = tf.nn.softmax_cross_entropy_with_logits(probs, logits) * weights
        term = Mean(tf.reduce_sum(losses), tf.reduce_sum(weights))
        return measured._replace(loss_terms={**measured.loss_terms, "distillation": term})
'''
GIN = '''
from __gin__ import dynamic_registration
import toy_distillation
from switch_tf.training import trainer

trainer.Trainer.objective = @toy_distillation.Distillation()
toy_distillation.Distillation.teacher = %MODEL
MIXTURE_OR_TASK_NAME = "sentences"
TASK_FEATURE_LENGTHS = {"inputs": 32, "targets": 16}
'''
SMALL = ("SwitchConfig.d_model=16", "SwitchConfig.d_ff=24", "SwitchConfig.num_encoder_layers=1",
         "SwitchConfig.num_decoder_layers=1", "SwitchConfig.encoder_sparse_step=1", "BATCH_SIZE=8", "TRAIN_STEPS=2",
         "LOG_PERIOD=1", "EVAL_PERIOD=2", "Run.eval_batches=1", "MODEL_DIR='run'")


@pytest.fixture
def toy_distillation(tmp_path, monkeypatch):
    (tmp_path / "toy_distillation.py").write_text(MODULE)
    (tmp_path / "toy.gin").write_text(GIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("toy_distillation")
    sys.modules.pop("toy_distillation")


@pytest.mark.slow
def test_a_run_distils_by_one_file_and_one_line_of_gin(toy_distillation, sentences_task, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write", lambda folder: None)
    files = ("gin/models/switch_tiny.gin", "gin/runs/pretrain.gin", "toy.gin")
    words = ["train", "--json", *(f"--gin_file={file}" for file in files), *(f"--gin.{binding}" for binding in SMALL)]
    assert main.main(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in logged] == [1, 2]
    for line in logged:
        expected = (0.75 * line["train/cross_entropy"] + 0.25 * line["train/distillation"] + line["train/z_loss"]
                    + 0.01 * line["train/load_balancing_loss"] + 0.001 * line["train/router_z_loss"])
        assert line["train/loss"] == pytest.approx(expected, rel=1e-4)
    evaluated = [line for line in lines if "eval/sentences/loss" in line]
    assert [line["step"] for line in evaluated] == [0, 2]
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step_00000002" / "checkpoint.json").read_text())
    assert saved["configuration"]["objective"] == "Distillation"
    assert not any("switch_transformer_1" in path for path in saved["variables"])


@pytest.mark.slow  # tests/surgery verifies the package's own on several back ends
def test_its_further_model_is_an_argument_of_the_lowered_step_and_is_not_updated(toy_distillation, shallow_config):
    teacher = SwitchTransformer(shallow_config, name="teacher")
    lowered = lower_step(SwitchTransformer(shallow_config), Adafactor(0.01), Layout(), 8, {"inputs": 12, "targets": 6},
                         StepSettings(), objective=toy_distillation.Distillation(teacher))
    assert sum(argument.name.startswith("teacher/") for argument in lowered.arguments) > 5
    state = lowered.arguments[-len(lowered.program.captured):]
    assert not any(state[index].name.startswith("teacher/") for index in lowered.program.updated)
    keras.backend.clear_session()
