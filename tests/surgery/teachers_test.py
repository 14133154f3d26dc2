"""A teacher in another format computes what its own library computed, and a student starts from it."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from switch_tf import SwitchTransformer, conversion, data
from switch_tf.cli import main
from switch_tf.configs.run import Run
from switch_tf.conversion import model_gin, weight_source
from switch_tf.conversion import t5x as rules
from switch_tf.conversion.formats import opened
from switch_tf.data.task_catalog import fingerprint_of_pieces, fingerprint_of_vocabulary
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.reporting import report
from switch_tf.surgery.distillation import Distillation, LiveTeacher
from tests.conversion import mesh_tensorflow_test
from tests.conversion.t5x_checkpoints import write

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
DESCRIBED = {"vocabulary": [], "pieces": []}


def t5x(folder, config):
    """A dense model, and its T5X checkpoint with the gin file that T5X writes beside it."""
    model = SwitchTransformer(config)
    model.build()
    variables = weight_source.variables_of(model)
    write(folder, {name.removeprefix("target/"): values for link in rules.RULES.link(weight_source.weights_of(config))
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
    return teacher.shared_logits(teacher._config, features)[0].numpy()


def features_of(case):
    expected = np.load(GOLDEN / case / "expected.npz")
    features = {"encoder_input_tokens": expected["inputs"], "decoder_input_tokens": expected["decoder_inputs"]}
    return features, expected["logits"], expected["targets"] != 0


def test_a_teacher_of_hugging_face_has_the_logits_that_pytorch_computes():
    features, logits, is_target = features_of("t5_1_1")
    assert np.abs(logits_of(GOLDEN / "t5_1_1", features) - logits)[is_target].max() < 1e-4


def test_a_teacher_of_hugging_face_drops_no_token():
    features, logits, is_target = features_of("switch")  # of which two in three tokens are dropped
    model = conversion.from_hugging_face(GOLDEN / "switch")
    roomy = SwitchTransformer(dataclasses.replace(model.config, expert_capacity=100))
    roomy.build()
    for variable, read in zip(roomy.variables, model.variables, strict=True):
        variable.assign(read)
    taught = logits_of(GOLDEN / "switch", features)
    np.testing.assert_allclose(taught, roomy.forward(features)[0], atol=1e-5)
    assert np.abs(taught - logits)[is_target].max() > 1
    with pytest.raises(Refusal, match="teacher_capacity_factor has no effect .* leave it out, and no token is dropped"):
        LiveTeacher(str(GOLDEN / "switch"), capacity_factor=2.0).check(model.config, DESCRIBED)


def test_experts_that_choose_tokens_need_a_capacity(shallow_config, tmp_path):
    config = dataclasses.replace(shallow_config, routing_policy="expert_choice", decoder_routing_policy="switch")
    teacher = SwitchTransformer(config)
    teacher.build()
    conversion.to_switch_tf(teacher, tmp_path / "teacher")
    with pytest.raises(Refusal, match="choose tokens and leave out others at any capacity; set Distil"):
        LiveTeacher(str(tmp_path / "teacher")).check(config, DESCRIBED)
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


def test_a_teacher_with_the_same_vocabulary_may_have_other_rows(dense_config, batch, tmp_path):
    make_vocabulary(tmp_path)
    described = described_by(tmp_path / "own.model")
    shutil.copytree(GOLDEN / "t5_1_1", tmp_path / "teacher")
    teacher = LiveTeacher(str(tmp_path / "teacher"))
    config = conversion.from_hugging_face(tmp_path / "teacher").config
    fewer, more = (dataclasses.replace(config, vocab_size=size) for size in (60, 70))
    with pytest.raises(Refusal, match="has 64 rows and no vocabulary to compare; put its spiece.model there"):
        teacher.check(fewer, described)
    shutil.copy(tmp_path / "same.model", tmp_path / "teacher" / "spiece.model")
    assert described_by(tmp_path / "same.model")["vocabulary"] != described["vocabulary"]
    teacher = LiveTeacher(str(tmp_path / "teacher"))
    for student in (fewer, config, more):
        teacher.check(student, described)
        with pytest.raises(Refusal, match="The vocabulary of the teacher .* is not the student's"):
            teacher.check(student, described_by(tmp_path / "other.model"))
    teacher.build(Partitioner())
    teacher.restore()
    features, _, is_target = features_of("t5_1_1")
    whole = teacher.shared_logits(config, features)[0].numpy()
    shared, mass = teacher.shared_logits(fewer, features)
    np.testing.assert_array_equal(shared, whole[..., :60])
    probs = np.exp(whole) / np.exp(whole).sum(-1, keepdims=True)
    np.testing.assert_allclose(mass, probs[..., 60:].sum(-1), rtol=1e-4)
    assert teacher.shared_logits(config, features)[1] is None
    shared, mass = teacher.shared_logits(more, features)
    assert mass is None and shared.shape[-1] == 70 and np.all(shared.numpy()[..., 64:] == -1e9)
    targets = {"decoder_target_tokens": np.where(is_target, 3, 0), "decoder_loss_weights": is_target.astype("int32")}
    terms = teacher.cross_entropies(fewer, {**features, **targets}, whole[..., :60], 1.0)
    assert float(terms["teacher_unshared"].value) == pytest.approx(probs[..., 60:].sum(-1)[is_target].mean(), rel=1e-4)


def test_a_teacher_of_t5x_has_the_logits_of_its_weights(dense_config, batch, tmp_path):
    model = t5x(tmp_path / "checkpoint_7", dense_config)
    np.testing.assert_allclose(logits_of(tmp_path / "checkpoint_7", batch), model.forward(batch)[0], atol=1e-6)


def test_the_identity_is_that_of_the_contents(tmp_path):
    names = ("one", "two", "more", "tuned")
    for name in names:
        shutil.copytree(GOLDEN / "switch", tmp_path / name)
    (tmp_path / "more" / "more.json").write_text("{}")
    weights = tmp_path / "tuned" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # a value of the last tensor: the same names and sizes
    weights.write_bytes(content)
    one, two, more, tuned = (LiveTeacher(str(tmp_path / name)).identity for name in names)
    assert one == two and len({one, more, tuned}) == 3 and one.startswith("hugging_face, ")


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
    with pytest.raises(Refusal, match=f"A teacher needs the student's vocab_size, {student.vocab_size}, or its"):
        Distillation(str(GOLDEN / "switch")).check(student, DESCRIBED)


def test_a_student_starts_from_a_folder_that_states_another_model(dense_config, tmp_path):
    t5x(tmp_path / "checkpoint_7", dense_config)
    run = Run(model_dir=str(tmp_path / "run"), mixture_or_task_name="any",
              task_feature_lengths={"inputs": 8, "targets": 8}, train_steps=1, batch_size=1,
              initial_checkpoint=str(tmp_path / "checkpoint_7"), initial_variables="matching")
    weights = opened(run, dataclasses.replace(dense_config, d_ff=48))
    assert weights.source.config.d_ff == dense_config.d_ff


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
    assert main.main(words) == 0
    said = capfd.readouterr().err
    assert "weights from teacher, step 0; the others are new: encoder/layers_0/mlp/wi" in said
    assert "train/distillation" in (tmp_path / "student" / "metrics.jsonl").read_text()
    assert main.main([*words, "--gin.TRAIN_STEPS=3"]) == 0
    assert "Going on from step 2" in capfd.readouterr().err
