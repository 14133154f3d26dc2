"""Reads and writes Hugging Face checkpoints: T5 1.0, T5 1.1, mT5, UMT5 and Switch Transformers."""

import math
import pathlib
from typing import Any

from switch_tf import checks
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_config, source_vocabulary, weight_source
from switch_tf.conversion.checkpoint_files import Shards, write_object
from switch_tf.conversion.huggingface_config import EMBEDDING, LOGITS, STACK_EMBEDDINGS
from switch_tf.conversion.untrusted_files import DTYPES
from switch_tf.conversion.weight_source import (
    MERGES,
    Link,
    Rule,
    Rules,
    WeightSource,
)
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal
from switch_tf.storage.resumable_folder import resumable_folder
from switch_tf.storage.whole_file import writing

_WAY_OUT = "download it again, with its own config.json"
_EMBEDDING = "token_embedder/embedding"


def _attention_rules(scope, prefix):
    return [Rule(f"{scope}/{name}", f"{prefix}.{name[0]}.weight", merge=merge, transpose=True)
            for name, merge in MERGES.items()]


def _stack_rules(stack, self_attention, mlp_index, mlp_name, bias):
    layer, block = f"{stack}/layers_<i>", f"{stack}.block.<i>.layer"
    mlp = f"{block}.{mlp_index}.{mlp_name}"
    return [
        *_attention_rules(f"{layer}/{self_attention}", f"{block}.0.SelfAttention"),
        Rule(f"{layer}/pre_{self_attention}_layer_norm/scale", f"{block}.0.layer_norm.weight"),
        Rule(f"{layer}/pre_mlp_layer_norm/scale", f"{block}.{mlp_index}.layer_norm.weight"),
        Rule(f"{layer}/mlp/<kernel>", f"{mlp}.<kernel>.weight", transpose=True),
        Rule(f"{layer}/mlp/router/kernel", f"{mlp}.router.classifier.weight", transpose=True),
        Rule(f"{layer}/mlp/experts/<kernel>", f"{mlp}.experts.expert_<e>.<kernel>.weight", transpose=True, stack="e"),
        Rule(f"{stack}/{bias[0]}relpos_bias/rel_embedding",
             f"{stack}.block.{bias[1]}.layer.0.SelfAttention.relative_attention_bias.weight", transpose=True),
        Rule(f"{stack}/{stack}_norm/scale", f"{stack}.final_layer_norm.weight")]


