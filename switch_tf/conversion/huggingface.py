"""Reads and writes Hugging Face checkpoints: T5 1.0, T5 1.1, mT5, UMT5 and Switch Transformers."""

import pathlib
from typing import Any

from switch_tf import checks
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_config, huggingface_writing
from switch_tf.conversion.huggingface_embeddings import EMBEDDING, LOGITS
from switch_tf.conversion.huggingface_folder import read_folder
from switch_tf.conversion.linked_weights import open_linked, read_model
from switch_tf.conversion.rules import INDEX, Ignore, Rule, Rules
from switch_tf.conversion.weight_source import WeightSource, of_model
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal

_WAY_OUT = "download it again, with its own config.json"


def _attention_rules(ours, theirs):
    kernels = (("query", "q", 1), ("key", "k", 1), ("value", "v", 1), ("out", "o", 0))
    return [Rule(f"{ours}/{name}", f"{theirs}.{letter}.weight", merge=merge, transpose=True)
            for name, letter, merge in kernels]


def _stack_rules(stack, self_attention, mlp_index, mlp_name, bias):
    """Returns the rules of one stack. Hugging Face numbers sublayers, the feed-forward layer last."""
    ours, theirs = f"{stack}/layers_<i>", f"{stack}.block.<i>.layer"
    mlp = f"{theirs}.{mlp_index}.{mlp_name}"
    return [
        *_attention_rules(f"{ours}/{self_attention}", f"{theirs}.0.SelfAttention"),
        Rule(f"{ours}/pre_{self_attention}_layer_norm/scale", f"{theirs}.0.layer_norm.weight"),
        Rule(f"{ours}/pre_mlp_layer_norm/scale", f"{theirs}.{mlp_index}.layer_norm.weight"),
        Rule(f"{ours}/mlp/<kernel>", f"{mlp}.<kernel>.weight", transpose=True),
        Rule(f"{ours}/mlp/router/kernel", f"{mlp}.router.classifier.weight", transpose=True),
        Rule(f"{ours}/mlp/experts/<kernel>", f"{mlp}.experts.expert_<e>.<kernel>.weight", transpose=True, stack="e"),
        Rule(f"{stack}/{bias[0]}relpos_bias/rel_embedding",
             f"{stack}.block.{bias[1]}.layer.0.SelfAttention.relative_attention_bias.weight", transpose=True),
        Rule(f"{stack}/{stack}_norm/scale", f"{stack}.final_layer_norm.weight")]


def _rules(mlp_name, has_layer_biases=False):
    bias = ("layers_<i>/", "<i>") if has_layer_biases else ("", "0")
    cross_attention = "decoder.block.<i>.layer.1"
    return Rules(
        [
            Rule("token_embedder/embedding", EMBEDDING),
            Rule("logits_dense/kernel", LOGITS, transpose=True),
            *_stack_rules("encoder", "attention", 1, mlp_name, bias),
            *_stack_rules("decoder", "self_attention", 2, mlp_name, bias),
            *_attention_rules("decoder/layers_<i>/encoder_decoder_attention", f"{cross_attention}.EncDecAttention"),
            Rule("decoder/layers_<i>/pre_cross_attention_layer_norm/scale", f"{cross_attention}.layer_norm.weight"),
            # In old files. No version of transformers reads it.
            Ignore("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
        ],
        fields={"i": INDEX, "e": INDEX, "kernel": "wi|wi_0|wi_1|wo"})


T5_RULES, SWITCH_RULES = _rules("DenseReluDense"), _rules("mlp")
UMT5_RULES = _rules("DenseReluDense", has_layer_biases=True)


def from_hugging_face(folder: str | pathlib.Path) -> SwitchTransformer:
    """Reads a model from a folder in Hugging Face's format, one tensor at a time.

    Args:
        folder: Path of a folder with config.json and model.safetensors or pytorch_model.bin, in one file or shards.

    Returns:
        SwitchTransformer with float32 weights. One with experts gets semantics="hf": as in transformers, each sequence
        is a group with `expert_capacity` slots per expert, and padding is routed.

    Raises:
        Refusal: switch_tf cannot represent the model, or a file is missing, damaged or of another model.
    """
    return read_model(open_hugging_face(folder))


def open_hugging_face(folder: str | pathlib.Path) -> WeightSource:
    """Opens the weights of a folder without reading them. Arguments and errors as in `from_hugging_face`."""
    folder = checks.path("folder", folder)
    config, tensors = read_folder(folder)
    if config.num_experts > len(tensors):
        raise Refusal(f"config.json says num_experts={config.num_experts}, but the checkpoint has only "
                      f"{len(tensors)} tensors; {_WAY_OUT}.")
    return open_linked(config, rules_of(config), tensors, folder, _WAY_OUT)


def to_hugging_face(model: SwitchTransformer, folder: str | pathlib.Path, expert_capacity: int | None = None,
                    vocabulary: bytes | None = None) -> None:
    """Writes a model as config.json and model.safetensors, for transformers 5.23.

    The folder appears complete or not at all. Tensors are float32. More than 5 GB are split into shards.

    Args:
        model: SwitchTransformer.
        folder: Path of a folder that does not exist yet, or is empty.
        expert_capacity: int or None. Slots of each expert for each sequence in the written model. None takes the
            value of a model with semantics="hf"; other models with experts need a number.
        vocabulary: bytes or None. A SentencePiece model to write as spiece.model, of which transformers makes a
            T5Tokenizer, with 100 sentinels.

    Raises:
        Refusal: the folder is not empty or cannot be written, or Hugging Face's classes cannot represent the model.
    """
    if not isinstance(model, SwitchTransformer):
        raise Refusal(f"model must be a SwitchTransformer, not {checks.shown(model)}.")
    folder = checks.path("folder", folder).resolve()
    checks.new_folder(folder)
    values = huggingface_config.to_hugging_face(model.config, expert_capacity)
    if not model.built:
        model.build()
    _write(of_model(model), folder, values, vocabulary)


def write(source: WeightSource, folder: pathlib.Path, expert_capacity: int | None = None,
          vocabulary: bytes | None = None, dtype: str = "float32", identity: dict[str, Any] | None = None) -> None:
    """Writes weights as `to_hugging_face` does.

    Args:
        source: Weights.
        folder, expert_capacity, vocabulary: See `to_hugging_face`.
        dtype: "float32" or "bfloat16", to which other weights are rounded.
        identity: JSON-able. All that determines the files, to go on after a kill. None never goes on.

    Raises:
        Refusal: see `to_hugging_face`, or a weight cannot be read.
    """
    values = {**huggingface_config.to_hugging_face(source.config, expert_capacity), "dtype": dtype}
    _write(source, folder, values, vocabulary, identity)


def _write(source, folder, values, vocabulary, identity=None):
    links = rules_of(source.config).link({name: weight.shape for name, weight in source.weights.items()})
    huggingface_writing.write(source, links, folder, values, vocabulary, identity)


def rules_of(config: SwitchConfig) -> Rules:
    """Returns the rules of a model with this configuration."""
    dense = UMT5_RULES if config.relative_attention_per_layer else T5_RULES
    return SWITCH_RULES if config.num_experts else dense
