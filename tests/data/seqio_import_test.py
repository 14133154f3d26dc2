"""seqio's metrics, which run on JAX, take no accelerator from TensorFlow, and leave JAX's own run alone."""

import sys
import types

import pytest

from switch_tf.data import vocabularies
from switch_tf.hardware import devices


@pytest.mark.parametrize("before, variable, is_jax, after", [
    (None, None, False, "cpu"), ("tpu,cpu", None, False, "cpu"),  # JAX sets the second when it finds a TPU
    ("tpu,cpu", "tpu,cpu", False, "tpu,cpu"), ("cuda", None, False, "cuda"), ("tpu,cpu", None, True, "tpu,cpu")])
def test_jax_is_kept_on_the_cpu_unless_somebody_chose_otherwise(monkeypatch, before, variable, is_jax, after):
    config = types.SimpleNamespace(jax_platforms=before)
    config.update = lambda name, value: setattr(config, name, value)
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(config=config))
    monkeypatch.setattr(devices, "are_jax", lambda: is_jax)
    environ = {"JAX_PLATFORMS": variable} if variable else {}
    monkeypatch.setattr(vocabularies.os, "environ", environ)
    vocabularies.keep_jax_on_cpu()
    assert config.jax_platforms == after