def rules_of(config: SwitchConfig) -> Rules:
    """Returns the rules for a configuration."""
    mlp_name = "mlp" if config.num_experts else "DenseReluDense"
    has_layer_biases = config.relative_attention_per_layer and not config.num_experts
    bias = ("layers_<i>/", "<i>") if has_layer_biases else ("", "0")
    cross_attention = "decoder.block.<i>.layer.1"
    return Rules(
        [
            Rule(_EMBEDDING, EMBEDDING),
            Rule("logits_dense/kernel", LOGITS, transpose=True),
            *_stack_rules("encoder", "attention", 1, mlp_name, bias),
            *_stack_rules("decoder", "self_attention", 2, mlp_name, bias),
            *_attention_rules("decoder/layers_<i>/encoder_decoder_attention", f"{cross_attention}.EncDecAttention"),
            Rule("decoder/layers_<i>/pre_cross_attention_layer_norm/scale", f"{cross_attention}.layer_norm.weight"),
            # In old files, unused by transformers.
            Rule("", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
        ])


def from_hugging_face(folder: str | pathlib.Path) -> SwitchTransformer:
    """Reads a model in Hugging Face's format, one tensor at a time.

    Args:
        folder: Folder with config.json and model.safetensors or pytorch_model.bin, in one file or shards.

    Returns:
        SwitchTransformer with float32 weights. With experts it has semantics="hf": as in transformers, each sequence is
        a group with `expert_capacity` slots per expert, and padding is routed.
    """
    return weight_source.read_model(open_weights(folder))


def open_weights(folder: str | pathlib.Path, config: None = None) -> WeightSource:
    """Opens weights without reading them, see `from_hugging_face`."""
    folder = checks.path("folder", folder)
    config, tensors = huggingface_config.read_folder(folder)
    if config.num_experts > len(tensors):
        raise Refusal(f"config.json says num_experts={config.num_experts}, but the checkpoint has only "
                      f"{len(tensors)} tensors; {_WAY_OUT}.")
    return weight_source.open_linked(config, rules_of(config), tensors, folder, _WAY_OUT)


def to_hugging_face(model: SwitchTransformer, folder: str | pathlib.Path, expert_capacity: int | None = None,
                    vocabulary: bytes | None = None) -> None:
    """Writes a model as config.json and model.safetensors, for transformers 5.23.

    The folder appears complete or not at all. Tensors are float32, in shards above 5 GB. Refuses models that Hugging
    Face's classes cannot represent.

    Args:
        folder: New or empty folder.
        expert_capacity: Slots of each expert for each sequence. None takes the value of a model with semantics="hf";
            other models with experts need a number.
        vocabulary: SentencePiece model to write as spiece.model, for a T5Tokenizer with 100 sentinels.
    """
    folder = checks.path("folder", folder)
    checks.new_folder(folder)
    write_weights(weight_source.model_weights(model), folder, vocabulary, expert_capacity=expert_capacity)


def write_weights(source: WeightSource, folder: pathlib.Path, vocabulary: bytes | None = None,
                  identity: dict[str, Any] | None = None, expert_capacity: int | None = None,
                  dtype: str = "float32") -> None:
    """Writes weights as `to_hugging_face` does, a portion at a time.

    Args:
        identity: See `own.write_weights`.
        dtype: "float32" or "bfloat16".
    """
    config, copies, embedding = source.config, [], source.weights[_EMBEDDING]
    values = huggingface_config.to_hugging_face(config, expert_capacity) | {"dtype": dtype}
    links = {link.ours: link for link in rules_of(config).link(source.weights)}
    # tie_word_embeddings=False also means unscaled logits. Then transformers' Switch Transformer ties no weights, and
    # the embedding is written under each name.
    if not config.scales_logits:
        if config.logits_via_embedding and not config.is_encoder_only:
            copies.append(LOGITS)
        if config.num_experts:
            copies += STACK_EMBEDDINGS[:1 if config.is_encoder_only else 2]
    links |= {name: Link(name, embedding.shape, (name,), Rule(name, name)) for name in copies}
    every = WeightSource(config, {**source.weights, **dict.fromkeys(copies, embedding)},
                         lambda name, rows: source.read(_EMBEDDING if name in copies else name, rows))
    shapes = {name: link.their_shape for link in links.values() for name in link.theirs}
    # Rows of a transposed weight are columns of theirs.
    undivided = {name for name, link in links.items() if link.rule.transpose and not link.rule.stack}
    groups = weight_source.groups_of(every, undivided)
    num_bytes = DTYPES[dtype].itemsize * sum(map(math.prod, shapes.values()))
    with resumable_folder(folder.resolve(), "config.json", identity, num_bytes) as work:
        done = len(work.finished)
        with writing(folder):
            shards = Shards(work.folder, shapes, dtype, work.finished[-1]["num_bytes"] if done else 0)
        for _, portions in weight_source.read_groups(every, groups, "writing", done):
            for name, rows, weight in portions:
                with writing(folder):
                    for _, tensor in links[name].to_theirs(weight, rows):
                        shards.append(tensor)
            with writing(folder):
                shards.sync()
                work.finish({"num_bytes": shards.num_bytes})
        with writing(folder):
            shards.finish()
            write_object(work.folder / "config.json", values)
            if vocabulary is not None:
                (work.folder / source_vocabulary.FILE).write_bytes(vocabulary)
