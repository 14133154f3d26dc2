import dataclasses
import json
import os
import pathlib
import re
import shutil
import threading
import time

import keras
import numpy as np
import pytest

from switch_tf import SwitchTransformer, data, statuses
from switch_tf.checkpoints import bundles, checkpointer, folders, run_config, run_folder
from switch_tf.checkpoints.checkpointer import FailedSave
from switch_tf.configs import names
from switch_tf.configs.run import Run, StepSettings
from switch_tf.ops import random
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Outage, Refusal
from switch_tf.reporting import report
from switch_tf.storage import places
from switch_tf.training import loop, stopping, train_step, trainer
from switch_tf.training.trainer import Trainer


@pytest.fixture(scope="module")
def tiny_config(tiny_config):
    """One layer each, sparse, that draws jitter and the experts' dropout alone: these tests trace many steps."""
    return dataclasses.replace(tiny_config, num_encoder_layers=1, num_decoder_layers=1, encoder_sparse_step=1,
                               decoder_sparse_step=1, dropout_rate=0.0)


def _describe(folder, task):
    return Run(model_dir=str(folder / "run"), mixture_or_task_name=task,
               task_feature_lengths={"inputs": 32, "targets": 16}, train_steps=6, batch_size=4, log_period=2,
               eval_period=3, checkpoint_period=2, eval_batches=2)


@pytest.fixture
def run(sentences_task, tmp_path):
    return _describe(tmp_path, sentences_task)


@pytest.fixture(scope="module")
def timed():
    """Whether each step of the straight run counted for its speed."""
    return []


@pytest.fixture(scope="module")
def straight(tiny_config, sentences_task, tmp_path_factory, timed):
    """A run from beginning to end, to be looked at: `(run, trainer, summary)`."""
    run = dataclasses.replace(_describe(tmp_path_factory.mktemp("straight"), sentences_task), unigram_batches=3,
                              profile_steps=2)
    add = loop.Meter.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Meter, "add", lambda *arguments: timed.append(arguments[-1]) or add(*arguments))
        return run, *_train(tiny_config, run)


@pytest.fixture
def finished(run, straight):
    """A copy of it, to be changed."""
    shutil.copytree(straight[0].model_dir, run.model_dir)
    return run


@pytest.fixture(autouse=True)
def _no_pictures_and_no_look_at_the_data(request, monkeypatch):
    """They take as long as the training here; the straight run has them, and data/examples_test.py is about the look.
    """
    if "straight" in request.fixturenames:
        request.getfixturevalue("straight")
    monkeypatch.setattr(report, "write", lambda folder: None)
    monkeypatch.setattr(data, "check_examples", lambda description: None)


def _train(config, run, settings=None, optimizer=None):
    trainer = Trainer(SwitchTransformer(config), optimizer or Adafactor(0.01), run, settings)
    return trainer, trainer.train("# resolved")


