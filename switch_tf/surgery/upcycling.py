"""Sparse upcycling: experts that start as copies of a dense feed-forward layer (arXiv 2212.05055)."""

import dataclasses
import zlib

import numpy as np

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion.linked_weights import read_model
from switch_tf.conversion.weight_source import WeightSource, of_model, weights_of
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.surgery import compatibility, kernels
from switch_tf.surgery.kernels import Changes


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a weight of the sparse model comes from.

    `layer`: the sparse layer, such as "encoder/layers_1", or None for a weight outside of the experts and routers.
    `dense`: name of the dense weight, or None for a router.
    """

    layer: str | None
    dense: str | None

    @classmethod
    def of(cls, name: str, config: SwitchConfig) -> "Origin":
        """Returns that of a weight of the sparse model, such as "encoder/layers_1/mlp/experts/wo"."""
        layer = next((one for one in config.sparse_layer_names if name.startswith(f"{one}/mlp/")), None)
        if layer is None:
            return cls(None, name)
        kind, _, weight = name.removeprefix(f"{layer}/mlp/").partition("/")
        return cls(layer, f"{layer}/mlp/{weight}" if kind == "experts" else None)

    @property
    def hidden_axis(self) -> int:
        """Axis of the hidden units in a dense kernel of a sparse layer."""
        return 0 if self.dense is not None and self.dense.endswith("/wo") else 1


def upcycle(dense: SwitchTransformer, config: SwitchConfig, changes: Changes) -> SwitchTransformer:
    """Returns the model of `open_upcycled`, with float32 weights, for a dense model in memory."""
    return read_model(open_upcycled(of_model(dense), config, changes))


def open_upcycled(dense: WeightSource, config: SwitchConfig, changes: Changes) -> WeightSource:
    """Returns the weights of a sparse model whose experts are copies of the layers of a dense one.

    Reading some experts takes the memory of these and of one dense kernel.

    Args:
        dense: Weights of a model without experts.
        config: SwitchConfig of the sparse model, with all else equal. Its routers are drawn.
        changes: Changes.

    Raises:
        Refusal: The models differ in more than experts and routers.
    """
    num_slices = compatibility.check(dense.config, config)
    weights = weights_of(config)
    origins = {name: Origin.of(name, config) for name in weights}
    order = {name: place for place, name in enumerate(dense.weights)}

    def read(name, rows):
        origin = origins[name]
        if origin.layer is None:
            return dense.read(name, rows)
        if origin.dense is None:
            generator = _generator(changes, origin.layer, "router")
            return kernels.router_kernel(config.d_model, config.num_experts, num_slices, config.init_scale,
                                         generator)[rows]
        # Contiguous, because sums of a transposed array, as another format may give, are rounded otherwise.
        kernel = np.ascontiguousarray(dense.read(origin.dense, slice(None)))
        return _experts(origin, kernel, range(config.num_experts)[rows], config, changes)

    # In the order of the dense model, so that each kernel is near the one that was read before.
    names = sorted(origins, key=lambda name: order.get(origins[name].dense, -1))
    return WeightSource(config, {name: weights[name] for name in names}, read)


def _experts(origin, dense, experts, config, changes):
    """Returns a kernel of some experts. Draws depend on the seed, the layer, the kernel and the expert alone."""
    width, spread = config.expert_width, changes.noise * float(dense.std())
    made = []
    for expert in experts:
        drawn = kernels.drawn_units(width, changes.reinitialize, _generator(changes, origin.layer, "units", expert))
        made.append(kernels.of_expert(dense, origin.hidden_axis, width, expert, drawn, spread,
                                      _generator(changes, origin.dense, expert)))
    return np.stack(made) * np.float32(changes.gate_scale if origin.hidden_axis == 0 else 1.0)


def _generator(changes, *place):
    return np.random.default_rng([changes.seed, zlib.crc32("/".join(map(str, place)).encode())])
