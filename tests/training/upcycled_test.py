"""A run starts from an upcycled model, and gradients reach all of its experts."""

import dataclasses

import numpy as np
import pytest

from switch_tf import SwitchTransformer, conversion, data
from switch_tf.configs.run import Run
from switch_tf.optim.adafactor import Adafactor
from switch_tf.reporting import report
from switch_tf.surgery import upcycling
from switch_tf.surgery.kernels import Changes
from switch_tf.training.trainer import Trainer


@pytest.mark.slow  # upcycling_test.py compares the weights, trainer_test.py starts from another's
def test_every_expert_of_an_upcycled_model_is_trained(shallow_config, sentences_task, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write", lambda folder: None)
    monkeypatch.setattr(data, "check_examples", lambda description: None)
    config = dataclasses.replace(shallow_config, dropout_rate=0.0, expert_dropout_rate=0.0)
    dense = SwitchTransformer(dataclasses.replace(config, num_experts=0))
    dense.build()
    upcycled = upcycling.upcycle(dense, config, Changes())
    conversion.to_switch_tf(upcycled, tmp_path / "upcycled")
    run = Run(model_dir=str(tmp_path / "run"), mixture_or_task_name=sentences_task,
              task_feature_lengths={"inputs": 32, "targets": 16}, train_steps=2, batch_size=8, log_period=2,
              eval_period=0, checkpoint_period=2, initial_checkpoint=str(tmp_path / "upcycled"))
    trainer = Trainer(SwitchTransformer(config), Adafactor(0.01), run)
    with trainer.start() as training:
        for trained, initial in zip(trainer.model.variables, upcycled.variables, strict=True):
            np.testing.assert_array_equal(trained.numpy(), initial.numpy())
        assert training.state.step == 0
        training.advance(2)
    for stack in ("encoder", "decoder"):
        trained, initial = (getattr(model, stack).layers[0].mlp for model in (trainer.model, upcycled))
        for one, other in zip((*trained.experts.input_kernels, trained.experts.wo),
                              (*initial.experts.input_kernels, initial.experts.wo), strict=True):
            assert (np.abs(one.numpy() - other.numpy()).max(axis=(1, 2)) > 0).tolist() == [True] * 4
        assert not np.array_equal(trained.router.kernel.numpy(), initial.router.kernel.numpy())
        # Copies of one kernel, that saw different tokens.
        assert not np.allclose(trained.experts.wo.numpy()[0], trained.experts.wo.numpy()[1], atol=1e-7)