def _lines(run):
    with open(os.path.join(run.model_dir, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def test_a_run_writes_what_the_documentation_promises(straight, timed):
    assert timed == [True, True, False, False, True, True]  # the profiler slows the steps that it records
    assert len(list(pathlib.Path(straight[0].model_dir).glob("profile/plugins/profile/*/*.xplane.pb"))) == 1
    run, _, summary = straight
    lines = _lines(run)
    logged = [line for line in lines if "train/loss" in line]
    evaluated = [line for line in lines if "eval/sentences/loss" in line]
    assert [line["step"] for line in logged] == [2, 4, 6]
    assert [line["step"] for line in evaluated] == [0, 3, 6]
    assert "eval/sentences/unigram_loss" in evaluated[0]
    for name in ("train/cross_entropy", "train/load_balancing_loss", "train/router_z_loss", "train/tokens_per_second",
                 "train/seconds_per_step", "train/model_flops_utilization", "train/input_wait_fraction",
                 "router/encoder/layers_0/fraction_tokens_dropped", "router/decoder/layers_0/router_entropy"):
        assert name in logged[0], name
    assert set(os.listdir(run.model_dir)) == {"checkpoints", "config.json", "end.json", "events", "lock", "loss.png",
                                              "metrics.jsonl", "operative_config.gin", "profile", "report.html"}
    assert run_folder.end_of(pathlib.Path(run.model_dir)) == "TRAIN_STEPS is 6"
    assert logged[0]["train/learning_rate"] == pytest.approx(0.01)
    assert folders.steps(folders.checkpoints_of(run.model_dir)) == [2, 4, 6]
    assert summary["step"] == 6
    assert summary["interrupted"] is False


def test_the_time_to_the_first_step_has_no_gap_and_a_resumed_run_counts_what_was_lost(tiny_config, run, straight,
                                                                                      capfd):
    run = dataclasses.replace(run, eval_period=4, checkpoint_period=4, log_period=3)

    def fail(step, batches):
        if step == 5:
            raise OSError("The disk is full.")

    trainer = Trainer(SwitchTransformer(tiny_config), Adafactor(0.01), run)
    started = time.perf_counter()
    with pytest.raises(OSError, match="disk is full"), trainer.start() as training:
        training.advance(1)
        elapsed = time.perf_counter() - started
        training.advance(4)
        time.sleep(5)  # the turn of another run
        training.advance(6, look_at=fail)
    lines = _lines(run)
    (evaluated, first), rest = lines[:2], lines[2:]
    assert evaluated.keys() >= {"eval/sentences/loss"} and not any(name.startswith("seconds/") for name in evaluated)
    causes = {"seconds/evaluate", "seconds/compile", "seconds/start/build", "seconds/start/data",
              "seconds/start/first_step"}
    assert causes < first.keys() <= causes | {"step", "seconds/input", "seconds/start/restore"}
    assert first["step"] == 0 and sum(first.values()) == pytest.approx(elapsed, abs=0.1)
    told = re.search(r"First step after ([\d.]+) s: compile [\d.]+, .*build [\d.]+.*\.\n", capfd.readouterr().err)
    assert float(told[1]) == pytest.approx(elapsed, abs=0.2)
    assert [line["step"] for line in rest] == [3, 4, 4]
    for line, name in zip(rest, ("train/loss", "seconds/steps", "eval/sentences/loss"), strict=True):
        assert name in line
    assert "seconds/steps" in rest[0] and "seconds/evaluate" in rest[2]
    assert sum(line[name] for line in rest for name in line if name.startswith("seconds/")) < 5

    lines.append({"step": 6, "seconds/steps": 8.0, "seconds/input": 1.0})
    (pathlib.Path(run.model_dir) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with _start(tiny_config, run) as training:
        assert training.state.step == 4
    assert _lines(run) == [*lines[:-1], {"step": 4, "seconds/redone": 9.0}]


def _start(config, run):
    return Trainer(SwitchTransformer(config), Adafactor(0.01), run).start()


def _losses(run):
    return [(line["step"], line["train/loss"]) for line in _lines(run) if "train/loss" in line]


def _evaluated(run):
    return [line for line in _lines(run) if "eval/sentences/loss" in line]


@pytest.mark.slow  # loop_test.py stops one, resume_test.py goes on
def test_a_run_that_is_told_to_stop_logs_and_saves_and_the_next_start_goes_on_in_turns(tiny_config, run, straight,
                                                                                        capfd):
    with _start(tiny_config, run) as training:
        training.advance(6, lambda: "SIGTERM" if training.state.step == 3 else None)
        summary = training.finish()
    assert summary["interrupted"] is True and summary["step"] == 3
    assert "Stopped by SIGTERM at step 3." in capfd.readouterr().err
    assert folders.steps(folders.checkpoints_of(run.model_dir))[-1] == 3
    assert [step for step, _ in _losses(run)] == [2, 3]
    with _start(tiny_config, run) as training:
        for step in (4, 4, 6):
            training.advance(step)
            assert training.state.step == step
        summary = training.finish()
    assert summary["step"] == 6 and summary["interrupted"] is False
    # The line of step 3 was a mean over a part of what the line of step 4 is one over.
    assert _losses(run) == _losses(straight[0])
    # The evaluation of step 3 was stopped, and made at the next start.
    held_out, expected = ({line["step"]: line["eval/sentences/loss"] for line in _evaluated(one)}
                          for one in (run, straight[0]))
    assert held_out == expected


@pytest.mark.slow
def test_a_signal_while_a_batch_is_awaited_saves_the_step_that_was_reached(tiny_config, run, straight, monkeypatch,
                                                                           capfd):
    monkeypatch.setattr(stopping, "GRACE", 0.2)
    is_awaited, never = threading.Event(), threading.Event()

    def read():
        is_awaited.set()
        never.wait()

    with _start(tiny_config, run) as training:
        training.advance(3)
        training.state.batches._read = read
        training.advance(6, lambda: "SIGTERM" if is_awaited.is_set() else None)
        summary = training.finish()
        never.set()
    assert summary["interrupted"] is True and summary["step"] == 3
    assert "The batch after step 3 did not come within 0.2 s after the signal" in capfd.readouterr().err
    _train(tiny_config, run)
    assert _losses(run) == _losses(straight[0])


@pytest.mark.parametrize("best_metric", [None, pytest.param("eval/sentences/loss", marks=pytest.mark.slow)])
def test_a_reason_to_stop_ends_an_evaluation_after_the_save(tiny_config, run, straight, capfd, best_metric):
    """At step 6 a checkpoint and an evaluation are due; at step 3 an evaluation alone, which is stopped twice."""
    run = dataclasses.replace(run, best_metric=best_metric)
    checkpoints = folders.checkpoints_of(run.model_dir)
    for start, stopped_at in ((0, 3), (3, 3), (3, 6)):
        with _start(tiny_config, run) as training:
            evaluator = training._make_evaluator()
            training._evaluator, measure, reasons = evaluator, evaluator.run, []

            def stop_at(advance, has_records, training=training, measure=measure, reasons=reasons, step=stopped_at,
                        is_saved=stopped_at in (start, 6)):
                if training.state.step == step:
                    saved = [*folders.steps(checkpoints), getattr(training.state.checkpointer._under_way, "step", None)]
                    assert (step in saved) == is_saved
                    reasons.append("SIGTERM")
                return measure(advance, has_records)

            evaluator.run = stop_at
            training.advance(6, lambda reasons=reasons: reasons[0] if reasons else None)
            summary = training.finish()
        assert summary["interrupted"] is True and summary["step"] == stopped_at
        assert folders.steps(checkpoints)[-1] == stopped_at
        is_left_out = start == stopped_at and best_metric is None
        assert (f"The evaluation of step {stopped_at} is " + ("left out." if is_left_out else
                                                              "made at the next start.")) in capfd.readouterr().err
    _train(tiny_config, run)
    assert _losses(run) == _losses(straight[0])
    assert [(line["step"], line["eval/sentences/loss"]) for line in _evaluated(run)] == [
        (line["step"], line["eval/sentences/loss"]) for line in _evaluated(straight[0])
        if line["step"] != 3 or best_metric]


def test_a_thread_saves_a_run_that_evaluates_but_not_one_in_a_step(tiny_config, run, straight, monkeypatch):
    run, told = dataclasses.replace(run, checkpoint_period=6), []

    def rescue():
        rescuing = threading.Thread(target=lambda: told.append(training.rescue("SIGTERM")))
        rescuing.start()
        rescuing.join()

    def evaluate(go_on):
        rescue()
        training._changing = threading.RLock()  # the other one is held until the process ends

    with _start(tiny_config, run) as training:
        assert training.last_save() == "Nothing was saved since the start at step 0."
        monkeypatch.setattr(training, "_log", rescue)
        training.advance(2)
        assert told == [None]
        monkeypatch.undo()
        monkeypatch.setattr(training, "_validate", evaluate)
        training.advance(3)
    assert "at step 3, in an evaluation or compilation that did not end in time. Everything up to it is saved" in (
        told[1])
    assert re.fullmatch(r"The last save is of step 3, at \d\d:\d\d:\d\d\.", training.last_save())
    assert run_folder.end_of(pathlib.Path(run.model_dir)) == "stopped by SIGTERM"


def test_a_requested_save_and_a_limit_of_hours(tiny_config, run, straight, capfd):
    run = dataclasses.replace(run, checkpoint_period=6, eval_period=0, max_hours=1e-9)
    with _start(tiny_config, run) as training:
        training.advance(6)
        assert training.state.step == 0 and training.finish()["interrupted"] is True
    assert "Stopped by Run.max_hours (1e-09) at step 0." in capfd.readouterr().err
    run = dataclasses.replace(run, max_hours=1.0)
    with _start(tiny_config, run) as training:
        training.advance(6, look_at=lambda step, batches: training.request_save() if step == 2 else None)
        training.finish()
    assert folders.steps(folders.checkpoints_of(run.model_dir)) == [0, 3, 6]
    assert _losses(run) == _losses(straight[0])


def test_a_bucket_that_denies_the_report_leaves_a_finished_run_finished_and_any_earlier_access_is_an_outage(
        tiny_config, finished, monkeypatch, capfd):
    def deny(*arguments):
        raise places.BucketError(13, "HTTP response code 403", "gs://b/metrics.jsonl")

    with monkeypatch.context() as patch:
        for name in ("write", "read_metrics"):
            patch.setattr(report, name, deny)
        _, summary = _train(tiny_config, finished)
    assert (summary["step"], summary["interrupted"]) == (6, False)
    assert capfd.readouterr().err.count("403: 'gs://b/metrics.jsonl'. What is saved stays, and the same command") == 2
    with pytest.raises(Outage, match="gs://b/metrics.jsonl cannot be reached .*403.*Nothing was saved since the start "
                                     "at step 6. The same command goes on from there"), \
            _start(tiny_config, finished):
        deny()


@pytest.mark.slow
def test_the_last_step_is_logged_and_told_whatever_the_log_period(tiny_config, run):
    dense = dataclasses.replace(tiny_config, num_experts=0)
    run = dataclasses.replace(run, train_steps=3, log_period=50, eval_period=0)
    for _ in range(2):  # the second time there is nothing to do, and nothing is lost
        _, summary = _train(dense, run)
        assert summary["step"] == 3
        assert [step for step, _ in _losses(run)] == [3]
    _, summary = _train(dense, dataclasses.replace(run, train_steps=4))
    assert summary["step"] == 4
    assert [step for step, _ in _losses(run)] == [4]


def test_steps_go_on_while_a_checkpoint_is_written_and_one_that_fails_ends_the_run(tiny_config, run, straight,
                                                                                   monkeypatch):
    run, write, saved = dataclasses.replace(run, eval_period=0), bundles.write, []
    with monkeypatch.context() as patch, _start(tiny_config, run) as training:

        def slow(*args):
            saved.append(2 * len(saved) + 2)
            due = time.monotonic() + 60
            while training.state.step <= saved[-1]:
                assert time.monotonic() < due
                time.sleep(0.01)
            if saved[-1] == 4:
                raise OSError(28, "No space left on device")
            return write(*args)

        patch.setattr(bundles, "write", slow)
        with pytest.raises(Refusal, match="The checkpoint of step 4 could not be written to .*No space left on device"):
            training.advance(6)
    assert saved == [2, 4] and training.state.step == 6
    assert os.listdir(folders.checkpoints_of(run.model_dir)) == ["step_00000002"]
    assert "TRAIN_STEPS" not in run_folder.end_of(pathlib.Path(run.model_dir))
    assert _losses(run) == _losses(straight[0])
    with _start(tiny_config, run) as training:
        assert training.state.step == 2


def test_a_run_goes_on_after_checkpoints_that_failed_but_not_after_the_last_one(tiny_config, run, straight, monkeypatch,
                                                                               capfd):
    """Steps 2 (in the thread) and 3 (the best one, before it) cannot be saved, nor can the last one (before it)."""
    run = dataclasses.replace(run, on_failed_save="continue", best_metric="eval/sentences/loss")
    write, make_empty = bundles.write, checkpointer.make_empty

    def failing_write(place, *args):
        if place.parent.name == "tmp.step_00000002":
            raise OSError(28, "No space left on device")
        return write(place, *args)

    def failing_make(final, *args):
        if final.name == "step_00000003":
            raise places.BucketError(5, "The bucket does not answer")
        if final.name == "step_00000006":
            raise OSError(28, "No space left on device")
        make_empty(final, *args)

    with monkeypatch.context() as patch:
        patch.setattr(bundles, "write", failing_write)
        patch.setattr(checkpointer, "make_empty", failing_make)
        with pytest.raises(FailedSave, match="step 6 .*No space left.* start the same command again") as raised, \
                _start(tiny_config, run) as training:
            training.advance(6)
            training.finish()
    assert raised.value.exit_status == statuses.OUTAGE
    told = capfd.readouterr().err
    for step, reason in ((2, r"\[Errno 28\] No space left on device"), (3, r"\[Errno 5\] The bucket does not answer")):
        assert re.search(rf"checkpoint of step {step} could not be written to .*/checkpoints \({reason}\); the older "
                         r"ones are as they were\. Training goes on, since Run\.on_failed_save is 'continue'\.", told)
    checkpoints = folders.checkpoints_of(run.model_dir)
    assert folders.steps(checkpoints) == [0, 4] and folders.best(checkpoints)["step"] == 0
    assert _losses(run) == _losses(straight[0])


@pytest.mark.slow
def test_a_broken_checkpoint_is_passed_over_for_the_one_before_it(tiny_config, finished, capfd):
    newest = folders.path_of(folders.checkpoints_of(finished.model_dir), 6)
    (newest / "state.index").unlink()
    before = [line["train/loss"] for line in _lines(finished) if "train/loss" in line]
    with _start(tiny_config, finished) as training:
        assert training.state.step == 4
        assert "state.index should have" in capfd.readouterr().err
        training.advance(6)
        training.finish()
    # the step whose checkpoint was broken is saved again, and its remains are kept beside it
    folders.describe(newest)
    assert newest.with_name("broken.step_00000006").is_dir()
    assert [line["train/loss"] for line in _lines(finished) if "train/loss" in line] == before


def test_a_run_that_goes_on_finds_its_best_and_leaves_foreign_things_alone(tiny_config, finished):
    """A real run's folder with leftovers of a kill and odd files of users."""
    folder = pathlib.Path(finished.model_dir)
    (folder / "checkpoints" / "tmp.step_00000008" / "state_temp").mkdir(parents=True)
    (folder / "checkpoints" / "best.json").write_text('{"step": 2, "metric": "eval/sentences/loss", "value": NaN}')
    (folder / "checkpoints" / "step_00000099").write_text("mine")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\xff\xff", *lines[1:], b'{"step": 6, "ev']))
    run = dataclasses.replace(finished, best_metric="eval/sentences/loss")
    losses = {line["step"]: line["eval/sentences/loss"] for line in map(json.loads, lines)
              if "eval/sentences/loss" in line}
    with _start(tiny_config, run) as training:
        assert training._best.current == {"step": 6, "metric": "eval/sentences/loss", "value": losses[6]}
        assert run_folder.end_of(folder) is None
    assert folders.best(folder / "checkpoints")["step"] == 6
    assert (folder / "checkpoints" / "step_00000099").read_text() == "mine"
    assert not (folder / "checkpoints" / "tmp.step_00000008").exists()
    assert (folder / "metrics.jsonl").read_bytes().splitlines() == lines
    assert run_folder.end_of(folder) == "its program closed it"


def test_an_odd_description_is_a_damaged_checkpoint_and_the_one_before_it_is_used(tiny_config, finished, capfd):
    path = folders.path_of(folders.checkpoints_of(finished.model_dir), 6)
    description = json.loads((path / "checkpoint.json").read_text())
    description |= {"pending_metrics": {"batch": 5}, "sha256": None}
    (path / "checkpoint.json").write_text(json.dumps(description))
    with _start(tiny_config, finished) as training:
        assert training.state.step == 4
    assert "'pending_metrics' is damaged" in capfd.readouterr().err
    assert path.with_name("broken.step_00000006").is_dir()


def test_a_run_whose_folder_is_removed_ends_with_an_error_and_leaves_nothing(tiny_config, finished):
    message = "was removed or replaced while this process was training in it"
    with _start(tiny_config, finished) as training, pytest.raises(Refusal, match=message):
        shutil.rmtree(finished.model_dir)
        training.finish()
    assert not os.path.exists(finished.model_dir)


def test_an_error_after_a_signal_is_why_a_run_ended(tiny_config, finished):
    with pytest.raises(OSError, match="disk is full"), _start(tiny_config, finished) as training:
        training._requests.stopped_by = "SIGTERM"
        raise OSError("The disk is full.")
    assert run_folder.end_of(pathlib.Path(finished.model_dir)) == "The disk is full."


def test_where_no_checkpoint_can_be_read_the_run_is_refused_again_and_again(tiny_config, finished):
    folder = folders.checkpoints_of(finished.model_dir)
    for step in folders.steps(folder):
        (folders.path_of(folder, step) / "state.index").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match="No checkpoint in .* can be read; restore it from a copy"):
            _start(tiny_config, finished)


@pytest.mark.parametrize(("model", "changes", "settings", "message"), [
    ({"d_ff": 64}, {}, {}, r"step_00000006 is of another model or optimizer: SwitchConfig.d_ff was 32 and is 64\. "),
    ({}, {"batch_size": 8}, {}, "stands in other data: BATCH_SIZE was 4 and is 8. .*restart_changed_data=True"),
    ({}, {"train_steps": 8}, {"steps_per_call": 2}, "StepSettings.steps_per_call was 1 and is 2"),
])
def test_another_configuration_is_refused_before_anything_is_built_or_written(tiny_config, finished, model, changes,
                                                                             settings, message):
    config = dataclasses.replace(tiny_config, **model)
    changes = {"eval_period": 2, **changes}
    before = sorted(os.walk(finished.model_dir))
    with pytest.raises(ValueError, match=message):
        Trainer(SwitchTransformer(config), Adafactor(0.01), dataclasses.replace(finished, **changes),
                StepSettings(**settings))
    assert sorted(os.walk(finished.model_dir)) == before
    with open(os.path.join(finished.model_dir, "operative_config.gin")) as file:
        assert file.read() == "# resolved"


def test_what_may_change_is_told_and_changed_data_start_anew_where_that_is_asked_for(tiny_config, finished, capfd):
    changed = dataclasses.replace(finished, batch_size=8, seed=1, train_steps=4, eval_period=0,
                                  restart_changed_data=True)
    with Trainer(SwitchTransformer(tiny_config), Adafactor(0.5), changed).start("# new") as training:
        assert training.state.step == 6
        assert float(training.state.optimizer.learning_rate) == 0.5
        # The saved position holds batches of 4 that were read ahead, and reading on from there would fail.
        assert next(training.state.batches)["decoder_target_tokens"].shape == (1, 8, 16)
    said = capfd.readouterr().err
    assert "The data are others, so they are read from their beginning: BATCH_SIZE was 4 and is 8." in said
    for change in ("TRAIN_STEPS was 6 and is 4", "SEED was 0 and is 1", "Adafactor.learning_rate was 0.01 and is 0.5"):
        assert change in said
    assert "This run is at step 6 already and TRAIN_STEPS is 4, so nothing is left to train" in said
    with open(os.path.join(finished.model_dir, "operative_config.gin")) as file:
        assert file.read() == "# new"


def test_a_new_run_starts_from_the_weights_of_another(tiny_config, straight, tmp_path, caplog):
    run, trainer, _ = straight
    tuned = dataclasses.replace(run, model_dir=str(tmp_path / "tuned"), initial_checkpoint=run.model_dir)
    with _start(tiny_config, tuned) as second:
        assert second.state.step == 0
        for first, other in zip(trainer.model.variables, second.state.model.variables, strict=True):
            np.testing.assert_array_equal(first.numpy(), other.numpy())
    assert "could not be found in the restored object" not in caplog.text


@pytest.mark.parametrize("changes, step", [
    ({}, 6), ({"initial_variables": "all"}, 0), ({"initial_variables": "with_optimizer"}, 6)])
def test_a_run_from_a_checkpoint_draws_no_weights(tiny_config, finished, tmp_path, monkeypatch, changes, step):
    def draw(*_):
        raise AssertionError("a checkpoint replaces all weights")

    monkeypatch.setattr(random.RandomByPosition, "_draw", draw)
    if changes:
        changes = {**changes, "initial_checkpoint": finished.model_dir, "model_dir": str(tmp_path / "new")}
    with _start(tiny_config, dataclasses.replace(finished, train_steps=7, **changes)) as training:
        assert training.state.step == step and training.state.model.encoder.layers[0].mlp.router.kernel.numpy().any()


def test_the_next_call_starts_before_results_are_fetched_and_a_bad_step_ends_those_under_way(
        tiny_config, run, straight, monkeypatch):
    monkeypatch.setattr(Partitioner, "is_asynchronous", True)
    happened, start = [], train_step.Steps.start

    def starting(steps, *arguments):
        number, results = sum(kind == "call" for kind, _ in happened) + 1, start(steps, *arguments)
        happened.append(("call", number))
        return lambda: happened.append(("results", number)) or results()

    monkeypatch.setattr(train_step.Steps, "start", starting)
    with _start(tiny_config, dataclasses.replace(run, train_steps=9)) as training, pytest.raises(
            train_step.Divergence, match=r"step 7 is not finite; .* is the weight decoder/.*step_00000006"):
        training.advance(6)
        # Steps 2, 3, 4 and 6 end before they are saved or evaluated.
        assert happened == [("call", 1), ("call", 2), ("results", 1), ("results", 2), ("call", 3), ("results", 3),
                            ("call", 4), ("results", 4), ("call", 5), ("call", 6), ("results", 5), ("results", 6)]
        assert _losses(run) == _losses(straight[0])
        kernel = training.state.model.decoder.layers[0].mlp.router.kernel
        kernel.assign(np.full((16, 4), np.inf))
        training.advance(9)
    assert happened[12:] == [("call", 7), ("call", 8), ("results", 7)]
    assert int(training.state.optimizer.iterations) == training.state.step == 6
    assert folders.steps(folders.checkpoints_of(run.model_dir)) == [2, 4, 6]


@pytest.mark.slow
def test_divergence_names_the_step_and_the_tensor_and_keeps_the_last_good_checkpoint(tiny_config, run):
    message = ("gradient of step 5 is not finite; the first bad tensor is the weight "
               "decoder/layers_0/mlp/router/kernel.*step_00000004")
    with _start(tiny_config, run) as training, pytest.raises(train_step.Divergence, match=message):
        training.advance(4)
        training.state.model.decoder.layers[0].mlp.router.kernel.assign(np.full((16, 4), np.inf))
        training.advance(6)
    assert folders.steps(folders.checkpoints_of(run.model_dir)) == [2, 4]


@pytest.mark.slow
def test_microbatches_several_steps_a_call_packing_and_adam_train_too(tiny_config, run):
    settings = StepSettings(num_microbatches=2, steps_per_call=3, clip_norm=1.0)
    periods = {"log_period": 3, "eval_period": 6, "checkpoint_period": 6, "pack": True}
    _, summary = _train(tiny_config, dataclasses.replace(run, **periods), settings, keras.optimizers.Adam(0.01))
    assert summary["eval/sentences/loss"]["last"] < summary["eval/sentences/loss"]["first"]


@pytest.mark.parametrize(("changes", "settings", "message"), [
    ({"batch_size": 6}, {"num_microbatches": 4},
     r"BATCH_SIZE must be a multiple of 4 \(4 microbatches times 1 device\), not 6"),
    ({"log_period": 5}, {"steps_per_call": 2}, "LOG_PERIOD must be a multiple of steps_per_call"),
    ({"mixture_or_task_name": "sentencs"}, {}, "sentences"),
    ({"task_feature_lengths": {"inputs": 32}}, {}, "TASK_FEATURE_LENGTHS must give the tokens of"),
    ({"best_metric": "eval/sentence/loss", "eval_period": 2}, {},
     "BEST_METRIC must be of a task .* sentences, not 'eval/sentence/loss'. Did you mean 'eval/sentences/loss'"),
    ({"initial_checkpoint": "nowhere"}, {}, "INITIAL_CHECKPOINT must name a run folder"),
])
def test_what_cannot_work_is_refused_before_anything_is_written(tiny_config, run, changes, settings, message):
    with pytest.raises(ValueError, match=message):
        Trainer(SwitchTransformer(tiny_config), Adafactor(), dataclasses.replace(run, **changes),
                StepSettings(**settings))
    assert not os.path.exists(run.model_dir)


@pytest.mark.parametrize("optimizer", [
    Adafactor(0.01, loss_scale_factor=8.0), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))])
