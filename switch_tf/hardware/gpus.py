"""Servers of NVIDIA GPUs: the description of a GPU for XLA's compiler, and the bandwidth between groups of GPUs."""

import os
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from switch_tf.hardware import chips
from switch_tf.refusals import Refusal

# JAX takes this share of a GPU's memory, unless one of these variables names another.
_SHARE = 0.75
SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


class Gpu(NamedTuple):
    """A GPU that NVLink connects with the others of its server.

    Attributes:
        name: Name by CUDA.
        capability: Compute capability.
        cores: Number of multiprocessors.
        units: float32 units of a multiprocessor.
        shared_memory: Bytes of shared memory of a multiprocessor; a block can have 1,024 less.
        cache: Bytes of the L2 cache.
        clock: Cycles/s.
        memory: Bytes, as CUDA reports them.
        memory_bandwidth: Bytes/s.
        link_bandwidth: Bytes/s to the GPUs of its server, in one direction.
        network_bandwidth: Bytes/s to other servers, in one direction.
    """

    name: str
    capability: int
    cores: int
    units: int
    shared_memory: int
    cache: int
    clock: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float

    @property
    def chip(self) -> chips.Chip:
        """Memory that JAX takes, and nominal rates; cycles are not known."""
        flops, float32_flops = chips.gpu_flops(self.name)
        return chips.Chip(_share() * self.memory, flops, self.memory_bandwidth, self.link_bandwidth, None,
                          float32_flops)

    def target(self) -> str:
        """Returns XLA's description of the GPU, a `GpuTargetConfigProto` as text."""
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.name}"
            runtime_version {{ major: 12 minor: 9 }}
            dnn_version_info {{ major: 9 minor: 10 }}
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory}
              shared_memory_per_block_optin: {self.shared_memory - 1024}
              threads_per_core_limit: 2048
              core_count: {self.cores}
              fpus_per_core: {self.units}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              memory_bandwidth: {self.memory_bandwidth:.0f}
              device_memory_size: {self.memory}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock / 1e9}
              cuda_compute_capability {{ major: {self.capability} }}
            }}"""


# From NVIDIA's data sheets. The network is that of a DGX: a card of 200 or 400 Gbit/s for each GPU.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 40 * 2**20, 1.41e9, 85_100_068_864, 2.039e12, 300e9,
                25e9),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233_472, 50 * 2**20, 1.98e9, 84_942_979_072, 3.352e12, 450e9,
                50e9),
    "h200": Gpu("NVIDIA H200", 9, 132, 128, 233_472, 50 * 2**20, 1.98e9, 150_110_000_000, 4.8e12, 450e9, 50e9),
}


def _share():
    """Returns the share of a GPU's memory that JAX takes."""
    for variable in filter(os.environ.get, SHARE_VARIABLES):
        text = os.environ[variable]
        if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text):
            raise Refusal(f"{variable} is the share of a GPU's memory that JAX takes, a number up to 1 such as 0.9, "
                          f"not {text!r}; correct or unset it.")
        return float(text)
    return _SHARE


class Servers(NamedTuple):
    """GPUs in servers and a mesh laid over them. The methods are those of `network.Network`.

    Within a server each GPU sends over all of its NVLinks to any other one; between servers, over its own card.

    Attributes:
        mesh: Size of each mesh axis.
        servers: <int>[device], the server of each device, in row-major order of the mesh.
        slowness: Bandwidth within a server over that between servers.
    """

    mesh: dict[str, int]
    servers: np.ndarray
    slowness: float

    @classmethod
    def of(cls, gpu: Gpu, mesh: dict[str, int], servers: Sequence[int]) -> "Servers":
        """Returns the network of GPUs; `servers` has the server of each device of the mesh."""
        return cls(dict(mesh), np.array(servers), gpu.link_bandwidth / gpu.network_bandwidth)

    def links_of_rings(self, axes: Collection[str]) -> float:
        """Returns the share of its NVLinks that a GPU uses while groups gather or sum around rings.

        Between servers a group has as many rings as GPUs in a server, each over another card.

        Args:
            axes: Mesh axes along which the members of a group differ.
        """
        members, together = self._group(axes)
        return 1.0 if together == members else min(1.0, together / self.slowness)

    def links_to_next(self, axes: Collection[str]) -> float:
        """Returns the share while each member of a group sends to the next one only."""
        members, together = self._group(axes)
        return 1.0 if together == members else 1 / self.slowness

    def busiest_link(self, axes: Collection[str]) -> float:
        """Returns the bytes over a GPU's NVLinks, or their equivalent over its card, for each byte of an all-to-all."""
        members, together = self._group(axes)
        return max(1.0, self.slowness * (members - together) / max(1, members - 1))

    def _group(self, axes):
        """Returns the size of a group, and how many of its members share a server."""
        index = tuple(slice(None) if axis in axes else 0 for axis in self.mesh)
        servers = self.servers.reshape(*self.mesh.values())[index].ravel()
        return len(servers), int((servers == servers[0]).sum())
