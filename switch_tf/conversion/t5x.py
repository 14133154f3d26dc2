"""Reads T5X checkpoints of T5 1.0, T5 1.1, mT5 and Flaxformer's MoE models, scanned or not."""

import importlib
import pathlib
import re

from switch_tf import checks
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import orbax_file, t5x_arrays, t5x_file, t5x_scan, t5x_slots
from switch_tf.conversion.checkpoint_files import Tensor
from switch_tf.conversion.linked_weights import open_linked, read_model, without_config
from switch_tf.conversion.rules import INDEX, Rule, Rules
from switch_tf.conversion.weight_source import WeightSource
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.refusals import Refusal

_HEADS = re.compile(r".*attention/(?:(query|key|value)|out)/kernel")
_LAYER_BIAS = re.compile(r"target/(?:encoder|decoder)/layers_\d+/relpos_bias/rel_embedding")


def _stack_rules(stack, attentions):
    layer = f"{stack}/layers_<i>"
    kernels = [Rule(f"{layer}/{attention}/{name}", f"target/{layer}/{attention}/{name}/kernel", merge=merge)
               for attention in attentions
               for name, merge in (("query", 1), ("key", 1), ("value", 1), ("out", 0))]
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
     *_stack_rules("decoder", ["self_attention", "encoder_decoder_attention"])],
    fields={"i": INDEX, "kernel": "wi|wi_0|wi_1|wo", "mlp": "mlp|extra_mlp", "norm": r"pre_\w+_layer_norm"})


def from_t5x(folder: str | pathlib.Path, config: SwitchConfig | None) -> SwitchTransformer:
    """Reads a model from a T5X checkpoint, one array at a time.

    Args:
        folder: Path of a folder such as `checkpoint_1000000`, with the msgpack file `checkpoint` and its zarr folders,
            or written by Orbax.
        config: SwitchConfig of the model, which the checkpoint does not describe.

    Returns:
        SwitchTransformer with float32 weights.

    Raises:
        Refusal: a file is missing or damaged, the checkpoint is of another model, or a package is missing.
    """
    return read_model(open_t5x(folder, config))


def open_t5x(folder: str | pathlib.Path, config: SwitchConfig | None) -> WeightSource:
    """Opens the weights of a T5X checkpoint without reading them. Arguments and errors as in `from_t5x`."""
    folder = checks.path("folder", folder)
    _check_packages()
    if not t5x_arrays.is_t5x(folder):
        raise Refusal(f"{str(folder)!r} must be a T5X checkpoint, a folder such as checkpoint_1000000 on this machine "
                      f"with the msgpack file {t5x_file.FILE!r} or Orbax' {orbax_file.FILE!r}.")
    tensors = t5x_arrays.open_arrays(folder)
    if not isinstance(config, SwitchConfig):
        raise without_config("T5X", folder, tensors)
    tensors = t5x_scan.unscan(tensors, config)
    _check_biases(tensors, config)
    tensors = {name: _merge_heads(name, tensor, config) for name, tensor in tensors.items()}
    return open_linked(config, RULES, tensors, folder)


def read_optimizer(folder: pathlib.Path, model: SwitchTransformer) -> Adafactor:
    """Returns the Adafactor of a T5X checkpoint, with its slots and its step. See `t5x_slots.read_optimizer`."""
    return t5x_slots.read_optimizer(folder, model, RULES)


def _check_packages():
    try:
        importlib.import_module("msgpack")
    except ImportError as error:
        raise Refusal(f"A T5X checkpoint is read with msgpack, which cannot be imported ({error}): pip install "
                      "'switch-tf[t5x]', or msgpack as requirements.txt pins it.") from error


def _check_biases(tensors, config):
    has_layer_biases = any(map(_LAYER_BIAS.fullmatch, tensors))
    if has_layer_biases and not config.relative_attention_per_layer:
        raise Refusal("The checkpoint has a position bias for each layer, as scanned layers of T5X do, and the "
                      "configuration one for each stack; add --gin.SwitchConfig.relative_attention_per_layer=True to "
                      "the --gin_file of its model.")
    if config.relative_attention_per_layer and not has_layer_biases:
        raise Refusal("The configuration asks for a position bias in each layer (relative_attention_per_layer=True), "
                      "and the checkpoint has one for each stack; give a --gin_file without it.")


def _merge_heads(name, tensor, config):
    """Views an attention kernel with an axis for heads, as T5X's scalable T5 has it, in the usual shape."""
    match, heads = _HEADS.fullmatch(name), (config.num_heads, config.d_kv)
    if match is None or len(tensor.shape) != 3 or heads != (tensor.shape[1:] if match[1] else tensor.shape[:2]):
        return tensor
    width = config.num_heads * config.d_kv
    shape = (tensor.shape[0], width) if match[1] else (width, tensor.shape[2])
    return Tensor(shape, lambda: tensor.load().reshape(shape))
