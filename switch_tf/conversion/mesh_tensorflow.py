"""Reads Mesh TensorFlow's checkpoints of T5 1.0, T5 1.1, mT5 and their mixtures of experts.

Mesh TensorFlow repeats a block of sublayers. With two layers in a block, the third layer's attention is in
`encoder/block_001/layer_000/SelfAttention`, and its norm in `encoder/block_001/layer_000/rms_norm`.

Its Adafactor has x_slot_vr and x_slot_vc, or x_slot_v. As in `mesh_tensorflow/optimize.py`, "vr" is the mean over the
largest dimension, the first one of equals, and "vc" over the second largest, if both are large enough.
"""

import pathlib
import re

import numpy as np

from switch_tf import checks
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import mesh_tensorflow_file
from switch_tf.conversion.mesh_tensorflow_file import STEP
from switch_tf.conversion.weight_source import (
    MERGES,
    Rule,
    Rules,
    WeightSource,
    open_linked,
    read_adafactor,
    read_model,
    require_config,
    used_slots,
)
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.refusals import Refusal

EMBEDDING = "shared/embedding"
# Name of a router's kernel -> routing_policy.
GATINGS = {"switch_gating": "switch", "top_2_gating": "top2", "top_n_gating": "top_n", "ntlb_gating": "ntlb",
           "switch_max_gating": "batch_prioritized", "expert_selection_gating": "expert_choice"}
_SELF_ATTENTION, _CROSS_ATTENTION, _DENSE, _EXPERTS = "SelfAttention", "EncDecAttention", "DenseReluDense", "MoE1D"
_ORDER = {"encoder": ((_SELF_ATTENTION,), (_DENSE, _EXPERTS)),
          "decoder": ((_SELF_ATTENTION,), (_CROSS_ATTENTION,), (_DENSE, _EXPERTS))}
_NORMS = ("rms_norm", "layer_norm")  # the second from LayerStack's legacy form
# Stack and kind -> our attention and its norm.
_NAMES = {("encoder", _SELF_ATTENTION): ("attention", "attention"),
          ("decoder", _SELF_ATTENTION): ("self_attention", "self_attention"),
          ("decoder", _CROSS_ATTENTION): ("encoder_decoder_attention", "cross_attention")}
_SUBLAYER = re.compile(r"(encoder|decoder)/block_(\d{3,6})/layer_(\d{3,6})/(\w+)/.+")
_SLOT = re.compile(r".+_slot_(vr|vc|v|m)")


def from_mesh_tensorflow(folder: str | pathlib.Path, config: SwitchConfig | None) -> SwitchTransformer:
    """Reads a model from a checkpoint of Mesh TensorFlow, one variable at a time, with float32 weights.

    Args:
        folder: Folder with the file `checkpoint`, or a checkpoint such as `folder/model.ckpt-1000000`.
        config: The checkpoint does not describe its model.
    """
    return read_model(open_weights(folder, config))


def open_weights(folder: str | pathlib.Path, config: SwitchConfig | None) -> WeightSource:
    """Opens weights without reading them, see `from_mesh_tensorflow`."""
    path = checks.path("folder", folder)
    prefix, tensors = _open(path)
    require_config(config, "Mesh TensorFlow", path, tensors)
    return open_linked(config, _rules_of(config, tensors), tensors, prefix)


def _open(path):
    if not mesh_tensorflow_file.is_tensorflow(path):
        raise Refusal(f"{str(path)!r} must be a folder with a checkpoint of Mesh TensorFlow, such as "
                      "model.ckpt-1000000.index and its .data files, or the path of one, such as "
                      "FOLDER/model.ckpt-1000000.")
    prefix = mesh_tensorflow_file.prefix_of(path)
    tensors = mesh_tensorflow_file.open_variables(
        prefix, lambda name: name != STEP and not _SLOT.fullmatch(name))
    if EMBEDDING not in tensors:
        raise Refusal(f"{prefix} must hold {EMBEDDING!r}, as Mesh TensorFlow's models of encoder and decoder do, and "
                      f"holds {checks.shown(sorted(tensors))}.")
    return prefix, tensors


def read_optimizer(folder: pathlib.Path, model: SwitchTransformer) -> Adafactor:
    """Returns the Adafactor of a checkpoint. `model` was read from it."""
    prefix, weights = _open(folder)
    state = mesh_tensorflow_file.open_variables(prefix, lambda name: name not in weights)
    step, slots = state.pop(STEP, None), {}
    for name, tensor in state.items():
        weight, _, slot = name.rpartition("_slot_")
        slots.setdefault(weight, {})[slot] = tensor
    for name, group in slots.items():
        if name in weights:
            shape = weights[name].shape
            largest = np.argsort([-size for size in shape], kind="stable").tolist()
            slots[name] = used_slots(name, shape, group, {"v_row": ("vr", largest[:1]), "v_col": ("vc", largest[1:2])},
                                     "Mesh TensorFlow")
    return read_adafactor(model, _rules_of(model.config, weights), slots, STEP, step, prefix)


