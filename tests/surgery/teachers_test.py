"""A teacher in another format computes what its own library computed, and a student starts from it."""

import dataclasses
import shutil

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from switch_tf import conversion, data
from switch_tf.configs.run import Run
from switch_tf.conversion import model_gin
from switch_tf.conversion.formats import opened
from switch_tf.data.task_catalog import fingerprint_of_pieces, fingerprint_of_vocabulary
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.surgery.distillation import Distillation, LiveTeacher
from tests.conversion import mesh_tensorflow_checkpoints
from tests.conversion.numpy_reader import softmax
from tests.conversion.shared import (
    GOLDEN,
    arrays_of,
    built,
    copy,
    expected_logits,
    golden,
    golden_variables,
    refusal,
    tensors_of,
)
from tests.conversion.t5x_checkpoints import write

DESCRIBED = {"vocabulary": [], "pieces": []}


def t5x(folder, config):
    """A dense model, and its T5X checkpoint with the gin file that T5X writes beside it."""
    model = built(config)
    write(folder, arrays_of(model))
    fields = {"emb_dim": "d_model", "head_dim": "d_kv", "mlp_dim": "d_ff", **{name: name for name in (
        "vocab_size", "num_heads", "num_encoder_layers", "num_decoder_layers", "logits_via_embedding")}}
    lines = [f"network.T5Config.{name} = {getattr(config, ours)!r}" for name, ours in fields.items()]
    (folder / "config.gin").write_text("\n".join([
        "from t5x.examples.t5 import network", *lines,
        f"network.T5Config.mlp_activations = ('{config.activation}',)"]) + "\n")
    return model


@pytest.fixture
def dense_config(shallow_config):
    return dataclasses.replace(shallow_config, num_experts=0, activation="relu")


def restored(folder):
    teacher = LiveTeacher(str(folder))
    teacher.build(Partitioner())
    teacher.restore()
    return teacher


def logits_of(folder, features):
    teacher = restored(folder)
    return teacher.shared_logits(teacher._config, features)[0].numpy()


def test_a_teacher_of_hugging_face_has_the_logits_that_pytorch_computes():
    features, logits, is_target = expected_logits("t5_1_1")
    assert np.abs(logits_of(GOLDEN / "t5_1_1", features) - logits)[is_target].max() < 1e-4


def test_a_teacher_of_hugging_face_drops_no_token():
    features, logits, is_target = expected_logits("switch")  # of which two in three tokens are dropped
    model = conversion.from_hugging_face(GOLDEN / "switch")
    roomy = built(dataclasses.replace(model.config, expert_capacity=100))
    roomy.set_weights(model.get_weights())
    taught = logits_of(GOLDEN / "switch", features)
    np.testing.assert_allclose(taught, roomy.forward(features)[0], atol=1e-5)
    assert np.abs(taught - logits)[is_target].max() > 1
    message = refusal(LiveTeacher(str(GOLDEN / "switch"), capacity_factor=2.0).check, model.config, DESCRIBED)
    assert "teacher_capacity_factor has no effect " in message
    assert " leave it out, and no token is dropped" in message


def test_experts_that_choose_tokens_need_a_capacity(shallow_config, tmp_path):
    config = dataclasses.replace(shallow_config, routing_policy="expert_choice", decoder_routing_policy="switch")
    conversion.to_switch_tf(built(config), tmp_path / "teacher")
    assert "choose tokens and leave out others at any capacity; set Distil" in refusal(
        LiveTeacher(str(tmp_path / "teacher")).check, config, DESCRIBED)
    LiveTeacher(str(tmp_path / "teacher"), capacity_factor=2.0).check(config, DESCRIBED)


