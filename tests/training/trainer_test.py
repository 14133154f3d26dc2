import dataclasses
import json
import os
import shutil
import signal

import keras
import numpy as np
import pytest

from switch_tf import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.training import checkpoints, diagnosis
from switch_tf.training.run import Run, StepSettings
from switch_tf.training.trainer import Trainer


@pytest.fixture(scope="module")
def tiny_config(tiny_config):
    """One layer each, sparse: these tests trace many steps."""
    return dataclasses.replace(tiny_config, num_encoder_layers=1, num_decoder_layers=1, encoder_sparse_step=1,
                               decoder_sparse_step=1)


def _describe(folder, task):
    return Run(model_dir=str(folder / "run"), mixture_or_task_name=task,
               task_feature_lengths={"inputs": 32, "targets": 16}, train_steps=6, batch_size=4, log_period=2,
               eval_period=3, checkpoint_period=2, eval_batches=2)


@pytest.fixture
def run(sentences_task, tmp_path):
    return _describe(tmp_path, sentences_task)


@pytest.fixture(scope="module")
def straight(tiny_config, sentences_task, tmp_path_factory):
    """A run from beginning to end, to be looked at: `(run, trainer, summary)`."""
    run = dataclasses.replace(_describe(tmp_path_factory.mktemp("straight"), sentences_task), unigram_batches=3)
    return run, *_train(tiny_config, run)


@pytest.fixture
def finished(run, straight):
    """A copy of it, to be changed."""
    shutil.copytree(straight[0].model_dir, run.model_dir)
    return run


def _train(config, run, settings=None, optimizer=None):
    trainer = Trainer(SwitchTransformer(config), optimizer or Adafactor(0.01), run, settings)
    trainer.prepare("# resolved")
    return trainer, trainer.train()


