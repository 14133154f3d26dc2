"""A student that reads its teacher's predictions from a folder trains as one whose teacher runs beside it."""

import dataclasses
import json
import os
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, data
from switch_tf.aot.lower import lower_step
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.run import Run, StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.reporting import report
from switch_tf.storage import places
from switch_tf.surgery import distillation, predictions
from switch_tf.surgery.distillation import Distillation, LiveTeacher
from switch_tf.training import verification
from switch_tf.training.trainer import Trainer

STEPS = 5


@pytest.fixture(autouse=True)
def _no_report_and_no_look_at_the_data(monkeypatch):
    """They take as long as the training here."""
    monkeypatch.setattr(report, "write", lambda folder: None)
    monkeypatch.setattr(data, "check_examples", lambda description: None)


def _run(task, folder, **changes):
    return Run(**{"model_dir": str(folder), "mixture_or_task_name": task, "train_steps": STEPS, "batch_size": 4,
                  "task_feature_lengths": {"inputs": 48, "targets": 32}, "log_period": 1, "eval_period": 0,
                  "checkpoint_period": 10, "pack": True, "seed": 3, **changes})


def _store(run, config, teacher, folder, top_k=None, temperature=2.0):
    """Stores predictions as the command does; returns the result of `distillation.store`."""
    described = Experiment(config, None, run, StepSettings(), partitioner=Partitioner())
    live, top_k = LiveTeacher(str(teacher)), top_k or config.vocab_size
    vocabulary = data.vocabulary_fingerprint(run.mixture_or_task_name)
    return distillation.store(described, live, folder, temperature, top_k, vocabulary)


def _objective(predictions=None, teacher="gone", temperature=2.0):
    return Distillation(str(teacher), soft_weight=0.5, temperature=temperature,
                        predictions=predictions and str(predictions))


def _train(run, config, objective, settings=None):
    """Trains; returns the logged lines: of each step the loss and the two terms of the teacher."""
    keras.utils.set_random_seed(1)
    Trainer(SwitchTransformer(config), Adafactor(0.01), run, settings, objective=objective).train("# resolved")
    lines = pathlib.Path(run.model_dir, "metrics.jsonl").read_text().splitlines()
    return np.array([[line[f"train/{name}"] for name in ("loss", "distillation", "teacher_cross_entropy")]
                     for line in map(json.loads, lines) if "train/loss" in line])


@pytest.fixture(scope="module")
def stored(noisy_task, student_config, teacher, tmp_path_factory):
    """All probabilities for the packed rows of the noisy task, of seed 3."""
    folder = tmp_path_factory.mktemp("stored") / "predictions"
    stored = _store(_run(noisy_task, "unused"), student_config, teacher, folder)
    assert stored["rows"] == stored["new_rows"] == STEPS * 4
    return folder


