"""Distillation: the formula and its gradients, the teacher, and whole runs."""

import dataclasses
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, metrics
from switch_tf.cli import main
from switch_tf.configs.run import StepSettings
from switch_tf.conversion import own
from switch_tf.decoding import log_likelihoods
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.reporting import report
from switch_tf.surgery.distillation import Distillation
from switch_tf.training import train_step, verification

WITHOUT_ROUTERS = {"load_balancing_loss_weight": 0.0, "router_z_loss_weight": 0.0}


def _made(config, objective, dtype=None):
    keras.utils.set_random_seed(1)
    model = SwitchTransformer(config, dtype=dtype)
    model.build()
    if objective is not None:
        objective.build(Partitioner())
        objective.restore()
    return model


def _gradients(model, batch, objective, num_microbatches=1):
    settings = StepSettings(z_loss_weight=0.0, num_microbatches=num_microbatches)
    compute = tf.function(lambda: train_step.compute_gradients(model, batch, 3, 0, settings, objective=objective),
                          autograph=False)
    gradients, measured = compute()
    return [gradient.numpy() for gradient in gradients], metrics.to_host(measured)


def _softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_the_loss_is_the_mixture_of_the_paper(teacher, student_config, batch):
    """The expected numbers come from the logits of both models, by the formula in NumPy; the batch is cut in two."""
    objective = Distillation(str(teacher), soft_weight=0.3, temperature=2.0)
    model = _made(dataclasses.replace(student_config, dropout_rate=0.0), objective)
    _, measured = _gradients(model, batch, objective, num_microbatches=2)

    read = own.from_switch_tf(teacher)
    sparse = _without_drops(read)
    student_logits = model.forward(batch)[0].numpy().astype("float64")
    teacher_logits = sparse.forward(batch)[0].numpy().astype("float64")
    targets, weights = batch["decoder_target_tokens"].numpy(), batch["decoder_loss_weights"].numpy()
    hard = -np.log(np.take_along_axis(_softmax(student_logits), targets[..., None], -1)[..., 0])
    soft = -4 * np.sum(_softmax(teacher_logits / 2) * np.log(_softmax(student_logits / 2)), axis=-1)
    expected = np.sum((0.7 * hard + 0.3 * soft) * weights) / weights.sum()
    assert float(measured.loss.value) == pytest.approx(expected, rel=1e-5)
    terms = measured.batch.loss_terms
    assert float(terms["distillation"].value) == pytest.approx(np.sum(soft * weights) / weights.sum(), rel=1e-5)
    likelihoods = log_likelihoods(read, batch).numpy()
    assert float(terms["teacher_cross_entropy"].value) == pytest.approx(-likelihoods.sum() / weights.sum(), rel=1e-5)


def _without_drops(model):
    """Returns the model with so much capacity in every expert that no token is dropped, whatever is asked for."""
    config = dataclasses.replace(model.config, eval_capacity_factor=float(model.config.num_experts))
    whole = SwitchTransformer(config)
    whole.build()
    for variable, value in zip(whole.variables, model.variables, strict=True):
        variable.assign(value)
    return whole


def test_gradients_are_those_of_the_formula_and_the_teacher_has_none(teacher, student_config, batch):
    config = dataclasses.replace(student_config, dropout_rate=0.0)
    objective = Distillation(str(teacher), soft_weight=0.3, temperature=2.0)
    model = _made(config, objective)
    gradients, _ = _gradients(model, batch, objective)
    sparse = _without_drops(own.from_switch_tf(teacher))
    probs = tf.nn.softmax(sparse.forward(batch)[0] / 2)
    targets = tf.one_hot(batch["decoder_target_tokens"], config.vocab_size)
    weights = tf.cast(batch["decoder_loss_weights"], "float32")
    with tf.GradientTape() as tape:
        logits = model.forward(batch)[0]
        losses = (0.7 * tf.nn.softmax_cross_entropy_with_logits(targets, logits)
                  + 0.3 * 4 * tf.nn.softmax_cross_entropy_with_logits(probs, logits / 2))
        loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
    expected = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    assert len(gradients) == len(model.trainable_variables)
    for mine, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(mine, tf.convert_to_tensor(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_without_soft_targets_the_step_is_that_of_an_ordinary_run_with_its_dropout(teacher, student_config, batch):
    objective = Distillation(str(teacher), soft_weight=0.0)
    model = _made(student_config, objective)
    distilled, _ = _gradients(model, batch, objective)
    plain, _ = _gradients(model, batch, None)
    for mine, theirs in zip(distilled, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_capacity_factor_of_the_teacher_drops_tokens(teacher, student_config, batch):
    """With next to no slots the sparse layers do nothing, so the teacher predicts something else."""
    values = []
    logits, stats = _made(student_config, None).forward(batch)
    for factor in (None, 0.01, 100.0):
        objective = Distillation(str(teacher), teacher_capacity_factor=factor)
        objective.build(Partitioner())
        objective.restore()
        measured = objective.measure(student_config, batch, logits, stats, StepSettings())
        values.append(float(measured.loss_terms["teacher_cross_entropy"].value))
    assert values[0] == pytest.approx(values[2], rel=1e-5)
    assert abs(values[1] - values[0]) > 1e-3


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"vocab_size": 512}, "vocab_size, 512, or its vocabulary, and .* has 384 rows and no vocabulary to compare"),
    ({"num_decoder_layers": 0}, "the student is an encoder alone"),
])
def test_models_that_predict_other_targets_are_refused(teacher, student_config, changes, sentence):
    config = dataclasses.replace(student_config, **changes)
    with pytest.raises(Refusal, match=sentence):
        Distillation(str(teacher)).check(config, {"vocabulary": ["a"]})


