"""seqio, imported when a function needs it, so that its metrics take no accelerator."""

import os
import sys
from typing import Any

import keras

from switch_tf.hardware import devices

# JAX's own setting on a TPU VM, if nobody has chosen another.
_OF_TPU = "tpu,cpu"


def import_seqio() -> Any:
    """Returns seqio, imported so that its metrics take no accelerator."""
    keep_jax_on_cpu()
    import seqio  # after the line above, whoever comes first

    return seqio


def keep_jax_on_cpu() -> None:
    """Keeps seqio's metrics, which run on JAX, from taking the accelerator that TensorFlow trains on.

    Does nothing if Keras itself or the run's back end runs on JAX, or if JAX_PLATFORMS is set.
    """
    if keras.config.backend() != "tensorflow" or devices.are_jax():
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = sys.modules.get("jax")  # TensorFlow imports it before anyone can set the variable
    if jax is not None and jax.config.jax_platforms in (None, "", _OF_TPU):
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
