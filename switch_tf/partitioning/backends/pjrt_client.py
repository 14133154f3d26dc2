"""Starts JAX's client of this machine's devices, in one process or several."""

import jax
import tensorflow as tf

from switch_tf.hardware import devices, host
from switch_tf.partitioning.cluster import Cluster
from switch_tf.refusals import Refusal

_PLATFORMS = {"CPU": "cpu", "GPU": "cuda", "TPU": "tpu"}


def start(members: Cluster) -> None:
    """Has JAX take the accelerators of this machine, or as many CPU devices as TensorFlow has, and TensorFlow none.

    Raises:
        Refusal: JAX has no client for the accelerators, or was started with other devices.
    """
    kind = "TPU" if host.has_tpu() else "GPU" if host.gpus() else "CPU"
    jax.config.update("jax_enable_x64", True)  # Keras counts steps in 64 bits
    jax.config.update("jax_platforms", ",".join(dict.fromkeys([_PLATFORMS[kind], "cpu"])))
    if kind == "CPU":
        _divide_cpu()
    if len(members.addresses) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(members.addresses[0], len(members.addresses), members.index)
    try:
        jax.devices()
    except RuntimeError as error:
        raise Refusal(f"This machine has a {kind}, and JAX has no client for it ({error}); install jax[cuda12] or "
                      "jax[tpu] of the version in requirements.txt, or use another back end.") from error
    devices.use_jax(kind)
    if kind != "CPU":
        tf.config.set_visible_devices([], kind)


def _divide_cpu():
    """Gives JAX as many CPU devices as TensorFlow has."""
    count = devices.num_local_devices("CPU")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # JAX has started
        if (found := len(jax.local_devices(backend="cpu"))) < count:
            raise Refusal(f"JAX was started with {found} CPU devices before the back end, which needs {count}; choose "
                          "the back end first.") from error