def test_wrong_arguments_and_teachers_are_refused(tmp_path, student_config):
    for arguments, sentence in [({"soft_weight": 1.5}, r"SOFT_WEIGHT must be a number in \[0, 1\], not 1.5"),
                                ({"temperature": 0}, "TEMPERATURE must be a number above 0"),
                                ({"teacher_capacity_factor": -1.0}, "capacity_factor must be a number above 0")]:
        with pytest.raises(Refusal, match=sentence):
            Distillation("teacher", **arguments)
    with pytest.raises(Refusal, match="TEACHER must be a folder: .* a run folder with checkpoints, or one checkpoint;"):
        Distillation(str(tmp_path)).check(student_config, {"vocabulary": []})


SMALL = ("SwitchConfig.d_model=16", "SwitchConfig.d_ff=24", "SwitchConfig.num_encoder_layers=2",
         "SwitchConfig.num_decoder_layers=1", "SwitchConfig.vocab_size=384", "BATCH_SIZE=8", "LOG_PERIOD=1",
         "EVAL_PERIOD=2", "CHECKPOINT_PERIOD=2", "Run.eval_batches=1")
TASK = """
MIXTURE_OR_TASK_NAME = "sentences"
TASK_FEATURE_LENGTHS = {"inputs": 32, "targets": 16}
"""


def _train(*files_and_bindings):
    files = [f"--gin_file={word}" for word in files_and_bindings if word.endswith(".gin")]
    bindings = [f"--gin.{word}" for word in (*SMALL, *files_and_bindings) if not word.endswith(".gin")]
    return main.main(["train", *files, *bindings])


@pytest.mark.slow
def test_a_stranger_distils_a_run_and_keeps_the_student_when_the_teacher_is_gone(sentences_task, tmp_path, monkeypatch,
                                                                                  capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "write", lambda folder: None)
    (tmp_path / "sentences.gin").write_text(TASK)
    assert _train("gin/models/switch_tiny.gin", "sentences.gin", "gin/runs/pretrain.gin", "MODEL_DIR='teacher'",
                  "TRAIN_STEPS=2", "SwitchConfig.decoder_sparse_step=1", "NUM_EXPERTS=4") == 0
    student = ("gin/models/t5_tiny.gin", "sentences.gin", "gin/runs/distill.gin", "MODEL_DIR='student'")
    assert _train(*student, "TRAIN_STEPS=2", "TEACHER='teacher'") == 0
    said = capfd.readouterr().err
    assert "weights from teacher, step 2; the others are new: encoder/layers_1/mlp/wi" in said
    assert "encoder/layers_0" not in said.partition("the others are new")[2].partition(".\n")[0]
    lines = [json.loads(line) for line in (tmp_path / "student" / "metrics.jsonl").read_text().splitlines()]
    for line in (line for line in lines if "train/loss" in line):
        expected = 0.75 * line["train/cross_entropy"] + 0.25 * line["train/distillation"] + line["train/z_loss"]
        assert line["train/loss"] == pytest.approx(expected, rel=1e-4)
        assert line["train/teacher_cross_entropy"] != line["train/cross_entropy"]

    shutil.move(tmp_path / "teacher", tmp_path / "moved")
    assert main.main(["eval", "--run", "student", "--output", "scores"]) == 0
    assert _train(*student, "TRAIN_STEPS=4", "TEACHER='teacher'") == 2
    assert "TEACHER must be a folder: Hugging Face's, which holds config.json" in capfd.readouterr().err
    assert _train(*student, "TRAIN_STEPS=4", "TEACHER='moved'") == 0
    assert "Going on from step 2" in capfd.readouterr().err


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