def make_vocabulary(path):
    """Trains a vocabulary of letters; writes it twice, with other bytes and the same pieces."""
    text = path / "text.txt"
    text.write_text("\n".join(f"number {i} of a few words {i * i}" for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(path / "own"), vocab_size=60, pad_id=0,
                                             eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2)
    proto = sentencepiece_model_pb2.ModelProto.FromString((path / "own.model").read_bytes())
    proto.trainer_spec.model_prefix = "elsewhere"
    (path / "same.model").write_bytes(proto.SerializeToString())
    proto.pieces[40].piece = "another"
    (path / "other.model").write_bytes(proto.SerializeToString())


def described_by(path):
    vocabulary = data.get_vocabulary(str(path))
    return {"vocabulary": [fingerprint_of_vocabulary(vocabulary)], "pieces": [fingerprint_of_pieces(vocabulary)]}


def test_a_teacher_with_the_same_vocabulary_may_have_other_rows(tmp_path):
    make_vocabulary(tmp_path)
    described, of_same, of_other = (described_by(tmp_path / f"{name}.model") for name in ("own", "same", "other"))
    folder = copy("t5_1_1", tmp_path / "teacher")
    config = golden("t5_1_1")[0]
    fewer, more = (dataclasses.replace(config, vocab_size=size) for size in (60, 70))
    assert "has 64 rows and no vocabulary to compare; put its spiece.model there" in refusal(
        LiveTeacher(str(folder)).check, fewer, described)
    shutil.copy(tmp_path / "same.model", folder / "spiece.model")
    assert of_same["vocabulary"] != described["vocabulary"]
    teacher = restored(folder)
    for student in (fewer, config, more):
        teacher.check(student, described)
        message = refusal(teacher.check, student, of_other)
        assert message.startswith("The vocabulary of the teacher ") and " is not the student's" in message
    features, _, is_target = expected_logits("t5_1_1")
    whole, mass = teacher.shared_logits(config, features)
    assert mass is None
    shared, mass = teacher.shared_logits(fewer, features)
    np.testing.assert_array_equal(shared, whole[..., :60])
    unshared = softmax(whole.numpy())[..., 60:].sum(-1)
    np.testing.assert_allclose(mass, unshared, rtol=1e-4)
    of_more, mass = teacher.shared_logits(more, features)
    assert mass is None and of_more.shape[-1] == 70 and np.all(of_more.numpy()[..., 64:] == -1e9)
    targets = {"decoder_target_tokens": np.where(is_target, 3, 0), "decoder_loss_weights": is_target.astype("int32")}
    terms = teacher.cross_entropies(fewer, {**features, **targets}, shared, 1.0)
    assert float(terms["teacher_unshared"].value) == pytest.approx(unshared[is_target].mean(), rel=1e-4)


def test_a_teacher_of_t5x_has_the_logits_of_its_weights(dense_config, batch, tmp_path):
    model = t5x(tmp_path / "checkpoint_7", dense_config)
    np.testing.assert_allclose(logits_of(tmp_path / "checkpoint_7", batch), model.forward(batch)[0], atol=1e-6)


def test_the_identity_is_that_of_the_contents(tmp_path):
    tensors = {name: tensor.copy() for name, tensor in tensors_of("switch").items()}
    folders = [copy("switch", tmp_path / name, tensors) for name in ("one", "two", "more")]
    (folders[2] / "more.json").write_text("{}")
    tensors["shared.weight"][0, 0] += 1  # the same names and sizes
    folders.append(copy("switch", tmp_path / "tuned", tensors))
    one, two, more, tuned = (LiveTeacher(str(folder)).identity for folder in folders)
    assert one == two and len({one, more, tuned}) == 3 and one.startswith("hugging_face, ")


def test_a_teacher_that_does_not_state_its_model_is_converted_first(tmp_path):
    config, variables = golden_variables("switch")
    for teacher in (mesh_tensorflow_checkpoints.write(tmp_path, variables), tmp_path / "model.ckpt-7"):
        objective = Distillation(str(teacher))
        assert objective.get_config()["teacher"].startswith("mesh_tensorflow, ")  # a run records it before the check
        message = refusal(objective.check, config, DESCRIBED)
        assert ("is of mesh_tensorflow and does not describe its model; convert it first: switch-tf convert --input "
                in message) and " --gin_file=gin/models/NAME.gin" in message


def test_a_student_is_compared_with_the_foreign_teacher_before_anything_is_built():
    config = golden("switch")[0]
    student = dataclasses.replace(config, vocab_size=config.vocab_size + 8)
    assert f"A teacher needs the student's vocab_size, {student.vocab_size}, or its" in refusal(
        Distillation(str(GOLDEN / "switch")).check, student, DESCRIBED)


def test_a_student_starts_from_a_folder_that_states_another_model(dense_config, tmp_path):
    t5x(tmp_path / "checkpoint_7", dense_config)
    run = Run(model_dir=str(tmp_path / "run"), mixture_or_task_name="any",
              task_feature_lengths={"inputs": 8, "targets": 8}, train_steps=1, batch_size=1,
              initial_checkpoint=str(tmp_path / "checkpoint_7"), initial_variables="matching")
    weights = opened(run, dataclasses.replace(dense_config, d_ff=48))
    assert weights.source.config.d_ff == dense_config.d_ff


@pytest.mark.slow
def test_a_stranger_distils_a_model_of_hugging_face(shallow_config, train, tmp_path):
    teacher = built(dataclasses.replace(shallow_config, expert_dropout_rate=0.0))
    conversion.to_hugging_face(teacher, tmp_path / "teacher", expert_capacity=64)
    (tmp_path / "student.gin").write_text(model_gin.gin_text(dataclasses.replace(teacher.config, num_experts=0)))
    words = ("student.gin", "gin/runs/distill.gin", "BATCH_SIZE=8", "EVAL_PERIOD=2", "MODEL_DIR='student'",
             "TEACHER='teacher'")
    status, said = train(*words, "TRAIN_STEPS=2")
    assert status == 0 and "weights from teacher, step 0; the others are new: encoder/layers_0/mlp/wi" in said
    assert "train/distillation" in (tmp_path / "student" / "metrics.jsonl").read_text()
    status, said = train(*words, "TRAIN_STEPS=3")
    assert status == 0 and "Going on from step 2" in said
