"""The parts that gin files name before TensorFlow is imported, and how they are made."""

import importlib.util
import inspect
import pathlib
import re

import keras
import pytest

from switch_tf.configs import parts
from switch_tf.configs.parts import Part
from switch_tf.refusals import Refusal


@pytest.mark.parametrize("name", parts.PARTS)
def test_a_part_has_the_listed_parameters(name):
    expected = {*inspect.signature(parts.find(name)).parameters} - {"kwargs"}
    if name == parts.ADAFACTOR:  # and those of every optimizer of Keras
        base = next(kind for kind in keras.optimizers.Optimizer.__mro__ if kind.__name__ == "BaseOptimizer")
        expected |= {*inspect.signature(base.__init__).parameters} - {"self", "kwargs"}
    assert {*parts.parameters(name)} == expected


def test_a_part_may_be_named_by_any_package_above_it_and_by_earlier_names():
    for name in ("switch_tf.optim.adafactor.Adafactor", "switch_tf.optim.Adafactor", "switch_tf.Adafactor",
                 "switch_tf.configs.factories.Adafactor"):
        assert parts.NAMES[name] == parts.ADAFACTOR
    assert parts.NAMES["switch_tf.training.run.StepSettings"] == parts.STEP_SETTINGS
    assert parts.NAMES["switch_tf.partitioning.dtypes.dtype_policy"] == parts.DTYPE_POLICY


def test_parts_are_made_with_the_parts_in_them():
    schedule = Part("switch_tf.optim.schedules.Cooldown", {"schedule": Part(parts.RSQRT_DECAY, {"warmup_steps": 4}),
                                                           "last_step": 8})
    optimizer = Part(parts.ADAFACTOR, {"learning_rate": schedule, "clipnorm": 1.0}).make()
    assert optimizer.clipnorm == 1.0 and float(optimizer._learning_rate(8)) == 0.0
    assert Part(parts.DTYPE_POLICY, {"activation_dtype": "float32"}).make() == "float32"
    function = Part("math.pow", {}, is_made=False)
    assert parts.made([{"a": (function,)}])[0]["a"][0](2, 3) == 8


@pytest.mark.parametrize("name, sentence", [
    ("keras.optimizers.AdamWW", "keras.optimizers has no 'AdamWW'. Did you mean 'AdamW'?"),
    ("keras.optimisers.AdamW", "keras has no 'optimisers'. Did you mean 'optimizers'?"),
    ("no_such.thing", "There is no module 'no_such'."),
])
def test_what_is_not_there_is_refused_with_the_nearest(name, sentence):
    with pytest.raises(Refusal, match=re.escape(sentence)):
        parts.find(name)


def test_a_missing_argument_and_a_value_that_only_keras_finds_wrong_are_refused():
    with pytest.raises(Refusal, match="Cooldown lacks schedule, last_step; bind them in a gin file, as in Cool"):
        Part("switch_tf.optim.schedules.Cooldown", {}).make()
    with pytest.raises(Refusal, match="`gradient_accumulation_steps` must be an integer >= 2"):
        Part(parts.ADAFACTOR, {"gradient_accumulation_steps": -1}).make()


@pytest.mark.parametrize("planted", [ValueError, TypeError, RuntimeError])
def test_a_bug_of_this_package_is_no_mistake_of_the_user(planted, monkeypatch):
    from switch_tf.training import train_step

    def fail():
        raise planted("planted")

    scope = {"planted": planted, "__name__": train_step.__name__, "__builtins__": __builtins__}
    fail = type(fail)(fail.__code__, scope, "fail", closure=fail.__closure__)
    monkeypatch.setattr(train_step, "fail", fail, raising=False)
    with pytest.raises(planted, match="planted") as caught:
        Part("switch_tf.training.train_step.fail", {}).make()
    assert not isinstance(caught.value, Refusal)


def test_the_functions_of_t5_are_those_that_it_makes_configurable():
    for module, names in parts.LIBRARIES.items():
        source = pathlib.Path(importlib.util.find_spec(module).origin).read_text()
        assert set(re.findall(r"^@gin.configurable\S*\ndef (\w+)", source, re.MULTILINE)) == set(names.split()), module
