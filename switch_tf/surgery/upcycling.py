"""Sparse upcycling: experts that start as copies of a dense feed-forward layer (arXiv 2212.05055)."""

import dataclasses
import functools
import zlib

import numpy as np

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion.weight_source import WeightSource, of_model, read_model, weights_of
from switch_tf.layers import grouping
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.models.transformer_layer import switch_feed_forward
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

    @functools.cache
    def scale(layer):
        if changes.gate_scale != "auto":
            return changes.gate_scale
        return gate_scale(gate_sums(WeightSource(config, weights, read), layer), num_slices)

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
        experts = _experts(origin, kernel, range(config.num_experts)[rows], config, changes)
        return experts * np.float32(scale(origin.layer)) if origin.hidden_axis == 0 else experts

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
    return np.stack(made)


def gate_sums(source: WeightSource, layer: str) -> np.ndarray:
    """Returns the sum of each token's gates in a sparse layer, <float32>[tokens], at inference without dropped tokens.

    The tokens are random. Their hidden states have the size that the layer's norm gives.

    Args:
        source: The upcycled weights.
        layer: Name of a sparse layer, such as "encoder/layers_1".
    """
    config, num_tokens = source.config, 1024
    sparse = switch_feed_forward(config, layer.startswith("decoder"), "float32")
    sparse.build((None, None, config.d_model))
    if sparse.router.weights:
        sparse.router.kernel.assign(source.read(f"{layer}/mlp/router/kernel", slice(None)))
    random = np.random.RandomState(0)
    tokens = random.standard_normal((1, num_tokens, config.d_model)).astype("float32")
    tokens *= source.read(f"{layer}/pre_mlp_layer_norm/scale", slice(None))
    capacity = grouping.expert_capacity(num_tokens, config.grouping, training=False) if (
        sparse.router.experts_choose) else num_tokens
    token_ids = random.randint(1, config.vocab_size, (1, num_tokens))
    decisions, _ = sparse.router(tokens, expert_capacity=capacity, token_ids=token_ids)
    return np.asarray(decisions.gates).sum(axis=-1)[0]


def gate_scale(sums: np.ndarray, num_slices: int) -> float:
    """Returns the factor of output kernels that keeps the mean size of a dense layer's output, to four digits.

    Args:
        sums: From `gate_sums`.
        num_slices: Number of slices that the hidden units of the dense layer are cut into. A token gets each equally.
    """
    return float(f"{num_slices / sums.mean():.4g}")


def _generator(changes, *place):
    return np.random.default_rng([changes.seed, zlib.crc32("/".join(map(str, place)).encode())])
