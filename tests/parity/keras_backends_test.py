"""Layers and models are plain Keras: the JAX back end computes what the TensorFlow back end does, gradients too."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from switch_tf.configs import policies

PROGRAM = pathlib.Path(__file__).with_name("keras_backend.py")
_SPEC = importlib.util.spec_from_file_location("keras_backend", PROGRAM)
ours = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(ours)

CASES = ("switch:einsum", "hash:index", "expert_choice:index")
OTHERS = tuple(f"{name}:index" for name in policies.names() if f"{name}:index" not in CASES)

pytestmark = pytest.mark.slow  # JAX compiles for seconds a case


@functools.cache
def with_jax(cases):
    """What JAX computes, of several cases."""
    environ = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-P", str(PROGRAM), *cases], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in OTHERS)])
def test_jax_and_tensorflow_agree_with_dropout_and_jitter(case):
    mine = ours.measure(case.split(":")[0], "index")
    theirs = with_jax(CASES if case in CASES else OTHERS)[case]
    np.testing.assert_allclose(theirs["logits"], mine["logits"], rtol=1e-4, atol=1e-5)
    assert theirs["ids"] == mine["ids"]
    assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
    for one, other in zip(mine["gradients"], theirs["gradients"], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5 * max(1.0, np.max(np.abs(one))))
