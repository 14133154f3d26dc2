"""Reads T5X checkpoints of T5 1.0, T5 1.1, mT5 and Flaxformer's MoE models, scanned or not.

A scanned stack holds the kernels of its n layers in one array, "encoder/encoder/mlp/wi/kernel" of shape [d, n, f]. If
dense and sparse layers alternate, n blocks are scanned, and "subblock_0", "subblock_1", ... are the layers of a block.
Each such array is read as n arrays "encoder/layers_<i>/mlp/wi/kernel" of shape [d, f].

T5X's Adafactor has v_row and v_col, or v, and m for each weight. Unused arrays have shape (1,). `MultiOptimizer` has
None for weights that it does not train. As in `t5x/adafactor.py`, a matrix with two dimensions of at least 128 is
factored over them, the smaller one as rows. Arrays with more dimensions are factored by logical axes.
"""

import importlib
import pathlib
import re

import numpy as np

from switch_tf import checks
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import t5x_file
from switch_tf.conversion.t5x_file import STEP
from switch_tf.conversion.untrusted_files import Tensor, keeping_last
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

KEPT_SIZE = 2**28  # elements, 1 GiB in float32
_HEADS = re.compile(r".*attention/(?:(query|key|value)|out)/kernel")
_LAYER_BIAS = re.compile(r"target/(?:encoder|decoder)/layers_\d+/relpos_bias/rel_embedding")
_SCANNED = re.compile(r"target/(encoder|decoder)/\1/(?:subblock_(0|[1-9]\d{0,3})/)?(.+)")
_AXIS = 1
_SLOT = re.compile(r"state/param_states/(.+)/(v_row|v_col|v|m)")
_EMBED_LAST = re.compile(r".*/(?:embedding|out/kernel|wo/kernel)")


def _stack_rules(stack, attentions):
    layer = f"{stack}/layers_<i>"
    kernels = [Rule(f"{layer}/{attention}/{name}", f"target/{layer}/{attention}/{name}/kernel", merge=merge)
               for attention in attentions for name, merge in MERGES.items()]
    same = [f"{layer}/<norm>/scale", f"{stack}/{stack}_norm/scale", f"{stack}/relpos_bias/rel_embedding",
            f"{layer}/relpos_bias/rel_embedding"]
    return [
        *kernels, *(Rule(name, f"target/{name}") for name in same),
        Rule(f"{layer}/<mlp>/<kernel>", f"target/{layer}/<mlp>/<kernel>/kernel"),
        Rule(f"{layer}/mlp/experts/<kernel>", f"target/{layer}/mlp/expert/<kernel>/kernel"),
        Rule(f"{layer}/mlp/router/kernel", f"target/{layer}/mlp/router/router_weights/w/kernel")]


RULES = Rules(
    [Rule("token_embedder/embedding", "target/token_embedder/embedding"),
     Rule("logits_dense/kernel", "target/decoder/logits_dense/kernel"),
     *_stack_rules("encoder", ["attention"]),
     *_stack_rules("decoder", ["self_attention", "encoder_decoder_attention"])])


def from_t5x(folder: str | pathlib.Path, config: SwitchConfig | None) -> SwitchTransformer:
    """Reads a model from a T5X checkpoint, one array at a time, with float32 weights.

    Args:
        folder: Folder such as `checkpoint_1000000`, written by T5X (the msgpack file `checkpoint` and zarr folders) or
            by Orbax.
        config: The checkpoint does not describe its model.
    """
    return read_model(open_weights(folder, config))


def open_weights(folder: str | pathlib.Path, config: SwitchConfig | None) -> WeightSource:
    """Opens weights without reading them, see `from_t5x`."""
    folder = checks.path("folder", folder)
    try:
        importlib.import_module("msgpack")
    except ImportError as error:
        raise Refusal(f"A T5X checkpoint is read with msgpack, which cannot be imported ({error}): pip install "
                      "'switch-tf[t5x]', or msgpack as requirements.txt pins it.") from error
    if not t5x_file.is_t5x(folder):
        raise Refusal(f"{str(folder)!r} must be a T5X checkpoint, a folder such as checkpoint_1000000 "
                      f"with the msgpack file {t5x_file.FILE!r} or Orbax' {t5x_file.ORBAX_FILE!r}.")
    tensors = t5x_file.open_part(folder, "target")
    require_config(config, "T5X", folder, tensors)
    tensors = _unscan(tensors, config)
    has_layer_biases = any(map(_LAYER_BIAS.fullmatch, tensors))
    if has_layer_biases and not config.relative_attention_per_layer:
        raise Refusal("The checkpoint has a position bias for each layer, as scanned layers of T5X do, and the "
                      "configuration one for each stack; add --gin.SwitchConfig.relative_attention_per_layer=True to "
                      "the --gin_file of its model.")
    if config.relative_attention_per_layer and not has_layer_biases:
        raise Refusal("The configuration asks for a position bias in each layer (relative_attention_per_layer=True), "
                      "and the checkpoint has one for each stack; give a --gin_file without it.")
    return open_linked(config, RULES, {name: _merge_heads(name, tensor, config) for name, tensor in tensors.items()},
                       folder)