def _sublayers_of(stack, names):
    """Returns scope and kind of a stack's sublayers in order."""
    kinds = {}  # (block, layer) -> names
    for match in filter(None, map(_SUBLAYER.fullmatch, names)):
        if match[1] == stack:
            kinds.setdefault((int(match[2]), int(match[3])), set()).update({match[4]}.difference(_NORMS))
    order = _ORDER[stack]
    listed, known = ", ".join(map(" or ".join, order)), {kind for choice in _ORDER["decoder"] for kind in choice}
    sublayers = []
    for block in range(1 + max((block for block, _ in kinds), default=-1)):
        for number in range(1 + max(number for _, number in kinds)):
            scope, held = f"{stack}/block_{block:03d}/layer_{number:03d}", kinds.get((block, number))
            if held is None:
                raise Refusal(f"The checkpoint lacks {scope}, and has other layers of that block or later ones; it is "
                              "incomplete.")
            if not held:
                raise Refusal(f"The checkpoint holds the norm of {scope} and nothing else of that layer; it is "
                              "incomplete.")
            if len(held) > 1 or not held <= known:
                raise Refusal(f"The checkpoint's {scope} holds {checks.shown(sorted(held))}, and a layer of Mesh "
                              f"TensorFlow that is read holds one of {', '.join(sorted(known))}.")
            (kind,) = held
            if kind not in order[len(sublayers) % len(order)]:
                raise Refusal(f"The checkpoint's {stack} must repeat {listed}, but {scope} is {kind}; other layers "
                              "have no place in a model of this package.")
            sublayers.append((scope, kind))
    if len(sublayers) % len(order):
        raise Refusal(f"The checkpoint's {stack} must repeat {listed}, but it ends with {sublayers[-1][0]}, which is "
                      f"{sublayers[-1][1]}; it is incomplete, or of another model.")
    return sublayers


def _rules_of(config, names):
    if config.extra_mlp or config.has_attention_experts:
        field = "extra_mlp=True" if config.extra_mlp else f"expert_sublayers={config.expert_sublayers!r}"
        raise Refusal(f"No checkpoint of Mesh TensorFlow is read into a model with {field}; give the configuration of "
                      "a model whose experts are feed-forward layers alone.")
    if positions := [name for name in names if name.endswith("positional_embedding")]:
        raise Refusal(f"The checkpoint has learned positions ({positions[0]!r}), and models of this package have "
                      "position biases; take one trained with them, relative_attention_type = \"bias_shared\" as T5's.")
    norm = final = _NORMS[0]
    if any(name.endswith(f"/{_NORMS[1]}/scale") for name in names):
        norm, final = _NORMS[1], f"final_{_NORMS[1]}"
    has_layer_biases = config.relative_attention_per_layer
    rules = [Rule("token_embedder/embedding", EMBEDDING), Rule("logits_dense/kernel", "decoder/logits/kernel")]
    for stack, order in _ORDER.items():
        sublayers = _sublayers_of(stack, names)
        _check_layers(stack, [kind for _, kind in sublayers[len(order) - 1::len(order)]], config)
        rules.append(Rule(f"{stack}/{stack}_norm/scale", f"{stack}/{final}/scale"))
        for place, (scope, kind) in enumerate(sublayers):
            index, number = divmod(place, len(order))
            layer = f"{stack}/layers_{index}"
            name, norm_of = _NAMES.get((stack, kind), ("mlp", "mlp"))
            rules.append(Rule(f"{layer}/pre_{norm_of}_layer_norm/scale", f"{scope}/{norm}/scale"))
            if kind == _EXPERTS:
                gating = _gating_of(scope, names, stack, config)
                rules += [Rule(f"{layer}/mlp/experts/<kernel>", f"{scope}/{kind}/<kernel>/kernel"),
                          Rule(f"{layer}/mlp/router/kernel", f"{scope}/{kind}/{gating}/kernel")]
            elif kind == _DENSE:
                rules.append(Rule(f"{layer}/mlp/<kernel>", f"{scope}/{kind}/<kernel>/kernel"))
            else:
                rules += [Rule(f"{layer}/{name}/{kernel}", f"{scope}/{kind}/{kernel[0]}", merge=merge)
                          for kernel, merge in MERGES.items()]
            bias = f"{scope}/{_SELF_ATTENTION}/relative_attention_bias"
            if number == 0 and (has_layer_biases or index == 0):
                rules.append(Rule(f"{layer if has_layer_biases else stack}/relpos_bias/rel_embedding", bias))
            elif number == 0 and bias in names:
                raise Refusal(f"The checkpoint's {stack} has a position bias for each layer, and the configuration one "
                              "for each stack; add --gin.SwitchConfig.relative_attention_per_layer=True to the "
                              "--gin_file of its model.")
    return Rules(rules)


def _check_layers(stack, last_kinds, config):
    count = getattr(config, f"num_{stack}_layers")
    if len(last_kinds) != count:
        raise Refusal(f"The checkpoint's {stack} has {len(last_kinds)} layers, but its configuration asks for {count}; "
                      "give the --gin_file of its model.")
    sparse = tuple(index for index, kind in enumerate(last_kinds) if kind == _EXPERTS)
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


def _gating_of(scope, names, stack, config):
    policy = config.routing(stack == "decoder")[0]
    gatings = [gating for gating in GATINGS if f"{scope}/{_EXPERTS}/{gating}/kernel" in names]
    for gating in gatings:
        if GATINGS[gating] != policy:
            field = "decoder_routing_policy" if stack == "decoder" and config.decoder_routing_policy else (
                "routing_policy")
            raise Refusal(f"The checkpoint's {stack} has routers of {gating}, which is {GATINGS[gating]!r} here, "
                          f"but its configuration asks for {policy!r}; add "
                          f"--gin.SwitchConfig.{field}=\"'{GATINGS[gating]}'\".")
    return next(iter([*gatings, *GATINGS]))
