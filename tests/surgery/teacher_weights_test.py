"""A teacher in another format computes what its own library computed, and a student starts from it."""

import dataclasses
import pathlib
import shutil

import gin
import numpy as np
import pytest

from switch_tf import SwitchTransformer, conversion
from switch_tf.cli import main
from switch_tf.configs.run import Run
from switch_tf.conversion import linked_weights, model_gin, weight_source
from switch_tf.conversion import t5x as rules
from switch_tf.conversion.initial_weights import converted
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.reporting import report
from switch_tf.surgery.distillation import Distillation
from switch_tf.surgery.live_teacher import LiveTeacher
from tests.conversion import mesh_tensorflow_test
from tests.conversion.t5x_checkpoints import write

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
DESCRIBED = {"vocabulary": []}


def t5x(folder, config):
    """A dense model, and its T5X checkpoint with the gin file that T5X writes beside it."""
    model = SwitchTransformer(config)
    model.build()
    variables = weight_source.variables_of(model)
    write(folder, {name.removeprefix("target/"): values for link in linked_weights.links_of(config, rules.RULES)
                   for name, values in link.to_theirs(variables[link.ours].numpy())})
    fields = {"vocab_size": config.vocab_size, "emb_dim": config.d_model, "num_heads": config.num_heads,
              "head_dim": config.d_kv, "mlp_dim": config.d_ff, "num_encoder_layers": config.num_encoder_layers,
              "num_decoder_layers": config.num_decoder_layers, "logits_via_embedding": config.logits_via_embedding,
              "mlp_activations": (config.activation,)}
    lines = [f"network.T5Config.{name} = {value!r}" for name, value in fields.items()]
    (folder / "config.gin").write_text("\n".join(["from t5x.examples.t5 import network", *lines]) + "\n")
    return model


@pytest.fixture
def dense_config(shallow_config):
    return dataclasses.replace(shallow_config, num_experts=0, activation="relu")


def logits_of(folder, features):
    teacher = LiveTeacher(str(folder))
    teacher.build(Partitioner())
    teacher.restore()
    return teacher.logits(features).numpy()


def test_a_teacher_of_hugging_face_has_the_logits_that_pytorch_computes():
    expected = np.load(GOLDEN / "switch" / "expected.npz")
    logits = logits_of(GOLDEN / "switch", {"encoder_input_tokens": expected["inputs"],
                                           "decoder_input_tokens": expected["decoder_inputs"]})
    assert np.abs(logits - expected["logits"])[expected["targets"] != 0].max() < 1e-4


def test_a_teacher_of_t5x_has_the_logits_of_its_weights(dense_config, batch, tmp_path):
    model = t5x(tmp_path / "checkpoint_7", dense_config)
    np.testing.assert_allclose(logits_of(tmp_path / "checkpoint_7", batch), model.forward(batch)[0], atol=1e-6)


def test_the_identity_is_that_of_the_files(tmp_path):
    for name in ("one", "two", "third"):
        shutil.copytree(GOLDEN / "switch", tmp_path / name)
    (tmp_path / "third" / "more.json").write_text("{}")
    one, two, third = (LiveTeacher(str(tmp_path / name)).identity for name in ("one", "two", "third"))
    assert one == two != third and one.startswith("hugging_face, ")


def test_a_teacher_that_does_not_state_its_model_is_converted_first(tmp_path):
    config, variables = mesh_tensorflow_test.golden("switch")
    place = mesh_tensorflow_test.write(tmp_path / "mesh", variables)
    prefix = next(place.glob("*.index")).with_suffix("") if place.is_dir() else place
    for teacher in (prefix.parent, prefix):
        objective = Distillation(str(teacher))
        assert objective.get_config()["teacher"].startswith("mesh_tensorflow, ")  # a run records it before the check
        with pytest.raises(Refusal, match="is of mesh_tensorflow and does not describe its model; convert it first: "
                                          "switch-tf convert --input .* --gin_file=gin/models/NAME.gin"):
            objective.check(config, DESCRIBED)


def test_a_student_is_compared_with_the_foreign_teacher_before_anything_is_built():
    config = conversion.from_hugging_face(GOLDEN / "switch").config
    student = dataclasses.replace(config, vocab_size=config.vocab_size + 8)
    with pytest.raises(Refusal, match=f"A teacher needs the student's vocab_size, {student.vocab_size}"):
        Distillation(str(GOLDEN / "switch")).check(student, DESCRIBED)


def test_a_student_starts_from_a_folder_that_states_another_model(dense_config, tmp_path):
    t5x(tmp_path / "checkpoint_7", dense_config)
    run = Run(model_dir=str(tmp_path / "run"), mixture_or_task_name="any",
              task_feature_lengths={"inputs": 8, "targets": 8}, train_steps=1, batch_size=1,
              initial_checkpoint=str(tmp_path / "checkpoint_7"), initial_variables="matching")
    with converted(run, dataclasses.replace(dense_config, d_ff=48)) as weights:
        assert conversion.from_switch_tf(weights).config.d_ff == dense_config.d_ff


@pytest.mark.slow
def test_a_stranger_distils_a_model_of_hugging_face(shallow_config, sentences_task, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "write", lambda folder: None)
    teacher = SwitchTransformer(dataclasses.replace(shallow_config, expert_dropout_rate=0.0))
    teacher.build()
    conversion.to_hugging_face(teacher, tmp_path / "teacher", expert_capacity=64)
    (tmp_path / "student.gin").write_text(model_gin.gin_text(dataclasses.replace(
        teacher.config, num_experts=0)))
    (tmp_path / "sentences.gin").write_text(
        'MIXTURE_OR_TASK_NAME = "sentences"\nTASK_FEATURE_LENGTHS = {"inputs": 32, "targets": 16}\n')
    bindings = ("BATCH_SIZE=8", "LOG_PERIOD=1", "EVAL_PERIOD=2", "CHECKPOINT_PERIOD=2", "Run.eval_batches=1",
                "MODEL_DIR='student'", "TEACHER='teacher'", "TRAIN_STEPS=2")
    words = ["train", "--gin_file=student.gin", "--gin_file=sentences.gin", "--gin_file=gin/runs/distill.gin",
             *(f"--gin.{binding}" for binding in bindings)]
    gin.clear_config()
    assert main.main(words) == 0
    said = capfd.readouterr().err
    assert "weights from teacher, step 0; the others are new: encoder/layers_0/mlp/wi" in said
    assert "train/distillation" in (tmp_path / "student" / "metrics.jsonl").read_text()
    assert main.main([*words, "--gin.TRAIN_STEPS=3"]) == 0
    assert "Going on from step 2" in capfd.readouterr().err
