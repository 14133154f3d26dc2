"""Hugging Face checkpoints in and out: T5 1.0, T5 1.1, mT5 and Switch Transformers."""

from collections.abc import Iterator

import keras
import numpy as np

from switch_tf import checks
from switch_tf.conversion import checkpoint_files, huggingface_config
from switch_tf.conversion.huggingface_structure import T5X_LOGITS, read_structure
from switch_tf.conversion.rules import INDEX, Ignore, Link, Rule, Rules
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.whole_folder import whole_folder

_EMBEDDING, _LOGITS = "shared.weight", "lm_head.weight"
_STACK_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _attention_rules(ours, theirs):
    kernels = (("query", "q", 1), ("key", "k", 1), ("value", "v", 1), ("out", "o", 0))
    return [Rule(f"{ours}/{name}", f"{theirs}.{letter}.weight", merge=merge, transpose=True)
            for name, letter, merge in kernels]


def _stack_rules(stack, self_attention, mlp_index, mlp_name):
    """The rules of one stack; sublayers are numbered in theirs, the feed-forward layer last."""
    ours, theirs = f"{stack}/layers_<i>", f"{stack}.block.<i>.layer"
    mlp = f"{theirs}.{mlp_index}.{mlp_name}"
    return [
        *_attention_rules(f"{ours}/{self_attention}", f"{theirs}.0.SelfAttention"),
        Rule(f"{ours}/pre_{self_attention}_layer_norm/scale", f"{theirs}.0.layer_norm.weight"),
        Rule(f"{ours}/pre_mlp_layer_norm/scale", f"{theirs}.{mlp_index}.layer_norm.weight"),
        Rule(f"{ours}/mlp/<kernel>", f"{mlp}.<kernel>.weight", transpose=True),
        Rule(f"{ours}/mlp/router/kernel", f"{mlp}.router.classifier.weight", transpose=True),
        Rule(f"{ours}/mlp/experts/<kernel>", f"{mlp}.experts.expert_<e>.<kernel>.weight", transpose=True, stack="e"),
        Rule(f"{stack}/relpos_bias/rel_embedding",
             f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", transpose=True),
        Rule(f"{stack}/{stack}_norm/scale", f"{stack}.final_layer_norm.weight")]


def _rules(mlp_name):
    cross_attention = "decoder.block.<i>.layer.1"
    return Rules(
        [
            Rule("token_embedder/embedding", _EMBEDDING),
            Rule("logits_dense/kernel", _LOGITS, transpose=True),
            *_stack_rules("encoder", "attention", 1, mlp_name),
            *_stack_rules("decoder", "self_attention", 2, mlp_name),
            *_attention_rules("decoder/layers_<i>/encoder_decoder_attention", f"{cross_attention}.EncDecAttention"),
            Rule("decoder/layers_<i>/pre_cross_attention_layer_norm/scale", f"{cross_attention}.layer_norm.weight"),
            # Old files have it, no version of transformers reads it.
            Ignore("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
        ],
        fields={"i": INDEX, "e": INDEX, "kernel": "wi|wi_0|wi_1|wo"})


T5_RULES, SWITCH_RULES = _rules("DenseReluDense"), _rules("mlp")


def from_hugging_face(folder) -> SwitchTransformer:
    """Reads a model from a folder in Hugging Face's format, one tensor at a time.

    Args:
        folder: path of a folder with config.json and model.safetensors or pytorch_model.bin, in one file or shards.

    Returns:
        SwitchTransformer with float32 weights. A Switch Transformer gets semantics="hf": each sequence is a group with
        `expert_capacity` slots per expert, and padding is routed, as it is there.

    Raises:
        ValueError: the folder, its configuration or its tensors are not those of a model that switch_tf can represent.
        ImportError: the package safetensors is missing.
    """
    folder = checks.path("folder", folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} must be a folder on this machine with config.json and the tensors of a "
                         "model; a name on the Hugging Face hub is first downloaded with: hf download NAME "
                         "--local-dir FOLDER")
    values = checkpoint_files.read_json(folder / "config.json")
    tensors = checkpoint_files.open_folder(folder)
    _drop_copies(tensors)
    config = huggingface_config.from_hugging_face(values, read_structure(tensors))
    if T5X_LOGITS in tensors and _LOGITS not in tensors:
        tensors[_LOGITS] = tensors.pop(T5X_LOGITS)

    model = SwitchTransformer(config)
    model.build()
    variables = _variables(model)
    rules = SWITCH_RULES if config.num_experts else T5_RULES
    links = rules.link({name: tuple(variable.shape) for name, variable in variables.items()})
    rules.check(links, {name: tensor.shape for name, tensor in tensors.items()})
    for link in links:
        weight = link.to_ours(lambda name: tensors[name].read())
        if not np.isfinite(weight).all():
            raise ValueError(f"{link.theirs[0]!r} in {folder} is not finite, and so would be all that the model "
                             "computes; read a checkpoint from before its training went wrong.")
        variables[link.ours].assign(weight)
    return model


def to_hugging_face(model: SwitchTransformer, folder, expert_capacity: int | None = None) -> None:
    """Writes a model in Hugging Face's format, for transformers 5.23: config.json and model.safetensors.

    The folder appears complete or not at all. Tensors are float32, in shards beyond 5 GB.

    Args:
        model: SwitchTransformer.
        folder: path of a folder that is not there yet, or is empty.
        expert_capacity: int or None. For models with experts: the slots of each expert for each sequence that Hugging
            Face's model will have. It may be left out where the model has semantics="hf", and with it this number.

    Raises:
        ValueError: the folder holds something, or Hugging Face's classes cannot represent the model; nothing is
            written.
    """
    if not isinstance(model, SwitchTransformer):
        raise ValueError(f"model must be a SwitchTransformer, not {checks.shown(model)}.")
    folder = checks.path("folder", folder).resolve()
    checks.new_folder(folder)
    values = huggingface_config.to_hugging_face(model.config, expert_capacity)
    if not model.built:
        model.build()
    rules = SWITCH_RULES if model.config.num_experts else T5_RULES
    links = rules.link({name: tuple(variable.shape) for name, variable in _variables(model).items()})
    copies = _copies(model.config)
    shapes = {name: link.their_shape for link in links for name in (*link.theirs, *copies.get(link.ours, ()))}

    with whole_folder(folder) as unfinished:
        checkpoint_files.write_json(unfinished / "config.json", values)
        checkpoint_files.write_folder(unfinished, shapes, _tensors(model, links, copies))


def _variables(model) -> dict[str, keras.Variable]:
    """The model's weights by their paths within it, `encoder/layers_0/attention/query`."""
    return {variable.path.removeprefix(f"{model.name}/"): variable for variable in model.weights}


def _drop_copies(tensors) -> None:
    """Removes the names under which the embedding is stored again; the others are other weights.

    PyTorch's own files list tied weights several times; logits that equal the embedding are tied.
    """
    if _EMBEDDING not in tensors:
        return  # the rules will name what is missing
    for name in (_LOGITS, *_STACK_EMBEDDINGS):
        if name not in tensors:
            continue
        is_copy = np.array_equal(tensors[name].read(), tensors[_EMBEDDING].read())
        if is_copy:
            del tensors[name]
        elif name != _LOGITS:
            raise ValueError(f"The checkpoint's {name!r} differs from its {_EMBEDDING!r}; encoder and decoder must "
                             "share one embedding, as they do in T5.")


def _copies(config) -> dict[str, tuple[str, ...]]:
    """Our weight -> further names under which transformers wants it.

    Its Switch Transformer ties nothing where tie_word_embeddings is false, which is how it says that the last hidden
    state is not scaled.
    """
    names: tuple[str, ...] = ()
    if not config.scales_logits:
        names += (_LOGITS,) if config.logits_via_embedding else ()
        names += _STACK_EMBEDDINGS if config.num_experts else ()
    return {"token_embedder/embedding": names}


def _tensors(model, links: list[Link], copies) -> Iterator[tuple[str, np.ndarray]]:
    """Names and <float32> values of all tensors to write, one weight in memory at a time."""
    variables = _variables(model)
    for link in links:
        weight = np.asarray(variables[link.ours].numpy(), np.float32)
        yield from link.to_theirs(weight)
        for name in copies.get(link.ours, ()):
            yield name, weight
