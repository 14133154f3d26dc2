"""No two kernels of a model start equal or alike, and the same seed starts the same model everywhere."""

import dataclasses

import keras
import numpy as np
import pytest

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.aot import lower
from switch_tf.configs import shipped_gin
from switch_tf.partitioning.partitioner import Partitioner

# The fields by which presets differ and their initial weights do not.
WITHOUT_WEIGHTS = ("dropout_rate", "group_size", "jitter_noise", "train_capacity_factor", "eval_capacity_factor",
                   "min_expert_capacity", "router_z_loss_weight", "second_expert_threshold")
NARROW = {"vocab_size": 80, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 8, "num_groups_multiple": 8}
LAYOUTS = ["data", "data_model", "expert", "expert_model", "fully_sharded", "fully_sharded_model"]


def _narrow(config, **changes):
    """The kinds of layers that a configuration has, several of each, at sizes that take no time."""
    return dataclasses.replace(
        config, **{**NARROW, "num_experts": min(config.num_experts, 8), "num_encoder_layers": 4,
                   "num_decoder_layers": 4 if config.num_decoder_layers else 0, **changes})


GEGLU = _narrow(SwitchConfig.from_preset("switch_xxl_128"), num_encoder_layers=2, num_decoder_layers=1)


def _families():
    """Returns the presets whose weights differ, narrowed, and configurations that no preset has."""
    plain = {name: getattr(SwitchConfig(), name) for name in WITHOUT_WEIGHTS}
    families = {_narrow(SwitchConfig.from_preset(name), **plain): name for name in reversed(shipped_gin.preset_names())}
    families[_narrow(GEGLU, expert_sublayers="feed_forward_and_attention", extra_mlp=True)] = "experts_everywhere"
    return {name: config for config, name in families.items()}


FAMILIES = _families()


def _build(config, partitioner=None, seed=0):
    keras.utils.set_random_seed(seed)
    model = SwitchTransformer(config)
    (partitioner or Partitioner()).build(model)
    return model


def _kernels(variables):
    """Path -> the random numbers of a kernel, one entry for each expert of a stacked one."""
    kernels = {}
    for variable in variables:
        value = np.asarray(variable.value)
        if "expert" in variable.logical_axes:
            kernels.update({f"{variable.path}[{index}]": one.ravel() for index, one in enumerate(value)})
        elif not variable.path.endswith("/scale"):
            kernels[variable.path] = value.ravel()
    return kernels


def _alike(kernels):
    """Finds pairs with correlated beginnings: generators with one seed begin alike at any length."""
    found = set()
    for length in {len(values) for values in kernels.values()}:
        names = [name for name, values in kernels.items() if len(values) >= length]
        correlation = np.atleast_2d(np.corrcoef([kernels[name][:length] for name in names]))
        for one, other in np.argwhere(np.triu(np.abs(correlation), 1) > 8 / length**0.5):
            found.add((names[one], names[other], float(correlation[one, other])))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_no_two_kernels_of_a_preset_are_alike(name):
    kernels = _kernels(_build(FAMILIES[name]).variables)
    assert min(map(len, kernels.values())) >= 128
    assert len(kernels) > 20
    assert not _alike(kernels)


def test_kernels_that_are_alike_would_be_seen():
    values = np.random.RandomState(0).randn(2, 400)
    assert not _alike(dict(zip("ab", values, strict=True)))
    assert _alike({"a": values[0], "b": values[0, :150]})
    assert _alike({"a": values[0], "b": values[1] + values[0]})


def test_the_seed_decides_the_weights():
    first, again, other = (_kernels(_build(GEGLU, seed=seed).variables) for seed in (1, 1, 2))
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name], err_msg=name)
    assert not _alike({**first, **{f"other {name}": values for name, values in other.items()}})


@pytest.mark.parametrize("name", [
    name if name in ("fully_sharded_model", "mirrored") else pytest.param(name, marks=pytest.mark.slow)
    for name in (*LAYOUTS, "mirrored")])
def test_a_layout_starts_the_weights_of_one_device(name, make_partitioner):
    partitioner = make_partitioner("data", backend="mirrored") if name == "mirrored" else make_partitioner(name)
    assert partitioner.layout.num_devices == 8
    mine, theirs = (_build(GEGLU, chosen).variables for chosen in (Partitioner(), partitioner))
    read = partitioner.compile(partitioner.results(lambda _: [variable.value + 0 for variable in theirs]))
    values = read(partitioner.place({"encoder_input_tokens": np.zeros((1, 8, 8), "int32")}))
    for variable, value in zip(mine, values, strict=True):
        np.testing.assert_array_equal(value, variable.numpy(), err_msg=variable.path)


def test_the_step_that_is_compiled_ahead_of_time_starts_the_same_weights(monkeypatch, shipped_layout):
    started = []

    def create(partitioner, next_creator, **kwargs):
        started.append(np.asarray(kwargs["initial_value"]()))
        return original(partitioner, next_creator, **kwargs)

    original = lower.ShapesOnly._create
    monkeypatch.setattr(lower.ShapesOnly, "_create", create)
    _build(GEGLU, lower.ShapesOnly(shipped_layout("expert_model")))
    for variable, value in zip(_build(GEGLU).variables, started, strict=True):
        np.testing.assert_array_equal(value, variable.numpy(), err_msg=variable.path)


def test_a_seed_gives_the_initial_weights_that_it_always_gave():
    """Sums of the magnitudes that the version of 2026-11-29 drew, also of gated activations and experts."""
    keras.utils.set_random_seed(3)
    model = SwitchTransformer(SwitchConfig(
        vocab_size=32, d_model=8, d_ff=12, num_heads=2, d_kv=4, num_encoder_layers=2, num_decoder_layers=2,
        num_experts=2, activation="geglu"))
    ids = np.ones((1, 4), "int32")
    model.forward({"encoder_input_tokens": ids, "decoder_input_tokens": ids})
    drawn = {variable.path.partition("/")[2]: float(np.sum(np.abs(variable.numpy()))) for variable in model.variables}
    expected = {
        "encoder/layers_0/mlp/wi_0": 25.382179, "encoder/layers_0/mlp/wi_1": 22.985493,
        "encoder/layers_0/mlp/wo": 18.582708, "encoder/layers_1/mlp/router/kernel": 4.663892,
        "encoder/layers_1/mlp/experts/wi_0": 44.125572, "encoder/layers_1/mlp/experts/wi_1": 49.657616,
        "encoder/layers_1/mlp/experts/wo": 39.770149, "decoder/layers_0/mlp/wi_1": 24.163704,
        "decoder/layers_1/mlp/experts/wo": 40.469425}
    assert {name: drawn[name] for name in expected} == pytest.approx(expected, rel=1e-5)
