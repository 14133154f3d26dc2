"""Factories have the parameters and defaults of what they make, which gin shows, checks and writes down."""

import importlib
import inspect

import keras
import pytest

from switch_tf.configs import factories


@pytest.mark.parametrize("name", factories.MODULES)
def test_a_factory_has_the_parameters_of_what_it_makes(name):
    made = getattr(importlib.import_module(factories.MODULES[name]), name)
    expected = _defaults(made)
    if expected.pop("kwargs", None) and name == "Adafactor":
        base = next(kind for kind in keras.optimizers.Optimizer.__mro__ if kind.__name__ == "BaseOptimizer")
        inherited = _defaults(base.__init__)
        del inherited["self"], inherited["kwargs"]
        expected = inherited | expected
    assert _defaults(getattr(factories, name)) == expected


def _defaults(function):
    return {name: parameter.default if parameter.kind is not inspect.Parameter.VAR_KEYWORD else True
            for name, parameter in inspect.signature(function).parameters.items()}


def test_a_factory_makes_its_part():
    optimizer = factories.Adafactor(factories.Cooldown(factories.RsqrtDecay(warmup_steps=4), last_step=8), clipnorm=1.0)
    assert optimizer.clipnorm == 1.0 and float(optimizer._learning_rate(8)) == 0.0
    assert factories.dtype_policy("float32") == "float32"
