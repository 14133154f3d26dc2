"""A layout: a mesh of devices, and the mesh axes that split each logical axis."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from switch_tf.checks import shown
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.choices import check_choice
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

# `Layout.backend` -> module. Its `create(Layout, Cluster)` returns a Partitioner. It refuses a layout that does not fit
# the devices, before anything starts.
BACKENDS = {
    "auto": "switch_tf.partitioning.backends.dtensor",  # "pjrt" with accelerators of JAX
    "dtensor": "switch_tf.partitioning.backends.dtensor",
    "one_device": "switch_tf.partitioning.backends.strategies",
    "mirrored": "switch_tf.partitioning.backends.strategies",
    "pjrt": "switch_tf.partitioning.backends.pjrt",
    "tpu": "switch_tf.partitioning.backends.strategies",
}

# T5X's names. `router_expert`, the columns of a router, is never split. `expert_embed` is the width of tokens on their
# way to and from the experts.
LOGICAL_AXES = frozenset((
    "batch", "length", "vocab", "embed", "heads", "kv", "mlp", "relpos_buckets",
    "group", "expert", "expert_embed", "expert_mlp", "router_expert", "capacity"))

# Logical axis -> field of SwitchConfig.
_SOURCES = {"vocab": "vocab_size", "embed": "d_model", "heads": "num_heads", "kv": "d_kv", "mlp": "d_ff",
            "expert": "num_experts", "expert_embed": "d_model", "expert_mlp": "d_ff"}


# Devices and experts -> the file of gin/layouts/ that was compiled for them.
_PODS = {(256, 128): "pod_256_experts", (512, 128): "pod_512_fully_sharded", (512, 2048): "pod_512_experts"}
# Devices that share a dense weight. A TPU scatters at least 8 elements of a head's width, usually 64.
_LARGEST_BLOCK = 8


@dataclasses.dataclass(frozen=True)
class Layout:
    """The division of a run over devices, bound by the files of `gin/layouts/`.

    The default, without mesh and rules, is one device, or the result of `choose` for the devices of a run.

    Args:
        mesh_shape: Devices along each mesh axis, such as "data=4,model=2". One axis of the rules may be missing: it
            takes the remaining devices.
        rules: Pairs of a logical axis and one or several mesh axes, outermost first. Logical axes without a rule are
            not split. In each tensor a mesh axis splits the first dimension that has a rule for it: with experts over
            "expert" and groups over ("data", "expert"), expert buffers have groups over "data".
        at_rest_rules: Further rules for stored weights and slots, for dimensions that `rules` leave whole. Weights are
            gathered before use.
        backend: "auto" is "pjrt" on a TPU, and on GPUs if JAX has its client for them; elsewhere one device, or
            "dtensor" for several. TensorFlow cuts programs of "dtensor", XLA programs of "pjrt". "one_device",
            "mirrored" and "tpu" are strategies of tf.distribute, with every variable whole on every device.
    """

    mesh_shape: str = ""
    rules: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    at_rest_rules: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    backend: str = "auto"

    def __post_init__(self):
        if self.backend == "multi_worker_mirrored":
            raise Refusal("backend='multi_worker_mirrored' is gone: PJRT trains in several processes and stores pieces "
                          "of the variables; use backend='pjrt', which reads the same checkpoints.")
        check_choice("backend", self.backend, BACKENDS)
        for name in ("rules", "at_rest_rules"):
            if not isinstance(getattr(self, name), tuple | list):
                raise Refusal(f"The {name} of a layout are a tuple of pairs of a logical axis and a mesh axis, such "
                              f"as (('batch', 'data'),), not {shown(getattr(self, name))}.")
        for rule in (*self.rules, *self.at_rest_rules):
            is_pair = isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)
            axes = _axes_tuple(rule[1]) if is_pair and isinstance(rule[1], str | tuple | list) else ()
            if not axes or not all(isinstance(axis, str) for axis in axes) or len(set(axes)) < len(axes):
                raise Refusal("A rule of a layout is a pair of a logical axis and a mesh axis, such as ('batch', "
                              f"'data'), or several, such as ('batch', ('data', 'expert')), not {shown(rule)}.")
            if rule[0] not in LOGICAL_AXES:
                raise Refusal(f"The layout splits the unknown logical axis {rule[0]!r}; the axes are "
                              f"{sorted(LOGICAL_AXES)}.")
        # Along other mesh axes devices would repeat the same work.
        named = sorted({axis for _, axes in self._splits for axis in axes})
        for axis, size in self.mesh.items():
            if named and size > 1:
                check_choice("A mesh axis of MESH_SHAPE with several devices", axis, named)
        open_axes = self.open_axes
        if len(open_axes) > 1:
            raise Refusal(f"MESH_SHAPE {self.mesh_shape!r} leaves out the mesh axes {' and '.join(open_axes)} of "
                          "the layout's rules, and only one may take the devices that remain; add "
                          f"\"{open_axes[-1]}=1\" or more.")

    @property
    def _splits(self):
        return [(axis, _axes_tuple(mesh_axes)) for axis, mesh_axes in (*self.rules, *self.at_rest_rules)]

    @property
    def mesh(self) -> dict[str, int]:
        """Devices along each mesh axis, without the open axis."""
        mesh = {}
        if not isinstance(self.mesh_shape, str):
            raise Refusal(f"MESH_SHAPE must be text like \"data=4,model=2\", not {self.mesh_shape!r}.")
        for entry in filter(None, (part.strip() for part in self.mesh_shape.split(","))):
            name, _, size = (word.strip() for word in entry.partition("="))
            if not name or not size.isdecimal() or int(size) < 1 or name in mesh:
                raise Refusal(f"MESH_SHAPE must read like \"data=4,model=2\", each axis once, not "
                              f"{self.mesh_shape!r}.")
            mesh[name] = int(size)
        return mesh

    @property
    def is_auto(self) -> bool:
        """Whether mesh and rules are left to `choose`."""
        return not (self.mesh or self._splits)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh, without the open axis."""
        return math.prod(self.mesh.values())

    @property
    def open_axes(self) -> list[str]:
        """Mesh axes of the rules that `mesh_shape` leaves out, at most one."""
        return sorted({axis for _, axes in self._splits for axis in axes} - set(self.mesh))

    @property
    def is_one_program(self) -> bool:
        """Whether one program is cut over the devices."""
        return self.backend == "dtensor" or self.backend in ("auto", "pjrt") and self.num_devices > 1

    @property
    def stores_pieces(self) -> bool:
        """Whether devices store pieces of the variables, not copies."""
        return self.backend in ("auto", "dtensor", "pjrt")

    def resolve(self, num_devices: int, device_type: str) -> "Layout":
        """Returns the layout with its open axis filled in, or one device for `is_auto`."""
        if self.is_auto:
            return dataclasses.replace(self, mesh_shape="data=1")
        open_axes, size = self.open_axes, self.num_devices
        if open_axes and num_devices % size == 0:
            return dataclasses.replace(self, mesh_shape=mesh_shape({open_axes[0]: num_devices // size, **self.mesh}))
        if size == num_devices or (size == 1 and not open_axes):
            return self
        raise Refusal(
            f"MESH_SHAPE {self.mesh_shape!r} is for {'a multiple of ' if open_axes else ''}{size} devices, but there "
            f"{'is' if num_devices == 1 else 'are'} {num_devices} ({device_type}); make the product of its sizes "
            f"{num_devices}" + (f", or have {size} virtual devices on this machine's CPU with --devices={size}."
                             if device_type == "CPU" else "."))

    def check_processes(self, count: int) -> None:
        """Raises Refusal if several processes would share one device."""
        if count > 1 and self.num_devices == 1 and not self.open_axes:
            raise Refusal(f"A layout of one device leaves some of the {count} processes without any; use a layout of "
                          "several devices, such as gin/layouts/data.gin, or one process.")

    @property
    def axes_over_several(self) -> list[str]:
        """Logical axes that `rules` split over several mesh axes."""
        return [logical for logical in dict(self.rules)
                if sum(self.mesh.get(axis, 1) > 1 for axis in self.mesh_axes(logical)) > 1]

    def spec(self, axes: Sequence[str | None], at_rest: bool = False) -> tuple[tuple[str, ...], ...]:
        """Returns the mesh axes that split each dimension, outermost first; () for an unsplit dimension.

        Args:
            at_rest: Whether the tensor is stored, not in use.
        """
        spec: list[tuple[str, ...]] = [()] * len(axes)
        for rules in (self.rules, self.at_rest_rules)[:1 + at_rest]:
            rules = dict(rules)
            for index, axis in enumerate(axes):
                if not spec[index]:
                    taken = {mesh_axis for entry in spec for mesh_axis in entry}
                    spec[index] = tuple(mesh_axis for mesh_axis in _axes_tuple(rules.get(axis, ()))
                                        if mesh_axis not in taken)
        return tuple(spec)

    def piece(self, shape: Sequence[int], spec: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """Returns the shape of a device's piece, the longest if a dimension does not divide."""
        return tuple(math.ceil(size / self._count(axes)) for size, axes in zip(shape, spec, strict=True))

    def stored_bytes(self, weights: Iterable) -> int:
        """Returns each device's bytes of `SwitchConfig.weights` in float32 and of their gradients, stored in pieces."""
        return 8 * sum(weight.count * math.prod(self.piece(weight.shape, self.spec(weight.axes, at_rest=True)))
                       for weight in weights)

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Returns the mesh axes that can split a logical axis."""
        return _axes_tuple(dict(self.rules).get(axis, ()))

    def num_pieces(self, axis: str) -> int:
        """Returns the number of pieces along a logical axis of activations."""
        return self._count(self.mesh_axes(axis))

    def _count(self, mesh_axes):
        return math.prod(self.mesh.get(axis, 1) for axis in mesh_axes)

    def uneven(self, sizes: dict[str, int]) -> Iterator[tuple[str, tuple[str, ...], int]]:
        """Yields logical axes (`SwitchConfig.axis_sizes`) with unequal pieces, their mesh axes and their pieces."""
        for axis, mesh_axes in self._splits:
            if sizes.get(axis, 0) % (pieces := self._count(mesh_axes)):
                yield axis, mesh_axes, pieces

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Raises Refusal unless the pieces of every logical axis are equal."""
        for axis, mesh_axes, pieces in self.uneven(sizes):
            size = sizes[axis]
            divisor = max(count for count in range(1, pieces + 1) if size % count == 0)
            names = " times ".join(map(repr, mesh_axes))
            other = f"{mesh_axes[0]}={divisor}" if len(mesh_axes) == 1 else f"sizes whose product is {divisor}"
            raise Refusal(
                f"The layout cuts {_SOURCES[axis]} ({axis!r}, {size}) over the {pieces} devices of mesh axis "
                f"{names}, which must divide it; make it a multiple of {pieces}, or set MESH_SHAPE to {other}.")


def _axes_tuple(axes):
    return (axes,) if isinstance(axes, str) else tuple(axes)


def choose(num_devices: int, config: SwitchConfig | None) -> tuple[str, Layout]:
    """Returns the gin file, and its layout, for a run on several devices that names no layout.

    The first of these with equal pieces of the model:

    1. The file made for this number of devices and experts.
    2. Experts over as many devices as divide them, all devices if the model is dense, dense weights in pieces over
       up to 8 neighbours, and copies of both over the rest: fully_sharded.gin up to 8 devices without copies,
       else fully_sharded_experts.gin.
    3. data.gin, also for a user's own model (config None).
    """
    files = {"data": ""}
    if config is not None:
        shards = math.gcd(config.num_experts, num_devices)
        block = math.gcd(shards, _LARGEST_BLOCK)
        mesh = mesh_shape({"expert": shards // block, "fsdp": block, "data": num_devices // shards})
        name = "fully_sharded" if block == num_devices else "fully_sharded_experts"
        pod = _PODS.get((num_devices, config.num_experts), name)
        files = {pod: "", name: "" if block == num_devices else mesh, **files}
    for name, mesh in files.items():
        file = f"gin/layouts/{name}.gin"
        gin = gin_syntax.read([file], [f"MESH_SHAPE={mesh!r}"] if mesh else ())
        layout = gin.check().part(parts.LAYOUT).make()
        if config is None or not any(layout.resolve(num_devices, "").uneven(config.axis_sizes)):
            break
    return file, layout


def mesh_shape(mesh: dict[str, int]) -> str:
    """Returns the text of a mesh, such as "data=4,model=2"."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
