"""The TPU compiler on a machine without a TPU: libtpu compiles a lowered step for the chips of any topology.

All uses of private parts of jaxlib are in this file; pyproject.toml pins the versions that it was written for.
"""

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax._src.interpreters import mlir
from jax.experimental import mesh_utils, topologies
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir

from switch_tf.aot.lower import Lowered, iota
from switch_tf.hardware.network import Network, check_topology
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
    mesh = lowered.layout.mesh
    if lowered.layout.num_devices != len(devices):
        raise Refusal(f"The mesh {lowered.layout.mesh_shape!r} has {lowered.layout.num_devices} devices, but "
                      f"topology {topology!r} has {len(devices)}; make the product of MESH_SHAPE {len(devices)}.")
    # Neighbours in the mesh are neighbours on the chips' network.
    placed = mesh_utils.create_device_mesh(tuple(mesh.values()), devices=devices, allow_split_physical_axes=True)
    network = Network.of(topology, mesh, [device.coords for device in placed.reshape(-1)])
    started = time.perf_counter()
    try:
        executable = partition(lowered, list(placed.reshape(-1)), devices[0].client.compile)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise DoesNotFit(_first_sentences(str(error))) from error
        raise
    seconds = time.perf_counter() - started
    memory = executable.get_compiled_memory_stats()
    return Compiled(
        {"arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes,
         "aliased": memory.alias_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
         "code": memory.generated_code_size_in_bytes, "peak": memory.peak_memory_in_bytes},
        executable.hlo_modules()[0].to_string(), network, seconds)


def partition(lowered: Lowered, devices: list, compile_function: Callable, replaces_arguments: bool = True) -> Any:
    """Compiles a lowered step with an XLA client, its arguments split over `devices` as they are at rest.

    Args:
        lowered: Lowered step.
        devices: JAX devices in the order of the mesh.
        compile_function: `compile` or `compile_and_load` of the client.
        replaces_arguments: Whether results take the memory of the arguments that they replace.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(_with_bytes_for_bits(lowered.text))
        _prepare(module, lowered, ir, replaces_arguments)
        settings = options(np.array([device.id for device in devices]))
        return compile_function(module, _jax.DeviceList(tuple(devices)), settings)


def devices_of(topology: str) -> list:
    """Returns libtpu's devices of a topology, without a TPU.

    Raises:
        Refusal: The topology is unknown.
    """
    check_topology(topology)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # A v4 chip is one device on Cloud TPU. libtpu's default is two.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    if topology.endswith(":1x1"):
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except Exception as error:
        raise Refusal(f"libtpu knows no topology {topology!r} ({str(error).splitlines()[0]}).") from error


def _with_bytes_for_bits(text):
    """Unpacks boolean constants to one byte each for jaxlib's parser. TensorFlow packs eight into a byte."""

    def unpack(found):
        count = int(np.prod([int(length) for length in found[2].split("x") if length]))
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(found[1]), np.uint8), bitorder="little")[:count]
        return f'dense<"0x{bits.tobytes().hex().upper()}"> : tensor<{found[2]}i1>'

    return re.sub(r'dense<"0x([0-9A-Fa-f]+)"> : tensor<((?:\d+x)+)i1>', unpack, text)


def _prepare(module, lowered, ir, replaces_arguments):
    """Annotates how arguments and results are split at rest, and which result replaces which argument."""
    for operation in [inner for inner in _operations(module.operation) if inner.name == "mhlo.copy"]:
        # TensorFlow copies its results; the TPU plug-in does not know the operation.
        operation.results[0].replace_all_uses_with(operation.operands[0])
        operation.erase()
    if "mhlo.input_output_alias" in module.operation.attributes:
        del module.operation.attributes["mhlo.input_output_alias"]
    main = next(entry for entry in module.body.operations if "main" in str(entry.attributes["sym_name"]))
    result_of = {argument: len(lowered.results) + place for place, argument in enumerate(lowered.updated)}
    arguments = []
    for index, argument in enumerate(lowered.arguments):
        attributes = {"mhlo.sharding": ir.StringAttr.get(sharding(argument.spec, lowered.layout.mesh))}
        if replaces_arguments and index in result_of:
            attributes["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result_of[index])
        arguments.append(ir.DictAttr.get(attributes))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
    specs = [*lowered.results, *(lowered.arguments[index].spec for index in lowered.updated)]
    results = [sharding(spec, lowered.layout.mesh) for spec in specs]
    main.attributes["res_attrs"] = ir.ArrayAttr.get(
        [ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get(text)}) for text in results])


def _operations(operation):
    """Yields all operations inside one, those of its regions first."""
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield from _operations(inner.operation)
                yield inner.operation


def sharding(spec: Sequence[tuple[str, ...]], mesh: dict[str, int]) -> str:
    """Returns GSPMD's text for the mesh axes that split each dimension, replicated over the other axes."""
    axes, sizes = list(mesh), list(mesh.values())
    used = [axis for entry in spec for axis in entry if mesh[axis] > 1]
    if not used:
        return "{replicated}"
    order = [axes.index(axis) for axis in used + [axis for axis in axes if axis not in used]]
    tiles = [math.prod(mesh[axis] for axis in entry) for entry in spec]
    rest = math.prod(sizes) // math.prod(tiles)
    listed = ",".join(map(str, tiles + ([rest] if rest > 1 else [])))
    return "{" + f"devices=[{listed}]{iota(sizes, order)}" + (" last_tile_dim_replicate" if rest > 1 else "") + "}"


def options(device_ids: np.ndarray) -> Any:
    """Returns compile options that let GSPMD split one program over devices.

    Args:
        device_ids: <int>[devices], numbers of the devices in the order of the mesh.
    """
    settings = xla_client.CompileOptions()
    build = settings.executable_build_options
    settings.num_replicas = build.num_replicas = 1
    settings.num_partitions = build.num_partitions = len(device_ids)
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = False  # the annotations are GSPMD's
    build.device_assignment = xla_client.DeviceAssignment.create(device_ids.reshape(1, -1))
    return settings


def _first_sentences(text):
    return " ".join(text.split())[:400]
