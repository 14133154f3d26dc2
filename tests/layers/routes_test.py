"""Recorded gates are those that the layer multiplied its experts' outputs by."""

import keras
import numpy as np
import pytest
from keras import ops

from switch_tf import context
from switch_tf.configs import policies
from switch_tf.layers import Router, SwitchFeedForward
from switch_tf.ops import forms

BATCH, LENGTH, D_MODEL, D_FF, NUM_EXPERTS = 3, 7, 6, 10, 4


def make(policy, **options):
    keras.utils.set_random_seed(0)
    router = Router(NUM_EXPERTS, {"top_n": 3}.get(policy), policy=policy, init_scale=1.0, name="router")
    layer = SwitchFeedForward(NUM_EXPERTS, D_FF, router=router, **options, name="mlp")
    layer.build((None, None, D_MODEL))
    return layer


def batch():
    rng = np.random.default_rng(1)
    is_real = np.ones((BATCH, LENGTH), "bool")
    is_real[1, 4:] = False
    return (rng.standard_normal((BATCH, LENGTH, D_MODEL)).astype("float32"), is_real,
            rng.integers(0, 50, (BATCH, LENGTH)).astype("int32"))


@pytest.mark.parametrize("policy", sorted(policies.names()))
@pytest.mark.parametrize("options", [{}, {"group_size": 8, "eval_capacity_factor": 0.7, "min_expert_capacity": 1}])
def test_outputs_are_the_experts_outputs_times_the_recorded_gates(policy, options):
    layer = make(policy, **options)
    inputs, is_real, token_ids = batch()
    found = {}
    with context.within(routes=found):
        outputs = ops.convert_to_numpy(layer(inputs, padding_mask=is_real, token_ids=token_ids))
    ((layer_path, gates),) = found.items()
    gates = ops.convert_to_numpy(gates)
    assert layer_path == "mlp" and gates.shape == (BATCH, LENGTH, NUM_EXPERTS)
    assert not gates[~is_real].any()
    has_none = (gates[is_real].max(axis=-1) == 0).any()
    assert has_none or not options, "with few slots some token finds none"
    wi, wo = (ops.convert_to_numpy(kernel) for kernel in (layer.experts.input_kernels[0], layer.experts.wo))
    each = np.einsum("blef,efd->bled", np.maximum(np.einsum("bld,edf->blef", inputs, wi), 0), wo)
    np.testing.assert_allclose(outputs, np.einsum("ble,bled->bld", gates, each), rtol=1e-4, atol=1e-5)


def test_nothing_is_recorded_outside_of_the_scope_and_scopes_nest():
    layer = make("switch")
    inputs, *_ = batch()
    outer, inner = {}, {}
    with context.within(routes=outer):
        with context.within(routes=inner):
            layer(inputs)
        layer(inputs)
    layer(inputs)
    assert (len(outer), len(inner)) == (1, 1)


@pytest.mark.parametrize("policy", ["switch", "expert_choice"])
def test_a_program_of_any_size_records_the_same(policy):
    layer = make(policy)
    inputs, *_ = batch()

    def gates(ids):
        found = {}
        with context.within(no_drop=True, routes=found):
            layer(ops.cast(ids, "float32")[..., None] * ops.ones(D_MODEL))
        return found["mlp"]

    ids = (10 * inputs[..., 0]).astype("int32")
    np.testing.assert_allclose(forms.compiled(gates, ranks=(2,))(ids), gates(ids), rtol=1e-5)
