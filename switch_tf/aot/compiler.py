"""Compiles a lowered step for absent TPUs or GPUs, by XLA's description of a topology."""

import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from switch_tf.aot.lower import Lowered
from switch_tf.hardware import chips
from switch_tf.hardware.network import Network, Servers
from switch_tf.partitioning import lowering
from switch_tf.refusals import Refusal, first_line

# By platform. Without a GPU to time programs on, XLA would take Triton's, or fail if it has no tile for the shape.
_OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}


class Compiled(NamedTuple):
    """A compiled program, with the needs of one chip.

    Attributes:
        memory: Bytes by kind: "arguments", "outputs", "aliased" (outputs that replace an argument in place),
            "temporaries", "code", "peak".
        hlo: Text of the optimised program.
        network: Knows the places of the mesh's devices.
    """

    memory: dict[str, int]
    hlo: str
    network: Network | Servers


class DoesNotFit(Refusal):
    """The program needs more memory than a chip has. The compiler's message."""

    @property
    def temporaries(self) -> int:
        """Bytes of activations and temporaries, or 0 if the message has none."""
        match = re.search(r"(?:temporaries \(|Used )([\d.]+)([GM])(?:\)| of)", str(self))
        return round(float(match[1]) * 2**(30 if match[2] == "G" else 20)) if match else 0


def devices_of(topology: str) -> list[jax.Device]:
    """Returns the devices of a topology such as "v5e:4x4" or "h100:8"."""
    jax.config.update("jax_platforms", "cpu")
    if servers := chips.servers(topology):
        gpu, count, size = servers
        compiler = "JAX's plugin for CUDA"
        # Slices, processes and devices. NVLink connects a slice.
        options: dict[str, Any] = {"platform": "cuda", "target_config": gpu.target(), "topology": f"{count}x1x{size}"}
    else:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        compiler, options = "libtpu", {"platform": "tpu", "topology_name": topology}
        if topology.startswith("v4:"):  # one device per chip, as on Cloud TPU, not libtpu's two
            options["chip_config_name"] = "megacore"
        if topology.endswith(":1x1"):
            options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(**options).devices)
    except Exception as error:
        raise Refusal(f"{compiler} knows no topology {topology!r} ({first_line(error)}).") from error


def compile_step(lowered: Lowered, topology: str) -> Compiled:
    """Compiles a lowered step for a topology with as many devices as its mesh.

    Raises:
        DoesNotFit: The program needs more memory than a chip has.
    """
    devices = devices_of(topology)
    if lowered.layout.num_devices != len(devices):
        raise Refusal(f"The mesh {lowered.layout.mesh_shape!r} has {lowered.layout.num_devices} devices, but "
                      f"topology {topology!r} has {len(devices)}; make the product of MESH_SHAPE {len(devices)}.")
    mesh = lowering.device_mesh(lowered.layout, devices)
    sizes, places = dict(mesh.shape), list(mesh.devices.flat)
    with jax.enable_x64(True):  # Keras counts steps in 64 bits
        arguments = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=lowering.named_sharding(mesh, one.spec))
                     for one in lowered.arguments]
        try:
            executable = lowering.jit(lowered.program, arguments).lower(*arguments).compile(
                compiler_options=_OPTIONS.get(devices[0].platform))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise DoesNotFit(" ".join(str(error).split())[:400]) from error
            raise
    memory, servers = executable.memory_analysis(), chips.servers(topology)
    return Compiled(
        {"arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes,
         "aliased": memory.alias_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
         "code": memory.generated_code_size_in_bytes, "peak": memory.peak_memory_in_bytes},
        executable.as_text(),
        Servers(servers[0], sizes, [device.process_index for device in places]) if servers else
        Network(topology, sizes, [device.coords for device in places]))
