"""An upcycled model, from a folder of dense weights of any format to a checkpoint."""

import dataclasses
import pathlib

import numpy as np

from switch_tf.configs import policies
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import converting, formats, own, source_vocabulary, weight_source
from switch_tf.conversion.formats import Format
from switch_tf.surgery import compatibility, upcycled_slots
from switch_tf.surgery.kernels import Changes
from switch_tf.surgery.upcycling import gate_scale, gate_sums, open_upcycled


def upcycle_checkpoint(source: pathlib.Path, source_format: Format, output: pathlib.Path, config: SwitchConfig,
                       changes: Changes, with_optimizer: bool = False) -> tuple[dict, str]:
    """Upcycles the weights of a folder, a portion at a time. After a kill, the same call goes on.

    Args:
        source: Folder of the dense weights.
        source_format: Its Format. One that does not describe its model is read as the dense twin of `config`.
        output: New or empty folder.
        config, changes: See `open_upcycled`.
        with_optimizer: Whether Adafactor's state is copied, too. This takes the memory of both models, and begins anew
            after a kill.

    Returns:
        (JSON object, text for people).

    Raises:
        Refusal: The weights are damaged or do not fit, there is no state of Adafactor, or the folder cannot be written.
    """
    twin, step = None if source_format.describes_model else compatibility.dense_twin(config), None
    with source_format.at_hand(source, with_optimizer) as local:
        dense, vocabulary = source_format.module.open_weights(local, twin), source_vocabulary.find(source, local)
        upcycled = open_upcycled(dense, config, changes)
        if with_optimizer:
            model, sparse = weight_source.read_model(dense), weight_source.read_model(upcycled)
            optimizer = upcycled_slots.upcycled(model, source_format.module.read_optimizer(local, model), sparse)
            own.write_weights(weight_source.of_model(sparse), output, vocabulary.content, optimizer=optimizer)
            step = int(optimizer.iterations.numpy())
        else:
            identity = converting.identity_of(source, source_format, formats.SWITCH_TF, output, config,
                                              vocabulary.content) | dataclasses.asdict(changes)
            own.write_weights(upcycled, output, vocabulary.content, identity)
    name, lines = converting.start_from(output, vocabulary, step)
    result = {"from": str(source), "format": source_format.name, "output": str(output),
              "num_parameters": config.num_parameters, "num_dense_parameters": dense.config.num_parameters,
              "sparse_layers": list(config.sparse_layer_names), "num_experts": config.num_experts,
              "expert_width": config.expert_width, "slices": dense.config.d_ff // config.expert_width, "step": step,
              "vocabulary": name}
    advice = _advice_on_slices(config, result["slices"])
    sums = {layer: gate_sums(upcycled, layer) for layer in config.sparse_layer_names}
    scales = {layer: gate_scale(values, result["slices"]) for layer, values in sums.items()}
    result |= {"gate_sums": {layer: float(values.mean()) for layer, values in sums.items()}, "gate_scales": scales}
    if not advice:
        is_even = all(np.ptp(values) < 1e-4 for values in sums.values())
        advice = [_advice_on_scale(changes.gate_scale, result["gate_sums"], scales, is_even)]
    return result, "\n".join([_describe(result), *advice, *lines])


def _describe(result):
    """Returns what became of the dense model in words."""
    slices = result["slices"]
    made_of = "a copy of the dense layer" if slices == 1 else f"one of {slices} slices of the dense layer"
    state = "" if result["step"] is None else f" With the slots of Adafactor at step {result['step']:,}."
    return (f"{result['num_dense_parameters']:,} parameters of {result['from']} ({result['format']}) became "
            f"{result['num_parameters']:,} in {result['output']}: {len(result['sparse_layers'])} sparse layers of "
            f"{result['num_experts']} experts, each {made_of}.{state}")


def _advice_on_scale(scale, sums, scales, is_even):
    """Returns a line about the size of what sparse layers compute, in comparison with the dense ones."""
    def shown(values):
        low, high = min(values), max(values)
        return f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}"

    wanted, layers = shown(scales.values()), "layer" if len(scales) == 1 else "layers"
    kept = "keeps the function of the dense model" if is_even else "keeps the mean size of the layers' outputs"
    if scale == "auto":
        return f"--gate_scale=auto was {wanted} and {kept}, as long as no token is dropped."
    if all(abs(scale / one - 1) < 0.01 for one in scales.values()):
        return f"--gate_scale={scale:.4g} {kept}, as long as no token is dropped."
    return (f"The gates of a token add up to {shown(sums.values())} in the sparse {layers}, so these start with "
            f"{shown([scale / one for one in scales.values()])} of the dense layers' outputs; --gate_scale=auto "
            f"({wanted}) {kept}.")


def _advice_on_slices(config, num_slices):
    """Returns a line about tokens that get fewer slices than make up a dense layer."""
    for is_decoder, layers in enumerate((config.encoder_sparse_layers, config.decoder_sparse_layers)):
        policy, count = policies.get(config.routing(bool(is_decoder))[0]), config.num_choices(bool(is_decoder))
        if layers and not policy.experts_choose and count < num_slices:
            return [f"A token of the {('encoder', 'decoder')[is_decoder]} gets {count} of the {num_slices} slices; "
                    f"routing_policy='top_n' with num_selected_experts={num_slices} gives it all of them."]
    return []