def test_an_optimizer_that_expects_scaled_losses_is_refused(optimizer, tiny_config, run):
    with pytest.raises(Refusal, match=f"scales no loss, .* as this {type(optimizer).__name__} has"):
        Trainer(SwitchTransformer(tiny_config), optimizer, run)


def test_a_batch_without_groups_is_refused_with_the_nearest_batches(tiny_config, run):
    config = dataclasses.replace(tiny_config, num_groups_multiple=64)
    message = (r"No number of groups that is a multiple of 64 divides 96 tokens \(3 sequences of 32\) .* "
               "Use a batch of 2 or 4 sequences, or num_groups_multiple=32")
    with pytest.raises(ValueError, match=message):
        Trainer(SwitchTransformer(config), Adafactor(), dataclasses.replace(run, batch_size=3))


def test_a_vocabulary_that_does_not_fit_is_refused(tiny_config, run):
    with pytest.raises(ValueError, match="vocab"):
        Trainer(SwitchTransformer(dataclasses.replace(tiny_config, vocab_size=100)), Adafactor(), run)


@pytest.mark.parametrize("goes_on", [True, False])
def test_another_vocabulary_than_the_runs_is_refused_by_names_that_can_be_typed(
        tiny_config, finished, monkeypatch, goes_on):
    import seqio

    short = seqio.ByteVocabulary(extra_ids=3)
    monkeypatch.setitem(names.vocabularies(), "short_bytes", lambda: short)
    run = dataclasses.replace(finished, vocabulary="short_bytes")
    if not goes_on:
        run = dataclasses.replace(run, model_dir=f"{finished.model_dir}_new", initial_checkpoint=finished.model_dir)
    with pytest.raises(ValueError, match=r"VOCABULARY was 'bytes' \(ByteVocabulary of 259 ids\) and is 'short_bytes' "
                                         r"\(ByteVocabulary of 262 ids\)"):
        Trainer(SwitchTransformer(tiny_config), Adafactor(0.01), run)


