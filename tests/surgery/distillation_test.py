"""Distillation: the formula and its gradients, the teacher, and whole runs."""

import dataclasses
import json
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.cli import main
from switch_tf.configs.run import StepSettings
from switch_tf.conversion import own
from switch_tf.decoding import log_likelihoods
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.surgery.distillation import Distillation
from switch_tf.training import train_step, verification
from tests.conversion.shared import built, refusal


def _restored(objective):
    objective.build(Partitioner())
    objective.restore()
    return objective


def _made(config):
    keras.utils.set_random_seed(1)
    return built(config)


def _gradients(model, batch, objective, num_microbatches=1):
    settings = StepSettings(z_loss_weight=0.0, num_microbatches=num_microbatches)
    compute = tf.function(lambda: train_step.compute_gradients(model, batch, 3, 0, settings, objective=objective),
                          autograph=False)
    gradients, measured = compute()
    return [gradient.numpy() for gradient in gradients], keras.tree.map_structure(np.float64, measured)


def test_the_loss_and_its_gradients_are_those_of_the_mixture_of_the_paper(teacher, student_config, batch):
    """The expected numbers come from the logits of both models, by the formula; the batch is cut in two."""
    config = dataclasses.replace(student_config, dropout_rate=0.0)
    model = _made(config)
    gradients, measured = _gradients(model, batch, _restored(Distillation(
        str(teacher), soft_weight=0.3, temperature=2.0)), num_microbatches=2)

    read = own.from_switch_tf(teacher)
    probs = tf.nn.softmax(_without_drops(read).forward(batch)[0] / 2)
    targets = tf.one_hot(batch["decoder_target_tokens"], config.vocab_size)
    weights = tf.cast(batch["decoder_loss_weights"], "float32")
    num_targets = tf.reduce_sum(weights)
    with tf.GradientTape() as tape:
        logits = model.forward(batch)[0]
        hard = tf.nn.softmax_cross_entropy_with_logits(targets, logits)
        soft = 4 * tf.nn.softmax_cross_entropy_with_logits(probs, logits / 2)
        loss = tf.reduce_sum((0.7 * hard + 0.3 * soft) * weights) / num_targets
    expected = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    for mine, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(mine, tf.convert_to_tensor(theirs), rtol=1e-4, atol=1e-6)
    terms = measured.batch.loss_terms
    for mine, theirs in ((measured.loss, loss), (terms["distillation"], tf.reduce_sum(soft * weights) / num_targets), (
            terms["teacher_cross_entropy"], -tf.reduce_sum(log_likelihoods(read, batch)) / num_targets)):
        assert float(mine.value) == pytest.approx(float(theirs), rel=1e-5)


def _without_drops(model):
    """Returns the model with so much capacity in every expert that no token is dropped, whatever is asked for."""
    whole = built(dataclasses.replace(model.config, eval_capacity_factor=float(model.config.num_experts)))
    whole.set_weights(model.get_weights())
    return whole


@pytest.mark.slow
def test_without_soft_targets_the_step_is_that_of_an_ordinary_run_with_its_dropout(teacher, student_config, batch):
    model = _made(student_config)
    distilled, plain = (_gradients(model, batch, objective)[0] for objective in (
        _restored(Distillation(str(teacher), soft_weight=0.0)), None))
    for mine, theirs in zip(distilled, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_capacity_factor_of_the_teacher_drops_tokens(teacher, student_config, batch):
    """With next to no slots the sparse layers do nothing, so the teacher predicts something else."""
    logits, stats = _made(student_config).forward(batch)
    values = [float(_restored(Distillation(str(teacher), teacher_capacity_factor=factor)).measure(
        student_config, batch, logits, stats, StepSettings()).loss_terms["teacher_cross_entropy"].value)
        for factor in (None, 0.01, 100.0)]
    assert values[0] == pytest.approx(values[2], rel=1e-5)
    assert abs(values[1] - values[0]) > 1e-3


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"vocab_size": 512}, "vocab_size, 512, or its vocabulary, and .* has 384 rows and no vocabulary to compare"),
    ({"num_decoder_layers": 0}, "the student is an encoder alone"),
])
def test_models_that_predict_other_targets_are_refused(teacher, student_config, changes, sentence):
    assert re.search(sentence, refusal(Distillation(str(teacher)).check, dataclasses.replace(
        student_config, **changes), {"vocabulary": ["a"]}))


