"""Sparse upcycling: experts that start as copies of a dense feed-forward layer (arXiv 2212.05055)."""

import dataclasses
import pathlib
import zlib

import numpy as np

from switch_tf.configs import policies
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import conversion_identity, formats, own_writing, source_vocabulary
from switch_tf.conversion.converting import start_from
from switch_tf.conversion.formats import Extras, Format
from switch_tf.conversion.linked_weights import read_model
from switch_tf.conversion.weight_source import WeightSource, of_model, weights_of
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.surgery import compatibility, kernels
from switch_tf.surgery.kernels import Changes


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
    origins = {name: _Origin.of(name, config) for name in weights}
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


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What a weight of the sparse model is made of.

    `layer`: the sparse layer, such as "encoder/layers_1", or None for a weight outside of the experts and routers.
    `dense`: name of the dense weight, or None for a router.
    """

    layer: str | None
    dense: str | None

    @classmethod
    def of(cls, name, config):
        layer = next((one for one in config.sparse_layer_names if name.startswith(f"{one}/mlp/")), None)
        if layer is None:
            return cls(None, name)
        kind, _, weight = name.removeprefix(f"{layer}/mlp/").partition("/")
        return cls(layer, f"{layer}/mlp/{weight}" if kind == "experts" else None)


def _experts(origin, dense, experts, config, changes):
    """Returns a kernel of some experts. Draws depend on the seed, the layer, the kernel and the expert alone."""
    is_output, width = origin.dense.endswith("/wo"), config.expert_width
    hidden_axis, spread = 0 if is_output else 1, changes.noise * float(dense.std())
    made = []
    for expert in experts:
        drawn = kernels.drawn_units(width, changes.reinitialize, _generator(changes, origin.layer, "units", expert))
        made.append(kernels.of_expert(dense, hidden_axis, width, expert, drawn, spread,
                                      _generator(changes, origin.dense, expert)))
    return np.stack(made) * np.float32(changes.gate_scale if is_output else 1.0)


def _generator(changes, *place):
    return np.random.default_rng([changes.seed, zlib.crc32("/".join(map(str, place)).encode())])


def upcycle_checkpoint(source: pathlib.Path, source_format: Format, output: pathlib.Path, config: SwitchConfig,
                       changes: Changes) -> tuple[dict, str]:
    """Upcycles the weights of a folder, which may be of any format. After a kill, the same call goes on.

    Args:
        source: Folder of the dense weights.
        source_format: Its Format. One that does not describe its model is read as the dense twin of `config`.
        output: New or empty folder.
        config, changes: See `open_upcycled`.

    Returns:
        (JSON object, text for people).

    Raises:
        Refusal: The weights are damaged or do not fit, or the folder cannot be written.
    """
    twin = None if source_format.describes_model else compatibility.dense_twin(config)
    with source_format.at_hand(source) as local:
        dense, vocabulary = source_format.open(local, twin), source_vocabulary.find(source, local)
        identity = conversion_identity.of(source, source_format, formats.SWITCH_TF, output, config,
                                          Extras(vocabulary.content))
        own_writing.write(open_upcycled(dense, config, changes), output, vocabulary.content,
                          identity | dataclasses.asdict(changes))
    name, lines = start_from(output, vocabulary)
    num_slices = dense.config.d_ff // config.expert_width
    result = {"from": str(source), "format": source_format.name, "output": str(output),
              "num_parameters": config.num_parameters, "num_dense_parameters": dense.config.num_parameters,
              "sparse_layers": list(config.sparse_layer_names), "num_experts": config.num_experts,
              "expert_width": config.expert_width, "slices": num_slices, "vocabulary": name}
    made_of = "a copy of the dense layer" if num_slices == 1 else f"one of {num_slices} slices of the dense layer"
    text = (f"{dense.config.num_parameters:,} parameters of {source} ({source_format.name}) became "
            f"{config.num_parameters:,} in {output}: {len(config.sparse_layer_names)} sparse layers of "
            f"{config.num_experts} experts, each {made_of}.")
    return result, "\n".join([text, *_advice(config, num_slices), *lines])


def _advice(config, num_slices):
    """Returns a line about tokens that get fewer slices than make up a dense layer."""
    for is_decoder, layers in enumerate((config.encoder_sparse_layers, config.decoder_sparse_layers)):
        policy, count = policies.get(config.routing(bool(is_decoder))[0]), config.num_choices(bool(is_decoder))
        if layers and not policy.experts_choose and count < num_slices:
            return [f"A token of the {('encoder', 'decoder')[is_decoder]} gets {count} of the {num_slices} slices; "
                    f"routing_policy='top_n' with num_selected_experts={num_slices} gives it all of them."]
    return []
