"""A student that reads its teacher's predictions from a folder trains as one whose teacher runs beside it."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer, data
from switch_tf.aot.lower import lower_step
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.run import Run, StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.reporting import report
from switch_tf.storage import places
from switch_tf.surgery import distillation, predictions
from switch_tf.surgery.distillation import Distillation, LiveTeacher
from switch_tf.training import verification
from switch_tf.training.trainer import Trainer
from tests.conversion.numpy_reader import softmax
from tests.conversion.shared import refusal

STEPS = 5
RECORDS = "00000.array_record"


@pytest.fixture(autouse=True)
def _no_report_and_no_look_at_the_data(monkeypatch):
    """They take as long as the training here."""
    monkeypatch.setattr(report, "write", lambda folder: None)
    monkeypatch.setattr(data, "check_examples", lambda description: None)


class Bench(NamedTuple):
    """Runs of one student of one teacher."""

    task: str
    config: SwitchConfig
    teacher: pathlib.Path

    def run(self, folder="unused", **changes):
        return Run(**{"model_dir": str(folder), "mixture_or_task_name": self.task, "train_steps": STEPS,
                      "batch_size": 4, "task_feature_lengths": {"inputs": 48, "targets": 32}, "log_period": 1,
                      "eval_period": 0, "checkpoint_period": 10, "pack": True, "seed": 3, **changes})

    def store(self, folder, run=None, top_k=384, partitioner=None):
        """Stores predictions as the command does; returns the result of `distillation.store`."""
        described = Experiment(self.config, None, run or self.run(), StepSettings(),
                               partitioner=partitioner or Partitioner())
        return distillation.store(described, LiveTeacher(str(self.teacher)), folder, 2.0, top_k,
                                  data.vocabulary_fingerprint(self.task))

    def batches(self, added=None, run=None, steps_per_call=1, rows=None):
        """The batches of a run, with predictions."""
        run = run or self.run()
        return data.get_batches(data.description_of_data(run, self.config, "train", run.seed), steps_per_call, rows,
                                added)

    def live(self):
        return _objective(teacher=self.teacher)

    def train(self, run, objective, settings=None):
        """Trains; returns the logged lines: of each step the loss and the two terms of the teacher."""
        keras.utils.set_random_seed(1)
        Trainer(SwitchTransformer(self.config), Adafactor(0.01), run, settings, objective=objective).train("# resolved")
        lines = pathlib.Path(run.model_dir, "metrics.jsonl").read_text().splitlines()
        return np.array([[line[f"train/{name}"] for name in ("loss", "distillation", "teacher_cross_entropy")]
                         for line in map(json.loads, lines) if "train/loss" in line])


def _added(folder):
    return _objective(folder).added_features()


@pytest.fixture(scope="module")
def bench(noisy_task, student_config, teacher):
    return Bench(noisy_task, student_config, teacher)


def _objective(predictions=None, teacher="gone", temperature=2.0):
    return Distillation(str(teacher), soft_weight=0.5, temperature=temperature,
                        predictions=predictions and str(predictions))


@pytest.fixture(scope="module")
def stored(bench, tmp_path_factory):
    """All probabilities for the packed rows of the noisy task, of seed 3."""
    folder = tmp_path_factory.mktemp("stored") / "predictions"
    told = bench.store(folder)
    assert told["rows"] == told["new_rows"] == STEPS * 4
    return folder


@pytest.fixture(scope="module")
def live_lines(bench, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write", lambda folder: None)
        return bench.train(bench.run(tmp_path_factory.mktemp("live") / "run"), bench.live())


@pytest.fixture
def without_tracing(monkeypatch):
    """Runs the teacher operation by operation: tracing it takes seconds."""
    monkeypatch.setattr(distillation.text_model, "compile_features", lambda function, partitioner: lambda features: (
        tf.nest.map_structure(np.asarray, function(tf.nest.map_structure(tf.constant, features)))))


@pytest.mark.parametrize("top_k", [pytest.param(8, marks=pytest.mark.slow), 384])
def test_terms_and_gradients_are_those_of_the_live_teacher_or_of_its_most_probable_tokens(bench, tmp_path,
                                                                                          without_tracing, top_k):
    """The probabilities of the live teacher are computed in float64, and so is the loss of 8 tokens."""
    run = bench.run(train_steps=1)
    bench.store(tmp_path / "predictions", run, top_k)
    objectives = _objective(tmp_path / "predictions"), bench.live()
    batch = {name: value[0] for name, value in next(bench.batches(objectives[0].added_features(), run)).items()}
    logits = tf.constant(np.random.RandomState(0).randn(4, 32, 384).astype("float32"))
    measured, gradients = [], []
    for objective in objectives:
        objective.build(Partitioner())
        objective.restore()
        with tf.GradientTape() as tape:
            tape.watch(logits)
            terms = objective.measure(bench.config, batch, logits, (), StepSettings()).loss_terms
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
    probs, student = (softmax(values.numpy()[is_target].astype("float64") / 2)
                      for values in (teacher.shared_logits(teacher._config, batch)[0], logits))
    is_kept = probs >= -np.sort(-probs, axis=-1)[..., top_k - 1:top_k]
    loss = -np.sum(np.where(is_kept, probs * np.log(student), 0), -1)
    loss -= np.where(is_kept, 0, probs).sum(-1) * np.log(np.where(is_kept, 0, student).sum(-1))
    return 4 * loss.mean()


@pytest.mark.slow
def test_with_all_tokens_the_losses_are_those_of_the_live_teacher_and_of_a_run_that_resumes(bench, stored, live_lines,
                                                                                            tmp_path):
    """The difference is that of float16, in which log-probabilities of about -6 have an error of up to 0.002."""
    lines = bench.train(bench.run(tmp_path / "run"), _objective(stored))
    assert len(lines) == STEPS
    np.testing.assert_allclose(lines, live_lines, rtol=1e-5)
    assert len(np.unique(lines[:, 0])) == STEPS
    bench.train(bench.run(tmp_path / "halves", train_steps=2), _objective(stored))
    np.testing.assert_array_equal(bench.train(bench.run(tmp_path / "halves"), _objective(stored)), lines)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [StepSettings(num_microbatches=2), StepSettings(steps_per_call=STEPS)],
                         ids=["microbatches", "steps_per_call"])
def test_so_are_they_in_parts_and_with_several_steps_a_call(bench, stored, settings, tmp_path):
    pairs = [bench.train(bench.run(tmp_path / name, log_period=STEPS), objective, settings)
             for name, objective in (("stored", _objective(stored)), ("live", bench.live()))]
    assert len(pairs[0]) == 1
    np.testing.assert_allclose(*pairs, rtol=1e-5)


@pytest.fixture
def cached(bench, tmp_path):
    """A run with a cached task in parts."""
    (*shards,) = data.plan_cache(bench.task, "train", None, str(tmp_path / "cache"), 2, False)
    for shard in shards:
        data.write_shard(shard)
    data.finish_cache(shards)
    return bench.run(tmp_path / "live", use_cached_tasks=True, cache_dir=str(tmp_path / "cache"), cache_parts=2)


@pytest.mark.slow
def test_so_are_they_with_a_cached_task_in_parts(bench, cached, tmp_path):
    bench.store(tmp_path / "predictions", cached)
    other = dataclasses.replace(cached, model_dir=str(tmp_path / "stored"))
    np.testing.assert_allclose(bench.train(other, _objective(tmp_path / "predictions")),
                               bench.train(cached, bench.live()), rtol=1e-5)


@pytest.mark.slow
def test_a_process_looks_for_its_own_rows_alone(bench, cached, tmp_path, without_tracing):
    """Rows of zeros, which other processes read, get zeros."""
    bench.store(tmp_path / "predictions", cached, top_k=4)
    batches, of_half = (bench.batches(_added(tmp_path / "predictions"), cached, rows=rows) for rows in (None, [(2, 4)]))
    whole, half = next(batches), next(of_half)
    assert {name: value.shape for name, value in half.items()} == {
        name: spec.shape for name, spec in of_half.element_spec.items()}
    for name, value in half.items():
        assert not value.numpy()[:, :2].any()
        np.testing.assert_array_equal(value[:, 2:], whole[name][:, 2:])
    assert whole["teacher_token_ids"].numpy().any()


@pytest.mark.slow
def test_a_run_with_a_live_teacher_goes_on_with_its_predictions(bench, stored, live_lines, tmp_path, capfd):
    bench.train(bench.run(tmp_path / "run", train_steps=2), bench.live())
    lines = bench.train(bench.run(tmp_path / "run"), _objective(stored))
    np.testing.assert_allclose(lines, live_lines, rtol=1e-5)
    assert "Distillation.top_k was None and is 384" in capfd.readouterr().err


def test_without_noise_another_order_and_batch_size_find_the_same_rows(bench, sentences_task, tmp_path,
                                                                       without_tracing):
    """90 sentences, each stored once although it is read several times."""
    bench, folder = bench._replace(task=sentences_task), tmp_path / "predictions"
    run = bench.run(pack=False, batch_size=20, train_steps=16)
    assert bench.store(folder, run, top_k=4)["rows"] == 90
    other = dataclasses.replace(run, seed=17, batch_size=5)
    batch = {name: value.numpy() for name, value in next(bench.batches(_added(folder), other, 2)).items()}
    assert batch["teacher_token_ids"].shape == (2, 5, 32 * 4)
    probs = np.exp(batch["teacher_log_probs"].view("float32").reshape(2, 5, 32, 4)).sum(-1)
    rest = np.exp(batch["teacher_log_rest"].view("float32"))
    is_target = batch["decoder_loss_weights"] > 0
    np.testing.assert_allclose((probs + rest)[is_target], 1, atol=2e-3)


@pytest.mark.slow
def test_a_row_that_is_not_stored_ends_the_run_with_the_way_out(bench, stored, tmp_path):
    message = refusal(bench.train, bench.run(tmp_path / "run", seed=4), _objective(stored))
    assert "has those of 5 steps of SEED 3 with BATCH_SIZE 4; cache this run's with " in message
    assert " or leave TEACHER_PREDICTIONS out to run the teacher" in message


def test_predictions_of_something_else_are_refused_before_anything_is_built(bench, stored, tmp_path, monkeypatch):
    configuration = {"vocabulary": data.vocabulary_fingerprint(bench.task), "Run.pack": True,
                     "TASK_FEATURE_LENGTHS": {"inputs": 48, "targets": 32}}
    sizes = {size: dataclasses.replace(bench.config, vocab_size=size) for size in (300, 384, 512)}
    for size in (384, 512):  # more rows than the vocabulary has ids
        _objective(stored).check(sizes[size], configuration)
    monkeypatch.setattr(Partitioner, "build", None)
    for objective, size, changes, sentence in [
            (_objective(stored, temperature=1.0), 384, {}, "for TEMPERATURE 2.0, and this run has 1.0"),
            (_objective(stored), 300, {}, "are for 384 ids, and this run has SwitchConfig.vocab_size 300"),
            (_objective(stored), 384, {"vocabulary": ["a"]}, r"for vocabulary .*, and this run has \['a'\]"),
            (_objective(stored), 384, {"Run.pack": False}, "for Run.pack True, and this run has False"),
            (_objective(stored), 384, {"TASK_FEATURE_LENGTHS": {"inputs": 8, "targets": 8}},
             "for TASK_FEATURE_LENGTHS"),
            (_objective(tmp_path / "nowhere"), 384, {}, "has no manifest.json; make it by `switch-tf ")]:
        assert re.search(sentence, refusal(objective.check, sizes[size], {**configuration, **changes}))


def test_damaged_files_are_refused(bench, stored, tmp_path):
    def added(name, damage):
        folder = shutil.copytree(stored, tmp_path / name)
        damage(folder)
        return _added(folder)

    def flip(file):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def change(file, function):
        description = json.loads(file.read_text())
        function(description)
        file.write_text(json.dumps(description))

    def pipe(folder):
        (folder / RECORDS).unlink()
        os.mkfifo(folder / RECORDS)
        change(folder / "00000.json", lambda description: description.update(bytes=0))

    records, manifest = f"{RECORDS} is damaged or lacks a file beside it", "manifest.json is damaged"
    for name, damage, message in [
            ("keys", lambda folder: flip(folder / "00000.keys"), records), ("pipe", pipe, records),
            ("gone", lambda folder: (folder / RECORDS).unlink(), records),
            ("short", lambda folder: (folder / RECORDS).write_bytes(b"x"), records),
            ("manifest", lambda folder: (folder / "manifest.json").write_text("{"), manifest),
            *((key, lambda folder, key=key: change(folder / "manifest.json", lambda found: found.pop(key)), manifest)
              for key in ("teacher", "teacher_capacity_factor", "temperature", "vocabulary", "pack", "reads"))]:
        assert message in refusal(added, name, damage)
    # The content of a shard is compared when it is opened.
    batches = bench.batches(added("rows", lambda folder: flip(folder / RECORDS)))
    assert f"{RECORDS} is damaged" in refusal(next, batches)


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_with_the_rows_that_are_missing(bench, stored, tmp_path, monkeypatch,
                                                                          without_tracing):
    """A shard for each batch; the third one is being written when the process is gone."""
    monkeypatch.setattr(predictions, "_BYTES_PER_SHARD", 1)
    folder, replace = tmp_path / "predictions", pathlib.Path.replace

    def killed(source, target):
        moved = replace(source, target)
        if target.name.startswith("00002"):
            raise KeyboardInterrupt
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            bench.store(folder)
    (folder / ".00003.array_record.0123abcd.unfinished").write_bytes(b"of a process that was killed")
    assert sorted(file.name for file in folder.glob("0*.json")) == ["00000.json", "00001.json"]
    damaged = folder / "00001.array_record"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    again = bench.store(folder)
    assert again["rows"] == STEPS * 4 and again["new_rows"] == (STEPS - 1) * 4
    assert not list(folder.glob(".*"))
    assert bench.store(folder)["new_rows"] == 0

    keys = np.sort(np.concatenate([predictions.read_keys(folder, number)[0]
                                   for number in predictions.shard_numbers(folder)]))
    np.testing.assert_array_equal(keys, np.sort(predictions.read_keys(stored, 0)[0]))
    features = [predictions.PredictionStore(one).read(keys) for one in (folder, stored)]
    for name in ("teacher_log_probs", "teacher_log_rest", "teacher_target_log_probs"):
        np.testing.assert_allclose(*(one[name].view("float32") for one in features), atol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mesh", "backend"), [
    ("data", "data=2", "mirrored"),
    # distillation_test.py has it.
    pytest.param("data_model", "data=2,model=2", "dtensor", marks=pytest.mark.exhaustive),
    ("data_model", "data=2,model=2", "pjrt")])
def test_it_is_the_same_on_every_back_end(bench, make_partitioner, tmp_path, layout, mesh, backend):
    """The predictions, and the steps of a student that reads them."""
    folder, other = tmp_path / "one", tmp_path / "other"
    partitioner = make_partitioner(layout, mesh_shape=mesh, backend=backend)
    bench.store(folder, top_k=4)
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("0*"))  # the manifest alone
    bench.store(other, top_k=4, partitioner=partitioner)
    read = next(bench.batches())
    batch, of_other = ({name: value[0] for name, value in _added(one).added_to(read).items()}
                       for one in (folder, other))
    for name, tolerance in (("log_probs", 2e-2), ("log_rest", 1e-4), ("target_log_probs", 1e-4)):
        name = f"teacher_{name}"
        np.testing.assert_allclose(*(one[name].numpy().view("float32") for one in (batch, of_other)), atol=tolerance)
    found = verification.compare(*(
        verification.Twin(lambda: SwitchTransformer(bench.config, dtype="float64"), lambda: Adafactor(0.01), one, 3,
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
def test_a_folder_may_be_in_a_bucket(bench, stored, bucket, tmp_path, monkeypatch, without_tracing):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = places.at(bucket.new_folder()) / "predictions"
    for new_rows in (STEPS * 4, 0):
        assert bench.store(folder)["new_rows"] == new_rows
    np.testing.assert_allclose(*(next(bench.batches(_added(place)))["teacher_target_log_probs"].numpy().view("float32")
                                 for place in (folder, stored)), atol=1e-4)
