"""Devices of a topology on a machine without them: libtpu's chips, and the GPUs of JAX's plugin for CUDA."""

import os
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies
from jax.sharding import Mesh

from switch_tf.hardware import chips
from switch_tf.hardware.network import Network, Servers
from switch_tf.refusals import Refusal, first_line


def of(topology: str) -> list[jax.Device]:
    """Returns the devices of a topology.

    Raises:
        Refusal: The topology is unknown.
    """
    kind = chips.kind(topology)
    jax.config.update("jax_platforms", "cpu")  # JAX starts devices of this machine, and accelerators are not needed
    return _gpus(topology) if kind == "GPU" else _chips(topology)


def network(topology: str, mesh: Mesh) -> Network | Servers:
    """Returns the network between the devices of a mesh that `of` returned."""
    devices = list(mesh.devices.flat)
    if chips.kind(topology) == "TPU":
        return Network(topology, dict(mesh.shape), [device.coords for device in devices])
    gpu, _, _ = chips.servers(topology)
    return Servers(gpu, dict(mesh.shape), [device.process_index for device in devices])


def _chips(topology):
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # A v4 chip is one device on Cloud TPU. libtpu's default is two.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    if topology.endswith(":1x1"):
        options["chips_per_host_bounds"] = (1, 1, 1)
    return _described(topology, "libtpu", {"platform": "tpu", "topology_name": topology, **options})


def _gpus(topology):
    gpu, count, size = chips.servers(topology)
    # Slices, processes and devices: a slice is what NVLink connects.
    return _described(topology, "JAX's plugin for CUDA", {
        "platform": "cuda", "target_config": gpu.target(), "topology": f"{count}x1x{size}"})


def _described(topology, compiler, description):
    try:
        return list(jax_topologies.get_topology_desc(**description).devices)
    except Exception as error:
        raise Refusal(f"{compiler} knows no topology {topology!r} ({first_line(error)}).") from error