@pytest.fixture(scope="module")
def live_lines(noisy_task, student_config, teacher, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write", lambda folder: None)
        return _train(_run(noisy_task, tmp_path_factory.mktemp("live") / "run"), student_config,
                      _objective(teacher=teacher))


@pytest.fixture
def without_tracing(monkeypatch):
    """Runs the teacher operation by operation: tracing it takes seconds."""
    monkeypatch.setattr(distillation.text_model, "compile_features", lambda function, partitioner: lambda features: (
        tf.nest.map_structure(np.asarray, function(tf.nest.map_structure(tf.constant, features)))))


@pytest.mark.parametrize("top_k", [pytest.param(8, marks=pytest.mark.slow), 384])
def test_terms_and_gradients_are_those_of_the_live_teacher_or_of_its_most_probable_tokens(
        noisy_task, student_config, teacher, tmp_path, without_tracing, top_k):
    """The probabilities of the live teacher are computed in float64, and so is the loss of 8 tokens."""
    run = _run(noisy_task, "unused", train_steps=1)
    _store(run, student_config, teacher, tmp_path / "predictions", top_k)
    objectives = _objective(tmp_path / "predictions"), _objective(teacher=teacher)
    read = next(data.get_batches(data.description_of_data(run, student_config, "train", run.seed),
                                 added=objectives[0].added_features()))
    batch = {name: value[0] for name, value in read.items()}
    logits = tf.constant(np.random.RandomState(0).randn(4, 32, 384).astype("float32"))
    measured, gradients = [], []
    for objective in objectives:
        objective.build(Partitioner())
        objective.restore()
        with tf.GradientTape() as tape:
            tape.watch(logits)
            terms = objective.measure(student_config, batch, logits, (), StepSettings()).loss_terms
        measured.append({name: float(term.value) for name, term in terms.items()})
        gradients.append(tape.gradient(terms["distillation"].total, logits).numpy())
    expected = measured[1]
    if top_k == 384:
        np.testing.assert_allclose(*gradients, atol=2e-4)  # float16 has three digits
    else:
        expected["distillation"] = _loss_of_most_probable(objectives[1], batch, logits, top_k)
    assert measured[0] == pytest.approx(expected, rel=1e-5)


def _loss_of_most_probable(objective, batch, logits, top_k):
    teacher, is_target = objective.live_teacher, batch["decoder_loss_weights"].numpy() > 0
    probs, student = (_softmax(values.numpy()[is_target].astype("float64") / 2)
                      for values in (teacher.shared_logits(teacher._config, batch)[0], logits))
    is_kept = probs >= -np.sort(-probs, axis=-1)[..., top_k - 1:top_k]
    loss = -np.sum(np.where(is_kept, probs * np.log(student), 0), -1)
    loss -= np.where(is_kept, 0, probs).sum(-1) * np.log(np.where(is_kept, 0, student).sum(-1))
    return 4 * loss.mean()


def _softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.slow
def test_with_all_tokens_the_losses_are_those_of_the_live_teacher(noisy_task, student_config, stored, live_lines,
                                                                  tmp_path):
    """The difference is that of float16, in which log-probabilities of about -6 have an error of up to 0.002."""
    lines = _train(_run(noisy_task, tmp_path / "run"), student_config, _objective(stored))
    assert len(lines) == STEPS
    np.testing.assert_allclose(lines, live_lines, rtol=1e-5)
    assert len(np.unique(lines[:, 0])) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("settings", [StepSettings(num_microbatches=2), StepSettings(steps_per_call=STEPS)],
                         ids=["microbatches", "steps_per_call"])
def test_so_are_they_in_parts_and_with_several_steps_a_call(noisy_task, student_config, stored, teacher, settings,
                                                            tmp_path):
    pairs = [_train(_run(noisy_task, tmp_path / name, log_period=STEPS), student_config, objective, settings)
             for name, objective in (("stored", _objective(stored)), ("live", _objective(teacher=teacher)))]
    assert len(pairs[0]) == 1
    np.testing.assert_allclose(*pairs, rtol=1e-5)


@pytest.mark.slow
def test_so_are_they_with_a_cached_task_in_parts(noisy_task, student_config, teacher, tmp_path):
    (*shards,) = data.plan_cache(noisy_task, "train", None, str(tmp_path / "cache"), 2, False)
    for shard in shards:
        data.write_shard(shard)
    data.finish_cache(shards)
    run = _run(noisy_task, tmp_path / "live", use_cached_tasks=True, cache_dir=str(tmp_path / "cache"), cache_parts=2)
    _store(run, student_config, teacher, tmp_path / "predictions")
    expected = _train(run, student_config, _objective(teacher=teacher))
    run = dataclasses.replace(run, model_dir=str(tmp_path / "stored"))
    np.testing.assert_allclose(_train(run, student_config, _objective(tmp_path / "predictions")), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_process_looks_for_its_own_rows_alone(noisy_task, student_config, teacher, tmp_path, without_tracing):
    """Rows of zeros, which other processes read, get zeros."""
    (*shards,) = data.plan_cache(noisy_task, "train", None, str(tmp_path / "cache"), 2, False)
    for shard in shards:
        data.write_shard(shard)
    data.finish_cache(shards)
    run = _run(noisy_task, "unused", use_cached_tasks=True, cache_dir=str(tmp_path / "cache"), cache_parts=2)
    _store(run, student_config, teacher, tmp_path / "predictions", top_k=4)
    description = data.description_of_data(run, student_config, "train", run.seed)
    added = _objective(tmp_path / "predictions").added_features()
    whole, half = (next(data.get_batches(description, 1, rows, added)) for rows in (None, (2, 4)))
    assert {name: value.shape for name, value in half.items()} == {
        name: spec.shape for name, spec in data.get_batches(description, 1, (2, 4), added).element_spec.items()}
    for name, value in half.items():
        assert not value.numpy()[:, :2].any()
        np.testing.assert_array_equal(value[:, 2:], whole[name][:, 2:])
    assert whole["teacher_token_ids"].numpy().any()


@pytest.mark.slow
def test_a_run_that_resumes_in_the_middle_takes_the_same_steps(noisy_task, student_config, stored, tmp_path):
    expected = _train(_run(noisy_task, tmp_path / "whole"), student_config, _objective(stored))
    _train(_run(noisy_task, tmp_path / "halves", train_steps=2), student_config, _objective(stored))
    lines = _train(_run(noisy_task, tmp_path / "halves"), student_config, _objective(stored))
    np.testing.assert_array_equal(lines, expected)


@pytest.mark.slow
def test_a_run_with_a_live_teacher_goes_on_with_its_predictions(noisy_task, student_config, stored, teacher, live_lines,
                                                                tmp_path, capfd):
    _train(_run(noisy_task, tmp_path / "run", train_steps=2), student_config, _objective(teacher=teacher))
    lines = _train(_run(noisy_task, tmp_path / "run"), student_config, _objective(stored))
    np.testing.assert_allclose(lines, live_lines, rtol=1e-5)
    assert "Distillation.top_k was None and is 384" in capfd.readouterr().err


def test_without_noise_another_order_and_batch_size_find_the_same_rows(sentences_task, student_config, teacher,
                                                                       tmp_path, without_tracing):
    """90 sentences, each stored once although it is read several times."""
    run = _run(sentences_task, "unused", pack=False, batch_size=20, train_steps=16)
    stored = _store(run, student_config, teacher, tmp_path / "predictions", top_k=4)
    assert stored["rows"] == 90
    added = _objective(tmp_path / "predictions").added_features()
    other = dataclasses.replace(run, seed=17, batch_size=5)
    batches = data.get_batches(data.description_of_data(other, student_config, "train", other.seed), 2, added=added)
    batch = {name: value.numpy() for name, value in next(batches).items()}
    assert batch["teacher_token_ids"].shape == (2, 5, 32 * 4)
    probs = np.exp(batch["teacher_log_probs"].view("float32").reshape(2, 5, 32, 4)).sum(-1)
    rest = np.exp(batch["teacher_log_rest"].view("float32"))
    is_target = batch["decoder_loss_weights"] > 0
    np.testing.assert_allclose((probs + rest)[is_target], 1, atol=2e-3)


@pytest.mark.slow
def test_a_row_that_is_not_stored_ends_the_run_with_the_way_out(noisy_task, student_config, stored, tmp_path):
    run = _run(noisy_task, tmp_path / "run", seed=4)
    with pytest.raises(Refusal, match="has those of 5 steps of SEED 3 with BATCH_SIZE 4; cache this run's with .* or "
                                      "leave TEACHER_PREDICTIONS out to run the teacher"):
        _train(run, student_config, _objective(stored))


def test_predictions_of_something_else_are_refused_before_anything_is_built(noisy_task, student_config, stored,
                                                                           tmp_path, monkeypatch):
    configuration = {"vocabulary": data.vocabulary_fingerprint(noisy_task), "Run.pack": True,
                     "TASK_FEATURE_LENGTHS": {"inputs": 48, "targets": 32}}
    for vocab_size in (384, 512):  # more rows than the vocabulary has ids
        _objective(stored).check(dataclasses.replace(student_config, vocab_size=vocab_size), configuration)
    monkeypatch.setattr(Partitioner, "build", None)
    for objective, config, changes, sentence in [
            (_objective(stored, temperature=1.0), student_config, {}, "for TEMPERATURE 2.0, and this run has 1.0"),
            (_objective(stored), dataclasses.replace(student_config, vocab_size=300), {},
             "are for 384 ids, and this run has SwitchConfig.vocab_size 300"),
            (_objective(stored), student_config, {"vocabulary": ["a"]}, r"for vocabulary .*, and this run has \['a'\]"),
            (_objective(stored), student_config, {"Run.pack": False}, "for Run.pack True, and this run has False"),
            (_objective(stored), student_config, {"TASK_FEATURE_LENGTHS": {"inputs": 8, "targets": 8}},
             "for TASK_FEATURE_LENGTHS"),
            (_objective(tmp_path / "nowhere"), student_config, {}, "has no manifest.json; make it by `switch-tf ")]:
        with pytest.raises(Refusal, match=sentence):
            objective.check(config, {**configuration, **changes})


def test_damaged_files_are_refused(noisy_task, student_config, stored, tmp_path):
    def objective(name, damage):
        folder = shutil.copytree(stored, tmp_path / name)
        damage(folder)
        return _objective(folder)

    def flip(file):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def pipe(folder):
        (folder / "00000.array_record").unlink()
        os.mkfifo(folder / "00000.array_record")
        description = json.loads((folder / "00000.json").read_text())
        (folder / "00000.json").write_text(json.dumps({**description, "bytes": 0}))

    for name, damage in [("keys", lambda folder: flip(folder / "00000.keys")), ("pipe", pipe),
                         ("gone", lambda folder: (folder / "00000.array_record").unlink()),
                         ("short", lambda folder: (folder / "00000.array_record").write_bytes(b"x"))]:
        with pytest.raises(Refusal, match="00000.array_record is damaged or lacks a file beside it"):
            objective(name, damage).added_features()
    with pytest.raises(Refusal, match="manifest.json is damaged"):
        objective("manifest", lambda folder: (folder / "manifest.json").write_text("{")).added_features()
    for name in ("teacher", "teacher_capacity_factor", "temperature", "vocabulary", "pack", "reads"):
        manifest = json.loads((stored / "manifest.json").read_text())
        del manifest[name]
        text = json.dumps(manifest)
        with pytest.raises(Refusal, match="manifest.json is damaged"):
            objective(name, lambda folder, text=text: (folder / "manifest.json").write_text(text)).added_features()
    # The content of a shard is compared when it is opened.
    added = objective("rows", lambda folder: flip(folder / "00000.array_record")).added_features()
    run = _run(noisy_task, "unused")
    description = data.description_of_data(run, student_config, "train", run.seed)
    with pytest.raises(Refusal, match="00000.array_record is damaged"):
        next(data.get_batches(description, added=added))


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_with_the_rows_that_are_missing(noisy_task, student_config, stored, teacher,
                                                                          tmp_path, monkeypatch, without_tracing):
    """A shard for each batch; the third one is being written when the process is gone."""
    monkeypatch.setattr(predictions, "_BYTES_PER_SHARD", 1)
    run, folder, replace = _run(noisy_task, "unused"), tmp_path / "predictions", pathlib.Path.replace

    def killed(source, target):
        moved = replace(source, target)
        if target.name.startswith("00002"):
            raise KeyboardInterrupt
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            _store(run, student_config, teacher, folder)
    (folder / ".00003.array_record.0123abcd.unfinished").write_bytes(b"of a process that was killed")
    assert sorted(file.name for file in folder.glob("0*.json")) == ["00000.json", "00001.json"]
    damaged = (folder / "00001.array_record")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    again = _store(run, student_config, teacher, folder)
    assert again["rows"] == STEPS * 4 and again["new_rows"] == (STEPS - 1) * 4
    assert not list(folder.glob(".*"))
    assert _store(run, student_config, teacher, folder)["new_rows"] == 0

    mine, whole = predictions.PredictionStore(folder), predictions.PredictionStore(stored)
    keys = np.sort(np.concatenate([predictions.read_keys(folder, number)[0]
                                   for number in predictions.shard_numbers(folder)]))
    np.testing.assert_array_equal(keys, np.sort(predictions.read_keys(stored, 0)[0]))
    features = [store.read(keys) for store in (mine, whole)]
    for name in ("teacher_log_probs", "teacher_log_rest", "teacher_target_log_probs"):
        np.testing.assert_allclose(*(one[name].view("float32") for one in features), atol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mesh", "backend"), [
    ("data", "data=2", "mirrored"),
    # distillation_test.py has it.
    pytest.param("data_model", "data=2,model=2", "dtensor", marks=pytest.mark.exhaustive),
    ("data_model", "data=2,model=2", "pjrt")])
def test_it_is_the_same_on_every_back_end(noisy_task, teacher, student_config, make_partitioner, tmp_path, layout, mesh,
                                          backend):
    """The predictions, and the steps of a student that reads them."""
    run, folder = _run(noisy_task, "unused"), tmp_path / "one"
    partitioner = make_partitioner(layout, mesh_shape=mesh, backend=backend)
    _store(run, student_config, teacher, folder, top_k=4)
    other = tmp_path / "other"
    described = Experiment(student_config, None, run, StepSettings(), partitioner=partitioner)
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("0*"))  # the manifest alone
    distillation.store(described, LiveTeacher(str(teacher)), other, 2.0, 4, data.vocabulary_fingerprint(noisy_task))
    added, added_other = _objective(folder).added_features(), _objective(other).added_features()
    read = next(data.get_batches(data.description_of_data(run, student_config, "train", run.seed)))
    batch, of_other = ({name: value[0] for name, value in one.added_to(read).items()} for one in (added, added_other))
    for name, tolerance in (("log_probs", 2e-2), ("log_rest", 1e-4), ("target_log_probs", 1e-4)):
        name = f"teacher_{name}"
        np.testing.assert_allclose(*(one[name].numpy().view("float32") for one in (batch, of_other)), atol=tolerance)
    found = verification.compare(*(
        verification.Twin(lambda: SwitchTransformer(student_config, dtype="float64"), lambda: Adafactor(0.01), one, 3,
                          StepSettings(), lambda: _objective(folder)).train([batch])
        for one in (Partitioner(), partitioner)))
    assert found.is_equal


