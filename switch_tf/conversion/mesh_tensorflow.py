"""Reads Mesh TensorFlow's checkpoints of T5 1.0, T5 1.1, mT5 and their mixtures of experts."""

import pathlib
import re
from collections.abc import Collection, Mapping

from switch_tf import checks
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import linked_weights, mesh_tensorflow_file, mesh_tensorflow_slots
from switch_tf.conversion.mesh_tensorflow_layers import (
    CROSS_ATTENTION,
    DENSE,
    EXPERTS,
    NORMS,
    SELF_ATTENTION,
    Layer,
    layers_of,
)
from switch_tf.conversion.rules import Rule, Rules
from switch_tf.conversion.weight_source import WeightSource
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.refusals import Refusal

EMBEDDING = "shared/embedding"
# A router's kernel is named after the routing -> routing_policy.
GATINGS = {"switch_gating": "switch", "top_2_gating": "top2", "top_n_gating": "top_n", "ntlb_gating": "ntlb",
           "switch_max_gating": "batch_prioritized", "expert_selection_gating": "expert_choice"}
_SKIPPED = re.compile(rf"{mesh_tensorflow_file.STEP}|{mesh_tensorflow_slots.SLOT.pattern}")  # the optimizer's
_BIAS = f"{SELF_ATTENTION}/relative_attention_bias"


def from_mesh_tensorflow(folder: str | pathlib.Path, config: SwitchConfig | None) -> SwitchTransformer:
    """Reads a model from a checkpoint of Mesh TensorFlow, one variable at a time.

    Args:
        folder: Path of a folder with the file `checkpoint`, or of one checkpoint in it, such as
            `folder/model.ckpt-1000000`.
        config: SwitchConfig of the model, which the checkpoint does not describe.

    Returns:
        SwitchTransformer with float32 weights.

    Raises:
        Refusal: a file is missing or damaged, or the checkpoint is of another model.
    """
    return linked_weights.read_model(open_mesh_tensorflow(folder, config))


def open_mesh_tensorflow(folder: str | pathlib.Path, config: SwitchConfig | None) -> WeightSource:
    """Opens the weights of a checkpoint without reading them. Arguments and errors as in `from_mesh_tensorflow`."""
    path = checks.path("folder", folder)
    prefix, tensors = _opened(path)
    if not isinstance(config, SwitchConfig):
        raise linked_weights.without_config("Mesh TensorFlow", path, tensors)
    return linked_weights.open_linked(config, _checked_rules(config, tensors), tensors, prefix)


def read_optimizer(folder: pathlib.Path, model: SwitchTransformer) -> Adafactor:
    """Returns the Adafactor of the same checkpoint. See `mesh_tensorflow_slots.read_optimizer`."""
    prefix, tensors = _opened(folder)
    return mesh_tensorflow_slots.read_optimizer(prefix, model, _checked_rules(model.config, tensors), tensors)


def _opened(path):
    """Returns the path of the checkpoint that a path names, and its weights."""
    if not mesh_tensorflow_file.is_tensorflow(path):
        raise Refusal(f"{str(path)!r} must be a folder with a checkpoint of Mesh TensorFlow, such as "
                      "model.ckpt-1000000.index and its .data files, or the path of one, such as "
                      "FOLDER/model.ckpt-1000000.")
    prefix = mesh_tensorflow_file.prefix_of(path)
    tensors = mesh_tensorflow_file.open_variables(prefix, lambda name: not _SKIPPED.fullmatch(name))
    if EMBEDDING not in tensors:
        raise Refusal(f"{prefix} must hold {EMBEDDING!r}, as Mesh TensorFlow's models of encoder and decoder do, and "
                      f"holds {checks.shown(sorted(tensors))}.")
    return prefix, tensors


def _checked_rules(config: SwitchConfig, names: Collection[str]) -> Rules:
    """Returns the rules of a checkpoint, whose layers are compared with those of a configuration."""
    if config.extra_mlp or config.has_attention_experts:
        field = "extra_mlp=True" if config.extra_mlp else f"expert_sublayers={config.expert_sublayers!r}"
        raise Refusal(f"No checkpoint of Mesh TensorFlow is read into a model with {field}; give the configuration of "
                      "a model whose experts are feed-forward layers alone.")
    positions = next((name for name in names if name.endswith("positional_embedding")), None)
    if positions is not None:
        raise Refusal(f"The checkpoint has learned positions ({positions!r}), and models of this package have position "
                      "biases; take one trained with them, relative_attention_type = \"bias_shared\" as T5's.")
    layers = {stack: layers_of(stack, names) for stack in ("encoder", "decoder")}
    for stack, found in layers.items():
        _check_layers(stack, found, config)
        _check_routing(stack, found, names, config)
        has_layer_biases = any(f"{layer.scopes[0]}/{_BIAS}" in names for layer in found[1:])
        if has_layer_biases and not config.relative_attention_per_layer:
            raise Refusal(f"The checkpoint's {stack} has a position bias for each layer, and the configuration one for "
                          "each stack; add --gin.SwitchConfig.relative_attention_per_layer=True to the --gin_file of "
                          "its model.")
    return rules_of(layers, names, config.relative_attention_per_layer)