def _merge_heads(name, tensor, config):
    """Reshapes an attention kernel with an axis for heads (T5X's scalable T5)."""
    match, heads = _HEADS.fullmatch(name), (config.num_heads, config.d_kv)
    if match is None or len(tensor.shape) != 3 or heads != (tensor.shape[1:] if match[1] else tensor.shape[:2]):
        return tensor
    width = config.num_heads * config.d_kv
    return tensor.reshaped((tensor.shape[0], width) if match[1] else (width, tensor.shape[2]))


def _unscan(tensors, config):
    """Splits scanned layers' tensors into single layers.

    A scanned tensor stays in memory until the next one is read. Above KEPT_SIZE elements it is read by layer, if
    possible.
    """
    matches = {name: _SCANNED.fullmatch(name) for name in tensors}
    block_sizes = {}
    for stack in ("encoder", "decoder"):
        places = {match[2] for match in matches.values() if match and match[1] == stack}
        block_sizes[stack] = len(places)
        if places not in (set(), {None}, {str(place) for place in range(len(places))}):
            names = sorted(f"subblock_{place}" if place else f"{stack} itself" for place in places)
            raise Refusal(f"The checkpoint's scanned {stack} must hold subblock_0, subblock_1 and so on, and holds "
                          f"{', '.join(names[:8])}; it is incomplete or damaged.")
    load = keeping_last(lambda name: tensors[name].load())
    result = {}
    for name, tensor in tensors.items():
        layers = {name: tensor}
        if match := matches[name]:
            stack, place, rest = match[1], int(match[2] or 0), match[3]
            size, num_layers = block_sizes[stack], getattr(config, f"num_{stack}_layers")
            num_blocks, left = divmod(num_layers, size)
            if left or len(tensor.shape) <= _AXIS or tensor.shape[_AXIS] != num_blocks:
                kind = "layers" if size == 1 else f"blocks of {size}"
                wanted = f"does not consist of {kind}" if left else f"has {num_blocks} {kind} on axis {_AXIS}"
                raise Refusal(f"The checkpoint's scanned {name!r} has shape {tensor.shape}, but the configuration's "
                              f"{stack} of {num_layers} layers {wanted}; it is of another model, or was scanned along "
                              "another axis.")
            layers = {f"target/{stack}/layers_{block * size + place}/{rest}": _layer(load, name, tensor, block)
                      for block in range(num_blocks)}
        if twice := sorted(layers.keys() & result.keys()):
            raise Refusal(f"The checkpoint holds {twice[0]!r} twice, by itself and among scanned layers.")
        result |= layers
    return result


def _layer(load, name, tensor, block):
    def load_part(index=()):
        rows, *trailing = index or (slice(None),)
        return tensor.load((rows, block, *trailing))

    shape = tensor.shape[:_AXIS] + tensor.shape[_AXIS + 1:]
    if tensor.size > KEPT_SIZE and tensor.has_parts:
        return Tensor(shape, load_part, has_parts=True)
    return Tensor(shape, lambda: np.take(load(name), block, _AXIS))


def read_optimizer(folder: pathlib.Path, model: SwitchTransformer) -> Adafactor:
    """Returns the Adafactor of a T5X checkpoint. `model` was read from it."""
    weights = t5x_file.open_part(folder, "target")
    state = t5x_file.open_part(folder, "state")
    step = state.pop(STEP, None)
    slots = {}
    for name, slot in state.items():
        match = _SLOT.fullmatch(name)
        weight = f"target/{match[1]}" if match else None
        if weight not in weights:
            raise Refusal(f"The checkpoint's optimizer holds {name!r}, and T5X's Adafactor holds v_row, v_col, v and m "
                          "of each weight; convert the weights alone, without --with_optimizer.")
        slots.setdefault(weight, {})[match[2]] = slot
    used = {f"{name}/{slot}": tensor for name, group in slots.items()
            for slot, tensor in _used_slots(name, weights[name].shape, group).items()}
    by_weight = {}
    for name, tensor in _unscan(used, model.config).items():
        weight, _, slot = name.rpartition("/")
        by_weight.setdefault(weight, {})[slot] = tensor
    return read_adafactor(model, RULES, by_weight, STEP, step, folder)


def _used_slots(name, shape, slots):
    is_scanned = _SCANNED.fullmatch(name) is not None
    if len(shape) == 2 and not is_scanned:
        rows, columns = ((int(dim),) for dim in np.argsort(shape, kind="stable"))
    else:
        batch = ({0} if "/expert/" in name else set()) | ({_AXIS} if is_scanned else set())
        dims = tuple(dim for dim in range(len(shape)) if dim not in batch)
        rows, columns = (dims[-1:], dims[:-1]) if _EMBED_LAST.fullmatch(name) else (dims[:1], dims[1:])
    return used_slots(name, shape, slots, {"v_row": ("v_row", columns), "v_col": ("v_col", rows)}, "T5X")
