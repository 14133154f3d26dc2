"""The TPU compiler on a machine without a TPU: libtpu compiles a lowered step for the chips of any topology."""

import os
import re
import time
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from switch_tf.aot.lower import Lowered
from switch_tf.hardware.network import Network, check_topology
from switch_tf.partitioning.backends import pjrt_jit, pjrt_mesh
from switch_tf.refusals import Refusal


class Compiled(NamedTuple):
    """A compiled program, with the needs of one chip.

    Attributes:
        memory: Bytes by kind: "arguments", "outputs", "aliased" (outputs that replace an argument in place),
            "temporaries", "code", "peak".
        hlo: Text of the optimised program.
        network: Network of the pod, with the chip of each device of the mesh.
        seconds: Seconds of compilation.
    """

    memory: dict[str, int]
    hlo: str
    network: Network
    seconds: float


class DoesNotFit(Refusal):
    """The program needs more memory than a chip has; the message is the compiler's."""

    @property
    def temporaries(self) -> int:
        """Bytes of activations and temporaries, 0 if the message has none."""
        found = re.search(r"temporaries \(([\d.]+)([GM])\)|Used ([\d.]+)([GM]) of", str(self))
        if found is None:
            return 0
        size, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
        return round(float(size) * 2**(30 if unit == "G" else 20))


def num_devices(topology: str) -> int:
    """Counts the devices of a topology such as "v5e:4x4".

    Raises:
        Refusal: libtpu does not know the topology.
    """
    return len(devices_of(topology))


def compile_step(lowered: Lowered, topology: str) -> Compiled:
    """Compiles a program of a lowered step for a topology with as many devices as its mesh.

    Raises:
        Refusal: The topology is unknown or has another number of devices.
        DoesNotFit: The program needs more memory than a chip has.
    """
    devices = devices_of(topology)
    if lowered.layout.num_devices != len(devices):
        raise Refusal(f"The mesh {lowered.layout.mesh_shape!r} has {lowered.layout.num_devices} devices, but "
                      f"topology {topology!r} has {len(devices)}; make the product of MESH_SHAPE {len(devices)}.")
    mesh = pjrt_mesh.device_mesh(lowered.layout, devices)
    network = Network.of(topology, lowered.layout.mesh, [device.coords for device in mesh.devices.flat])
    started = time.perf_counter()
    with jax.enable_x64(True):  # Keras counts steps in 64 bits
        function, arguments = jit(lowered, mesh)
        try:
            executable = function.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise DoesNotFit(_first_sentences(str(error))) from error
            raise
    seconds = time.perf_counter() - started
    memory = executable.memory_analysis()
    return Compiled(
        {"arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes,
         "aliased": memory.alias_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
         "code": memory.generated_code_size_in_bytes, "peak": memory.peak_memory_in_bytes},
        executable.as_text(), network, seconds)


def jit(lowered: Lowered, mesh: Mesh) -> tuple[jax.stages.Wrapped, tuple[list, list, list]]:
    """Returns a lowered program as the function that `pjrt_jit.jit` describes, and the shapes of its arguments.

    Args:
        lowered: Lowered program.
        mesh: Mesh of its layout, of devices or of places in a topology.
    """
    shapes = [jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=pjrt_mesh.named_sharding(
        mesh, argument.spec)) for argument in lowered.arguments]
    inputs, state = shapes[:lowered.num_inputs], shapes[lowered.num_inputs:]
    results = [pjrt_mesh.named_sharding(mesh, spec) for spec in lowered.results]
    return (pjrt_jit.jit(lowered.program, inputs, state, results),
            (inputs, *pjrt_jit.split(lowered.program, state)))


def devices_of(topology: str) -> list:
    """Returns libtpu's devices of a topology, without a TPU.

    Raises:
        Refusal: The topology is unknown.
    """
    check_topology(topology)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")  # JAX starts devices of this machine, and accelerators are not needed
    # A v4 chip is one device on Cloud TPU. libtpu's default is two.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    if topology.endswith(":1x1"):
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except Exception as error:
        raise Refusal(f"libtpu knows no topology {topology!r} ({str(error).splitlines()[0]}).") from error


def _first_sentences(text):
    return " ".join(text.split())[:400]
