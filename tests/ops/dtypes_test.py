"""The dtype policy follows what was asked for, and the device where that is "auto"."""

import keras
import pytest

from switch_tf.ops import dtypes


@pytest.mark.parametrize("activation_dtype, policy", [
    ("float32", "float32"), ("bfloat16", "mixed_bfloat16"), ("float64", "float64")])
def test_a_named_dtype_is_taken(activation_dtype, policy):
    assert dtypes.dtype_policy(activation_dtype) == policy


@pytest.mark.parametrize("device_type, policy", [
    ("CPU", "float32"), ("GPU", "mixed_bfloat16"), ("TPU", "mixed_bfloat16")])
def test_auto_is_bfloat16_where_there_is_an_accelerator(device_type, policy, monkeypatch):
    monkeypatch.setattr(dtypes, "device_type", lambda: device_type)
    assert dtypes.dtype_policy() == policy


def test_the_policy_keeps_weights_in_float32():
    policy = keras.dtype_policies.get(dtypes.dtype_policy("bfloat16"))
    assert (policy.variable_dtype, policy.compute_dtype) == ("float32", "bfloat16")


def test_an_unknown_dtype_names_the_nearest():
    with pytest.raises(ValueError, match=r"ACTIVATION_DTYPE must be one of .* not 'bfloat'\. Did you mean 'bfloat16'"):
        dtypes.dtype_policy("bfloat")


@pytest.mark.parametrize("computed, kept", [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_what_selective_precision_keeps_is_float32_or_as_wide_as_the_model(computed, kept):
    assert dtypes.wide_dtype(computed) == kept
    assert dtypes.widen(keras.ops.ones((), computed)).dtype == kept


def test_a_float64_model_has_no_narrower_island():
    assert dtypes.wide_dtype("bfloat16", "bfloat16") == "bfloat16"
    assert dtypes.wide_dtype("float64", "bfloat16") == "float64"