def test_a_run_keeps_itself_as_data_and_one_of_an_older_version_does_when_it_goes_on(tiny_config, finished):
    path = os.path.join(finished.model_dir, "config.json")
    assert run_config.read(pathlib.Path(finished.model_dir)).model == tiny_config
    os.unlink(path)
    with Trainer(SwitchTransformer(tiny_config), Adafactor(0.01), finished).start("# resolved"):
        pass
    assert run_config.read(pathlib.Path(finished.model_dir)).model == tiny_config


def test_what_lies_in_the_way_of_the_data_stops_no_start(tiny_config, run, tmp_path):
    (tmp_path / "run" / "config.json").mkdir(parents=True)
    lines = []
    trainer.keep_config(pathlib.Path(run.model_dir), SwitchTransformer(tiny_config), run, None, lines.append)
    assert len(lines) == 1 and "keeps no config.json of the run (" in lines[0]


def test_a_run_in_a_hugging_face_folder_leaves_its_config_json_alone(tiny_config, run):
    path, lines = pathlib.Path(run.model_dir) / "config.json", []
    (path.parent / "checkpoints").mkdir(parents=True)
    for theirs in ('{"model_type": "t5"}', '{"learning_rate": 0.1}', "[]"):
        path.write_text(theirs)
        trainer.keep_config(pathlib.Path(run.model_dir), SwitchTransformer(tiny_config), run, None, lines.append)
        model = SwitchTransformer(tiny_config, dtype="mixed_float16")
        trainer.keep_config(pathlib.Path(run.model_dir), model, run, None, lines.append)
        assert path.read_text() == theirs and not run_config.is_in(pathlib.Path(run.model_dir))
    assert len(lines) == 6 and all("the one there is not a run's, and stays" in line for line in lines)
    path.write_text("{")  # damaged, so it may have been a run's
    trainer.keep_config(pathlib.Path(run.model_dir), SwitchTransformer(tiny_config), run, None, lines.append)
    assert run_config.read(pathlib.Path(run.model_dir)).model == tiny_config and len(lines) == 6


@pytest.mark.slow
def test_each_task_of_a_mixture_is_evaluated_by_itself_where_that_is_asked_for(run, tiny_config, sentences_task):
    import seqio

    task = seqio.TaskRegistry.get(sentences_task)
    other = "backward_sentences"
    seqio.TaskRegistry.add(other, source=task.source, output_features=task.output_features, preprocessors=[
        lambda dataset: dataset.map(lambda example: {"inputs": example["targets"], "targets": example["inputs"]}),
        *task.preprocessors])
    seqio.MixtureRegistry.add("both_ways", [(sentences_task, 1), (other, 1)])
    run = dataclasses.replace(run, mixture_or_task_name="both_ways", train_steps=1, eval_period=1, eval_batches=50,
                              eval_each_task=True)
    _train(tiny_config, run)
    last = {name: value for line in _lines(run) if line["step"] == 1 for name, value in line.items()}
    both, one, two = (last[f"eval/{name}/loss"] for name in ("both_ways", sentences_task, other))
    assert one != two and min(one, two) < both < max(one, two)
