"""Sparse upcycling: experts that start as copies of a dense feed-forward layer (arXiv 2212.05055)."""

import math
import pathlib
import zlib

import numpy as np

from switch_tf.configs import policies
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import own, source_vocabulary
from switch_tf.conversion.converting import start_from
from switch_tf.conversion.formats import Format
from switch_tf.conversion.linked_weights import check_memory, variables_of
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.reporting import progress
from switch_tf.surgery import compatibility, kernels
from switch_tf.surgery.kernels import Changes


def upcycle(dense: SwitchTransformer, config: SwitchConfig, changes: Changes) -> SwitchTransformer:
    """Makes a sparse model whose experts are copies of the layers of a dense one, with a fresh router.

    Args:
        dense: SwitchTransformer without experts.
        config: SwitchConfig of the sparse model, with all else equal.
        changes: Changes.

    Returns:
        SwitchTransformer with float32 weights.

    Raises:
        Refusal: The models differ in more than experts and routers.
    """
    num_slices = compatibility.check(dense.config, config)
    check_memory(config)
    model = SwitchTransformer(config)
    model.build()
    old, new = variables_of(dense), variables_of(model)
    layers = [f"{layer}/mlp/" for layer in config.sparse_layer_names]
    with progress.bar(4 * config.num_parameters, "upcycling") as bar:
        for name, variable in new.items():
            if not name.startswith(tuple(layers)):
                variable.assign(old[name].numpy())
                bar.update(4 * math.prod(variable.shape))
        for layer in layers:
            of_layer = {name.removeprefix(layer): variable for name, variable in old.items() if name.startswith(layer)}
            for name, weight in _layer_weights(layer, of_layer, config, num_slices, changes):
                if layer + name in new:  # a policy such as "hash" has no router kernel
                    new[layer + name].assign(weight)
                    bar.update(4 * weight.size)
    return model


def _layer_weights(layer, dense, config, num_slices, changes):
    """Yields name and value of each weight of a sparse layer. Draws depend on the seed and the layer alone."""
    generator = np.random.default_rng([changes.seed, zlib.crc32(layer.encode())])
    yield "router/kernel", kernels.router_kernel(config.d_model, config.num_experts, num_slices, config.init_scale,
                                                 generator)
    units = kernels.drawn_units(config.num_experts, config.expert_width, changes.reinitialize, generator)
    for name, variable in sorted(dense.items()):
        is_output = name == "wo"
        stacked = kernels.stacked(np.asarray(variable.numpy(), np.float32), 0 if is_output else 1, config.expert_width,
                                  units, changes.noise, generator)
        if is_output:
            stacked *= np.float32(changes.gate_scale)
        yield f"experts/{name}", stacked


def upcycle_checkpoint(source: pathlib.Path, source_format: Format, output: pathlib.Path, config: SwitchConfig,
                       changes: Changes) -> tuple[dict, str]:
    """Upcycles the weights of a folder, which may be of any format.

    Args:
        source: Folder of the dense weights.
        source_format: Its Format. One that does not describe its model is read as the dense twin of `config`.
        output: New or empty folder.
        config, changes: See `upcycle`.

    Returns:
        (JSON object, text for people).

    Raises:
        Refusal: The weights are damaged or do not fit, or the folder cannot be written.
    """
    twin = None if source_format.describes_model else compatibility.dense_twin(config)
    with source_format.at_hand(source) as local:
        dense, vocabulary = source_format.read(local, twin), source_vocabulary.find(source, local)
    model = upcycle(dense, config, changes)
    own.to_switch_tf(model, output, vocabulary.content)
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
