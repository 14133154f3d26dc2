import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import train_step
from switch_tf.training.train_step import compile_steps


def _built(config, part):
    model, optimizer = SwitchTransformer(config), Adafactor(0.1)
    Partitioner().build(model, optimizer, lambda model: train_step.freeze(model, part))
    return model, optimizer


def _paths(variables):
    return {variable.path.partition("/")[2] for variable in variables}


@pytest.mark.parametrize("part", ["experts", "all_but_experts", "router", "decoder"])
def test_each_part_is_trained_by_itself_and_frozen_weights_have_no_slots(tiny_config, part):
    model, optimizer = _built(dataclasses.replace(tiny_config, logits_via_embedding=False), part)
    trained, everything = _paths(model.trainable_variables), _paths(model.variables)
    expected = {
        "experts": {path for path in everything if path.endswith(("mlp/experts/wi", "mlp/experts/wo"))},
        "all_but_experts": {path for path in everything if not path.endswith(("mlp/experts/wi", "mlp/experts/wo"))},
        "router": {"encoder/layers_1/mlp/router/kernel", "decoder/layers_1/mlp/router/kernel"},
        "decoder": {path for path in everything if path.startswith("decoder/") or path == "logits_dense/kernel"},
    }[part]
    assert trained == expected
    frozen = everything - trained
    assert frozen
    slots = " ".join(variable.path for variable in optimizer.variables)
    assert all(path.replace("/", "_") in slots.replace("/", "_") for path in trained)
    assert not any(path.replace("/", "_") in slots.replace("/", "_") for path in frozen)


@pytest.mark.slow
def test_a_step_changes_what_is_trained_and_nothing_else(shallow_config, batch):
    model, optimizer = _built(shallow_config, "experts")
    before = {variable.path: variable.numpy().copy() for variable in model.variables}
    step = compile_steps(model, optimizer, 0, StepSettings(trainable="experts"))
    features = {name: tf.convert_to_tensor(value)[None] for name, value in batch.items()}
    step(features)
    for variable in model.variables:
        is_same = np.array_equal(variable.numpy(), before[variable.path])
        assert is_same != ("/experts/" in variable.path), variable.path


@pytest.mark.parametrize(("changes", "part"), [
    ({"num_experts": 0}, "experts"), ({"num_experts": 0}, "router"), ({"num_decoder_layers": 0}, "decoder"),
    ({"routing_policy": "hash"}, "router")])
def test_a_part_that_a_model_lacks_is_refused(tiny_config, changes, part):
    changes = {**changes, **({"expert_dropout_rate": 0.0} if "num_experts" in changes else {})}
    with pytest.raises(ValueError, match=f"TRAINABLE is '{part}', but this model has no such weights"):
        train_step.check_trainable(part, dataclasses.replace(tiny_config, **changes))
    train_step.check_trainable("all", tiny_config)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="TRAINABLE must be one of 'all'.*Did you mean 'router'"):
        StepSettings(trainable="routers")