@pytest.mark.parametrize(("arguments", "sentence"), [
    ({"soft_weight": 1.5}, "SOFT_WEIGHT must be a number in [0, 1], not 1.5"),
    ({"temperature": 0}, "TEMPERATURE must be a number above 0"),
    ({"teacher_capacity_factor": -1.0}, "capacity_factor must be a number above 0")])
def test_wrong_arguments_and_teachers_are_refused(arguments, sentence, tmp_path, student_config):
    assert sentence in refusal(Distillation, "teacher", **arguments)
    message = refusal(Distillation(str(tmp_path)).check, student_config, {"vocabulary": []})
    assert message.startswith("TEACHER must be a folder: ") and (
        " a run folder with checkpoints, or one checkpoint;" in message)


SMALL = ("SwitchConfig.d_model=16", "SwitchConfig.d_ff=24", "SwitchConfig.num_encoder_layers=2",
         "SwitchConfig.num_decoder_layers=1", "SwitchConfig.vocab_size=384", "BATCH_SIZE=8", "EVAL_PERIOD=2")


@pytest.mark.slow
def test_a_stranger_distils_a_run_and_keeps_the_student_when_the_teacher_is_gone(train, tmp_path):
    assert train(*SMALL, "gin/models/switch_tiny.gin", "gin/runs/pretrain.gin", "MODEL_DIR='teacher'", "TRAIN_STEPS=2",
                 "SwitchConfig.decoder_sparse_step=1", "NUM_EXPERTS=4")[0] == 0
    student = (*SMALL, "gin/models/t5_tiny.gin", "gin/runs/distill.gin", "MODEL_DIR='student'")
    status, said = train(*student, "TRAIN_STEPS=2", "TEACHER='teacher'")
    assert status == 0
    assert "weights from teacher, step 2; the others are new: encoder/layers_1/mlp/wi" in said
    assert "encoder/layers_0" not in said.partition("the others are new")[2].partition(".\n")[0]
    lines = [json.loads(line) for line in (tmp_path / "student" / "metrics.jsonl").read_text().splitlines()]
    for line in (line for line in lines if "train/loss" in line):
        expected = 0.75 * line["train/cross_entropy"] + 0.25 * line["train/distillation"] + line["train/z_loss"]
        assert line["train/loss"] == pytest.approx(expected, rel=1e-4)
        assert line["train/teacher_cross_entropy"] != line["train/cross_entropy"]

    shutil.move(tmp_path / "teacher", tmp_path / "moved")
    assert main.main(["eval", "--run", "student", "--output", "scores"]) == 0
    status, said = train(*student, "TRAIN_STEPS=4", "TEACHER='teacher'")
    assert status == 2 and "TEACHER must be a folder: Hugging Face's, which holds config.json" in said
    status, said = train(*student, "TRAIN_STEPS=4", "TEACHER='moved'")
    assert status == 0 and "Going on from step 2" in said


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mesh", "backend"), [
    pytest.param("data", "data=2", "mirrored", marks=pytest.mark.exhaustive),  # predictions_test.py has it
    ("data_model", "data=2,model=2", "dtensor"),
    ("data_model", "data=2,model=2", "pjrt")])
def test_it_is_the_same_on_every_back_end(teacher, student_config, batch, make_partitioner, layout, mesh, backend):
    found = verification.compare(*(
        verification.Twin(lambda: SwitchTransformer(student_config, dtype="float64"), lambda: Adafactor(0.01),
                          partitioner, 3, StepSettings(),
                          lambda: Distillation(str(teacher), dtype="float64")).train([batch])
        for partitioner in (Partitioner(), make_partitioner(layout, mesh_shape=mesh, backend=backend))))
    assert found.is_equal
