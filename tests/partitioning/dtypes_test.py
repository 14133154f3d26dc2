"""The dtype policy follows what was asked for, and the device where that is "auto"."""

import keras
import pytest

from switch_tf.partitioning import dtypes


@pytest.mark.parametrize("activation_dtype, policy", [("float32", "float32"), ("bfloat16", "mixed_bfloat16")])
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