@pytest.mark.slow
def test_the_lowered_step_takes_the_predictions_as_features(student_config, stored):
    lowered = lower_step(SwitchTransformer(student_config), Adafactor(0.01), Layout(), 4,
                         {"inputs": 48, "targets": 32}, StepSettings(), pack=True, objective=_objective(stored))
    shapes = {argument.name: argument.shape for argument in lowered.arguments}
    assert shapes["teacher_token_ids"] == shapes["teacher_log_probs"] == (1, 4, 32 * 384)
    assert shapes["teacher_log_rest"] == shapes["teacher_target_log_probs"] == (1, 4, 32)
    assert not any(name.startswith("teacher/") for name in shapes)


@pytest.mark.slow
def test_a_folder_may_be_in_a_bucket(noisy_task, student_config, teacher, stored, bucket, tmp_path, monkeypatch,
                                     without_tracing):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = places.at(bucket.new_folder()) / "predictions"
    run = _run(noisy_task, "unused")
    assert _store(run, student_config, teacher, folder)["new_rows"] == STEPS * 4
    assert _store(run, student_config, teacher, folder)["new_rows"] == 0
    description = data.description_of_data(run, student_config, "train", run.seed)
    batches = [next(data.get_batches(description, added=_objective(place).added_features()))
               for place in (folder, stored)]
    np.testing.assert_allclose(*(batch["teacher_target_log_probs"].numpy().view("float32") for batch in batches),
                               atol=1e-4)
