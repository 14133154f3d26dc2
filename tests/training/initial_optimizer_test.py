"""A new run goes on from the weights, the slots and the step of a checkpoint (`Run.initial_variables`)."""

import dataclasses
import pathlib

import keras
import numpy as np
import pytest

from switch_tf import SwitchTransformer, conversion, data
from switch_tf.checkpoints import folders, tensors
from switch_tf.configs.run import Run
from switch_tf.optim.adafactor import Adafactor
from switch_tf.refusals import Refusal
from switch_tf.reporting import report
from switch_tf.training.trainer import Trainer


@pytest.fixture(name="run")
def run_fixture(shallow_config, sentences_task, tmp_path, monkeypatch):
    """A run that starts from a checkpoint of step 5 with random slots, and what the checkpoint holds."""
    monkeypatch.setattr(report, "write", lambda folder: None)
    monkeypatch.setattr(data, "check_examples", lambda description: None)
    model, optimizer, random = SwitchTransformer(shallow_config), Adafactor(), np.random.RandomState(0)
    model.build()
    optimizer.build(model.trainable_variables)
    for variable in model.trainable_variables:
        for slot in optimizer.slots_of(variable).values():
            slot.assign(random.rand(*slot.shape))
    optimizer.iterations.assign(5)
    conversion.to_switch_tf(model, tmp_path / "initial", optimizer=optimizer)
    run = Run(model_dir=str(tmp_path / "run"), mixture_or_task_name=sentences_task,
              task_feature_lengths={"inputs": 32, "targets": 16}, train_steps=6, batch_size=8, log_period=1,
              eval_period=0, checkpoint_period=2, initial_checkpoint=str(tmp_path / "initial"),
              initial_variables="with_optimizer")
    return run, {path: variable.numpy() for path, variable in tensors.state_variables(model, optimizer).items()}


@pytest.mark.slow
def test_the_run_has_the_weights_the_slots_and_the_step(shallow_config, run, capfd):
    run, initial = run
    trainer = Trainer(SwitchTransformer(shallow_config), Adafactor(0.01), run)
    with trainer.start() as training:
        assert training.state.step == 5
        for path, variable in tensors.state_variables(trainer.model, trainer.optimizer).items():
            np.testing.assert_array_equal(variable.numpy(), initial[path], err_msg=path)
        training.advance(6)
        training.finish()
    assert trainer.optimizer.iterations.numpy() == 6
    assert (f"Starting from the weights and the optimizer of {run.initial_checkpoint}, step 5, with the data from "
            "their beginning.") in capfd.readouterr().err
    assert folders.steps(pathlib.Path(run.model_dir) / "checkpoints") == [6]
    # It resumes like any other run.
    with Trainer(SwitchTransformer(shallow_config), Adafactor(0.01), dataclasses.replace(run, train_steps=8)).start(
            ) as training:
        assert training.state.step == 6


def test_a_run_by_default_takes_the_weights_alone(shallow_config, run):
    run, initial = run
    trainer = Trainer(SwitchTransformer(shallow_config), Adafactor(0.01), dataclasses.replace(
        run, initial_variables="all"))
    with trainer.start() as training:
        assert training.state.step == 0 and trainer.optimizer.iterations.numpy() == 0
        np.testing.assert_array_equal(trainer.model.token_embedder.embedding.numpy(),
                                      initial["model/token_embedder/embedding"])
        slots = trainer.optimizer.slots_of(trainer.model.token_embedder.embedding)
        assert not slots["v_row"].numpy().any()


@pytest.mark.parametrize(("optimizer", "changes", "message"), [
    (lambda: keras.optimizers.Adam(0.01), {}, "another model: optimizer was 'Adafactor' and is 'Adam'"),
    (Adafactor, {"train_steps": 5}, "is at step 5 and TRAIN_STEPS is 5, the last step of the run; give a larger")])
def test_other_runs_are_refused(optimizer, changes, message, shallow_config, run):
    with pytest.raises(Refusal) as error:
        Trainer(SwitchTransformer(shallow_config), optimizer(), dataclasses.replace(run[0], **changes))
    assert message in str(error.value)


@pytest.mark.parametrize("optimizer", [3, Adafactor(), keras.optimizers.Adam()])
def test_other_optimizers_are_not_written(optimizer, shallow_config, tmp_path):
    with pytest.raises(Refusal, match="optimizer must be an Adafactor that is built for the model, or None, not "):
        conversion.to_switch_tf(SwitchTransformer(shallow_config), tmp_path / "out", optimizer=optimizer)
    assert not (tmp_path / "out").exists()


def test_weights_alone_are_refused(shallow_config, run, tmp_path):
    model = SwitchTransformer(shallow_config)
    conversion.to_switch_tf(model, tmp_path / "weights")
    run = dataclasses.replace(run[0], initial_checkpoint=str(tmp_path / "weights"))
    with pytest.raises(Refusal, match="holds weights alone; convert them anew with --with_optimizer, or leave"):
        Trainer(SwitchTransformer(shallow_config), Adafactor(), run)
