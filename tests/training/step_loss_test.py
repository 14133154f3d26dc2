"""The loss that a step returns is the one that its gradients are of; in a model of float64 all of it is float64."""

import keras
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.training import train_step


def test_a_wrong_divisor_in_the_step_shows_in_its_loss_and_float64_goes_through(shallow_config, batch):
    class Wrong(Objective):
        def weights(self, *args):
            weights = super().weights(*args)
            return weights._replace(targets=2 * weights.targets)

    keras.utils.set_random_seed(1)
    model = SwitchTransformer(shallow_config, dtype="float64")
    model.build()
    gradients, measured = train_step.compute_gradients(model, batch, 3, tf.constant(0, tf.int64), StepSettings(),
                                                       objective=Wrong())
    assert {tensor.dtype for tensor in tf.nest.flatten((gradients, measured))} == {tf.float64}
    terms = sum(term.total / term.weight for term in measured.batch.loss_terms.values())
    right = Objective().total(shallow_config, measured.batch)  # which divides by what was measured
    assert float(measured.loss.total) == pytest.approx(float(right - terms / 2), rel=1e-14)
