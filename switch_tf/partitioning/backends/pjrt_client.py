"""Starts JAX's client of this machine's devices, in one process or several."""

import jax

from switch_tf.hardware import devices, host
from switch_tf.partitioning.cluster import Cluster
from switch_tf.refusals import Refusal, first_line

# JAX's name of the client, and of its devices.
_PLATFORMS = {"CPU": "cpu", "GPU": "cuda", "TPU": "tpu"}
_NAMES = {"CPU": "cpu", "GPU": "gpu", "TPU": "tpu"}


def start(members: Cluster) -> None:
    """Has JAX take the accelerators of this machine or, without any, as many CPU devices as TensorFlow has.

    Raises:
        Refusal: JAX has no client for the accelerators, or was started with other devices.
    """
    if devices.are_jax():
        return
    kind = "TPU" if host.has_tpu() else "GPU" if host.gpus() else "CPU"
    jax.config.update("jax_enable_x64", True)  # Keras counts steps in 64 bits
    jax.config.update("jax_platforms", ",".join(dict.fromkeys([_PLATFORMS[kind], "cpu"])))
    if kind == "CPU":
        _divide_cpu()
    if len(members.addresses) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(members.addresses[0], len(members.addresses), members.index)
    try:
        first = jax.local_devices()[0]
    except RuntimeError as error:
        raise Refusal(f"This machine has a {kind}, and JAX has no client for it ({first_line(error)}); install "
                      f"jax[{'cuda12' if kind == 'GPU' else 'tpu'}]=={jax.__version__}, or use another back end."
                      ) from error
    if first.platform != _NAMES[kind]:
        raise Refusal(f"This machine has a {kind}, but JAX was started for {first.platform} before the back end; set "
                      "JAX_PLATFORMS to nothing.")
    devices.use_jax(kind, first.device_kind)


def _divide_cpu():
    """Gives JAX as many CPU devices as TensorFlow has."""
    count = devices.num_local_devices("CPU")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # JAX has started
        if (found := len(jax.local_devices(backend="cpu"))) < count:
            raise Refusal(f"JAX was started with {found} CPU devices before the back end, which needs {count}; choose "
                          "the back end first.") from error