def _check_layers(stack, layers, config):
    """Compares the number of layers, and which of them have experts."""
    count = getattr(config, f"num_{stack}_layers")
    if len(layers) != count:
        raise Refusal(f"The checkpoint's {stack} has {len(layers)} layers, but its configuration asks for {count}; "
                      "give the --gin_file of its model.")
    sparse = tuple(index for index, layer in enumerate(layers) if layer.is_sparse)
    wanted = getattr(config, f"{stack}_sparse_layers")
    if sparse == wanted:
        return
    way_out = ("give the --gin_file of a sparse model" if not config.num_experts else
               f"add --gin.SwitchConfig.{stack}_sparse_indices=\"{str(sparse).replace(' ', '')}\"" if sparse else
               "give the --gin_file of a dense model")
    has, asks = (f"experts in layers {', '.join(map(str, indices))}" if indices else "no experts"
                 for indices in (sparse, wanted))
    raise Refusal(f"The checkpoint's {stack} has {has}, but its configuration asks for {asks}, counted from 0; "
                  f"{way_out}.")


def _check_routing(stack, layers, names, config):
    """Compares the routing, which a checkpoint shows by the names of its routers."""
    is_decoder = stack == "decoder"
    policy = config.routing(is_decoder)[0]
    for gating in (gating for layer in layers if layer.is_sparse for gating in _gatings(layer, names)):
        if GATINGS[gating] != policy:
            field = "decoder_routing_policy" if is_decoder and config.decoder_routing_policy else "routing_policy"
            raise Refusal(f"The checkpoint's {stack} has routers of {gating}, which is {GATINGS[gating]!r} here, but "
                          f"its configuration asks for {policy!r}; add "
                          f"--gin.SwitchConfig.{field}=\"'{GATINGS[gating]}'\".")


def _gatings(layer, names):
    """Returns the names of the routers in a sparse layer; an undamaged one has one."""
    return [gating for gating in GATINGS if f"{layer.scopes[-1]}/{EXPERTS}/{gating}/kernel" in names]


def rules_of(layers: Mapping[str, list[Layer]], names: Collection[str], has_layer_biases: bool = False) -> Rules:
    """Returns the rules of a checkpoint.

    Args:
        layers: "encoder" and "decoder" -> layers.
        names: Names of the checkpoint's variables, which show the names of norms and routers.
        has_layer_biases: bool. Whether each layer has a position bias, and not just the first one of a stack.
    """
    norm, final = NORMS[0], NORMS[0]
    if any(name.endswith(f"/{NORMS[1]}/scale") for name in names):
        norm, final = NORMS[1], f"final_{NORMS[1]}"
    rules = [Rule("token_embedder/embedding", EMBEDDING), Rule("logits_dense/kernel", "decoder/logits/kernel")]
    for stack, found in layers.items():
        rules.append(Rule(f"{stack}/{stack}_norm/scale", f"{stack}/{final}/scale"))
        for index, layer in enumerate(found):
            rules += _layer_rules(f"{stack}/layers_{index}", layer, norm, names)
            if has_layer_biases or index == 0:
                ours = f"{stack}/layers_{index}" if has_layer_biases else stack
                rules.append(Rule(f"{ours}/relpos_bias/rel_embedding", f"{layer.scopes[0]}/{_BIAS}"))
    return Rules(rules, fields={"kernel": "wi|wi_0|wi_1|wo"})


def _layer_rules(ours, layer, norm, names):
    attentions = [("attention", SELF_ATTENTION, "attention")] if len(layer.scopes) == 2 else [
        ("self_attention", SELF_ATTENTION, "self_attention"),
        ("encoder_decoder_attention", CROSS_ATTENTION, "cross_attention")]
    rules = []
    for (name, kind, norm_of), scope in zip(attentions, layer.scopes[:-1], strict=True):
        rules += [Rule(f"{ours}/{name}/{kernel}", f"{scope}/{kind}/{kernel[0]}", merge=merge)
                  for kernel, merge in (("query", 1), ("key", 1), ("value", 1), ("out", 0))]
        rules.append(Rule(f"{ours}/pre_{norm_of}_layer_norm/scale", f"{scope}/{norm}/scale"))
    scope = layer.scopes[-1]
    rules.append(Rule(f"{ours}/pre_mlp_layer_norm/scale", f"{scope}/{norm}/scale"))
    if not layer.is_sparse:
        return [*rules, Rule(f"{ours}/mlp/<kernel>", f"{scope}/{DENSE}/<kernel>/kernel")]
    gating = next(iter([*_gatings(layer, names), *GATINGS]))
    return [*rules, Rule(f"{ours}/mlp/experts/<kernel>", f"{scope}/{EXPERTS}/<kernel>/kernel"),
            Rule(f"{ours}/mlp/router/kernel", f"{scope}/{EXPERTS}/{gating}/kernel")]