def _lines(run):
    with open(os.path.join(run.model_dir, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def test_a_run_writes_what_the_documentation_promises(straight):
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
    assert set(os.listdir(run.model_dir)) == {"checkpoints", "events", "lock", "loss.png", "metrics.jsonl",
                                              "operative_config.gin", "report.html"}
    assert checkpoints.steps(os.path.join(run.model_dir, "checkpoints")) == [2, 4, 6]
    assert summary["step"] == 6
    assert summary["interrupted"] is False


def test_a_signal_saves_and_the_next_start_goes_on(tiny_config, run, straight, monkeypatch):
    original = Trainer._take_steps

    def take_steps_and_interrupt(self):
        original(self)
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_take_steps", take_steps_and_interrupt)
    _, summary = _train(tiny_config, run)
    assert summary["interrupted"] is True
    assert checkpoints.steps(os.path.join(run.model_dir, "checkpoints"))[-1] == 3
    monkeypatch.setattr(Trainer, "_take_steps", original)
    trainer, summary = _train(tiny_config, run)
    assert trainer.step == 6
    interrupted = [(line["step"], line["train/loss"]) for line in _lines(run) if "train/loss" in line]
    assert interrupted == [(line["step"], line["train/loss"]) for line in _lines(straight[0]) if "train/loss" in line]


def test_a_broken_checkpoint_is_passed_over_for_the_one_before_it(tiny_config, finished, capfd):
    newest = checkpoints.path_of(os.path.join(finished.model_dir, "checkpoints"), 6)
    (newest / "state.index").unlink()
    before = [line["train/loss"] for line in _lines(finished) if "train/loss" in line]
    trainer = Trainer(SwitchTransformer(tiny_config), Adafactor(0.01), finished)
    trainer.prepare()
    assert trainer.step == 4
    assert "state.index should have" in capfd.readouterr().err
    trainer.train()
    # the step whose checkpoint was broken is saved again, and its remains are kept beside it
    checkpoints.describe(newest)
    assert newest.with_name("broken.step_00000006").is_dir()
    assert [line["train/loss"] for line in _lines(finished) if "train/loss" in line] == before


def test_where_no_checkpoint_can_be_read_the_run_is_refused_again_and_again(tiny_config, finished):
    folder = os.path.join(finished.model_dir, "checkpoints")
    for step in checkpoints.steps(folder):
        (checkpoints.path_of(folder, step) / "state.index").unlink()
    for _ in range(2):
        trainer = Trainer(SwitchTransformer(tiny_config), Adafactor(0.01), finished)
        with pytest.raises(ValueError, match="No checkpoint in .* can be read; move the folder away to start anew"):
            trainer.prepare()
        trainer.folder.close()


def test_another_configuration_leaves_the_folder_as_it_was(tiny_config, finished):
    trainer = Trainer(SwitchTransformer(dataclasses.replace(tiny_config, d_ff=64)), Adafactor(0.01), finished)
    with pytest.raises(ValueError, match=r"experts/wi has shape \[4, 16, 32\] in .* but \[4, 16, 64\] in this"):
        trainer.prepare("# another")
    with open(os.path.join(finished.model_dir, "operative_config.gin")) as file:
        assert file.read() == "# resolved"


def test_a_new_run_starts_from_the_weights_of_another(tiny_config, straight, tmp_path, caplog):
    run, trainer, _ = straight
    tuned = dataclasses.replace(run, model_dir=str(tmp_path / "tuned"), initial_checkpoint=run.model_dir)
    second = Trainer(SwitchTransformer(tiny_config), Adafactor(0.01), tuned)
    second.prepare()
    assert second.step == 0
    for first, other in zip(trainer.model.variables, second.model.variables, strict=True):
        np.testing.assert_array_equal(first.numpy(), other.numpy())
    assert "could not be found in the restored object" not in caplog.text


def test_divergence_names_the_step_and_the_tensor_and_keeps_the_last_good_checkpoint(tiny_config, run, monkeypatch):
    original = Trainer._take_steps

    def break_the_router(self):
        if self.step == 4:
            self.model.decoder.layers[0].mlp.router.kernel.assign(np.full((16, 4), np.inf))
        original(self)

    monkeypatch.setattr(Trainer, "_take_steps", break_the_router)
    message = ("gradient of step 5 is not finite; the first bad tensor is the weight "
               "decoder/layers_0/mlp/router/kernel.*step_00000004")
    with pytest.raises(diagnosis.Divergence, match=message):
        _train(tiny_config, run)
    assert checkpoints.steps(os.path.join(run.model_dir, "checkpoints")) == [2, 4]


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
    ({"initial_checkpoint": "nowhere"}, {}, "INITIAL_CHECKPOINT must name a run folder"),
])
def test_what_cannot_work_is_refused_before_anything_is_written(tiny_config, run, changes, settings, message):
    with pytest.raises(ValueError, match=message):
        Trainer(SwitchTransformer(tiny_config), Adafactor(), dataclasses.replace(run, **changes),
                StepSettings(**settings))
    assert not os.path.exists(run.model_dir)


def test_a_batch_without_groups_is_refused_with_the_nearest_batches(tiny_config, run):
    config = dataclasses.replace(tiny_config, num_groups_multiple=64)
    message = (r"No number of groups that is a multiple of 64 divides 96 tokens \(3 sequences of 32\) .* "
               "Use a batch of 2 or 4 sequences, or num_groups_multiple=32")
    with pytest.raises(ValueError, match=message):
        Trainer(SwitchTransformer(config), Adafactor(), dataclasses.replace(run, batch_size=3))


def test_a_vocabulary_that_does_not_fit_is_refused(tiny_config, run):
    with pytest.raises(ValueError, match="vocab"):
        Trainer(SwitchTransformer(dataclasses.replace(tiny_config, vocab_size=100)), Adafactor(), run)


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"log_period": 0}, {"train_steps": 1.5}, {"seed": -1}])
def test_impossible_numbers_are_refused(run, changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=f"{name.upper()} must be an integer of at least"):
        dataclasses.replace(run, **changes)
