"""A layout: the shape of the device mesh and which mesh axis splits each logical axis."""

import dataclasses
import math
from collections.abc import Iterable

from switch_tf.checks import shown
from switch_tf.configs.choices import check_choice
from switch_tf.partitioning.backend_table import BACKENDS
from switch_tf.refusals import Refusal

# T5X's words. `router_expert` names the columns of a router, which are never split, unlike the experts themselves;
# `expert_embed` the width of tokens that travel to the experts and back.
LOGICAL_AXES = frozenset((
    "batch", "length", "vocab", "embed", "heads", "kv", "mlp", "relpos_buckets",
    "group", "expert", "expert_embed", "expert_mlp", "router_expert", "capacity"))

# Where the size of a logical axis comes from, in the words of whoever can change it.
_SOURCES = {"vocab": "vocab_size", "embed": "d_model", "heads": "num_heads", "kv": "d_kv", "mlp": "d_ff",
            "expert": "num_experts", "expert_embed": "d_model", "expert_mlp": "d_ff"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is cut over devices. The files of `gin/layouts/` bind it; without one a run uses one device.

    Args:
        mesh_shape: str, such as "data=4,model=2": names of mesh axes and their sizes in devices, separated by commas.
            An axis that `rules` need but the text leaves out takes the devices that remain; only one may.
        rules: pairs (logical axis, mesh axis, or several, the outermost first). Logical axes without a rule are not
            split. In one tensor a mesh axis splits the first dimension that has a rule for it: where experts lie over
            "expert" and groups over ("data", "expert"), the buffers of the experts have their groups over "data".
        at_rest_rules: likewise for weights and optimizer slots alone, which are gathered before use.
        backend: "dtensor": one program that TensorFlow cuts. "one_device", "mirrored", "multi_worker_mirrored", "tpu":
            the strategies of tf.distribute, which copy every variable to every device. "auto": "dtensor", where there
            is more than one device.

    Raises:
        Refusal: a mesh that cannot be read, or an unknown axis or back end.
    """

    mesh_shape: str = "data=1"
    rules: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    at_rest_rules: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    backend: str = "auto"

    def __post_init__(self):
        check_choice("backend", self.backend, BACKENDS)
        for name in ("rules", "at_rest_rules"):
            if not isinstance(getattr(self, name), tuple | list):
                raise Refusal(f"The {name} of a layout are a tuple of pairs of a logical axis and a mesh axis, such "
                              f"as (('batch', 'data'),), not {shown(getattr(self, name))}.")
        for rule in (*self.rules, *self.at_rest_rules):
            _check_rule(rule)
        open_axes = self.open_axes
        if len(open_axes) > 1:
            raise Refusal(f"MESH_SHAPE {self.mesh_shape!r} leaves out the mesh axes {' and '.join(open_axes)} of "
                          "the layout's rules, and only one may take the devices that remain; add "
                          f"\"{open_axes[-1]}=1\" or more.")

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> number of devices along it, as `mesh_shape` says; the open axis is not in it."""
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
    def num_devices(self) -> int:
        """Devices of the mesh; of its closed axes alone where one is open."""
        return math.prod(self.mesh.values())

    @property
    def open_axes(self) -> list[str]:
        """Mesh axes of the rules that `mesh_shape` leaves out: at most one, which takes the devices that remain."""
        mesh = self.mesh
        return sorted({axis for _, axes in (*self.rules, *self.at_rest_rules) for axis in _several(axes)} - set(mesh))

    @property
    def is_one_program(self) -> bool:
        """Whether a partitioner cuts one program over the devices, rather than each running its own."""
        return self.backend == "dtensor" or self.backend == "auto" and self.num_devices > 1

    def resolve(self, num_devices: int, device_type: str) -> "Layout":
        """The same layout with the open axis filled in, for so many devices.

        Raises:
            Refusal: the mesh does not have as many devices as there are. A mesh of one uses the first.
        """
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

    @property
    def axes_over_several(self) -> list[str]:
        """Logical axes that `rules` split over more than one mesh axis of more than one device."""
        return [logical for logical, axes in dict(self.rules).items()
                if sum(self.mesh.get(axis, 1) > 1 for axis in _several(axes)) > 1]

    def spec(self, axes, at_rest=False) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each dimension, the outermost first; none where it is not split.

        Args:
            axes: a logical axis or None for each dimension.
            at_rest: bool. For a weight or slot as it is stored, rather than as it is used.
        """
        spec = _claimed(axes, dict(self.rules), [()] * len(axes))
        return _claimed(axes, dict(self.at_rest_rules), spec) if at_rest else spec

    def piece(self, shape, spec) -> tuple[int, ...]:
        """Shape of the piece of a tensor that each device has; the longest, where a dimension does not divide.

        Args:
            shape: of the whole tensor.
            spec: from `spec`.
        """
        mesh = self.mesh
        return tuple(math.ceil(size / math.prod(mesh.get(axis, 1) for axis in axes))
                     for size, axes in zip(shape, spec, strict=True))

    def stored_bytes(self, weights: Iterable) -> int:
        """Returns the bytes of float32 weights and gradients that each device stores, without slots and activations.

        Args:
            weights: Weights of the model (`SwitchConfig.weights`).
        """
        return 8 * sum(weight.count * math.prod(self.piece(weight.shape, self.spec(weight.axes, at_rest=True)))
                       for weight in weights)

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """The mesh axes that may split activations and weights along this logical axis, the outermost first."""
        return _several(dict(self.rules).get(axis, ()))

    def num_pieces(self, axis: str) -> int:
        """Into how many pieces activations are cut along this logical axis."""
        mesh = self.mesh
        return math.prod(mesh.get(mesh_axis, 1) for mesh_axis in self.mesh_axes(axis))

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Raises Refusal unless every logical axis that is split divides.

        Args:
            sizes: logical axis -> length of it, of those that the model has (`SwitchConfig.axis_sizes`).
        """
        for axis, mesh_axes in (*self.rules, *self.at_rest_rules):
            mesh_axes, size = _several(mesh_axes), sizes.get(axis)
            pieces = math.prod(self.mesh.get(mesh_axis, 1) for mesh_axis in mesh_axes)
            if size is not None and size % pieces:
                divisor = max(count for count in range(1, pieces + 1) if size % count == 0)
                names = " times ".join(map(repr, mesh_axes))
                other = f"{mesh_axes[0]}={divisor}" if len(mesh_axes) == 1 else f"sizes whose product is {divisor}"
                raise Refusal(
                    f"The layout cuts {_SOURCES[axis]} ({axis!r}, {size}) over the {pieces} devices of mesh axis "
                    f"{names}, which must divide it; make it a multiple of {pieces}, or set MESH_SHAPE to {other}.")


def _several(axes):
    """Mesh axes of a rule, which may name one without a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _check_rule(rule):
    is_pair = isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)
    if not is_pair or not (isinstance(rule[1], str) or _are_names(rule[1])):
        raise Refusal("A rule of a layout is a pair of a logical axis and a mesh axis, such as ('batch', 'data'), "
                      f"or several, such as ('batch', ('data', 'expert')), not {shown(rule)}.")
    if rule[0] not in LOGICAL_AXES:
        raise Refusal(f"The layout splits the unknown logical axis {rule[0]!r}; the axes are "
                      f"{sorted(LOGICAL_AXES)}.")


def _are_names(axes):
    return isinstance(axes, tuple | list) and len(axes) > 0 and all(
        isinstance(axis, str) for axis in axes) and len(set(axes)) == len(axes)


def _claimed(axes, rules, spec):
    """Gives each dimension that `spec` does not split those mesh axes of its rule that no dimension has yet."""
    spec = list(spec)
    for index, axis in enumerate(axes):
        if not spec[index]:
            taken = {mesh_axis for entry in spec for mesh_axis in entry}
            spec[index] = tuple(one for one in _several(rules.get(axis, ())) if one not in taken)
    return tuple(spec)


def mesh_shape(mesh: dict[str, int]) -> str:
    """The text of a mesh, such as "data=4,model=2"."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
