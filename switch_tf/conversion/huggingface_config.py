"""Reads the configuration and opens the tensors of a Hugging Face folder, without building the model.

If config.json has too few layers, other sparse layers, or no gate in a Switch Transformer, the tensors take
precedence, with a warning. Keras is not imported, so `switch-tf inspect` takes a second.
"""

import dataclasses
import pathlib
import re
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from switch_tf import checks
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import checkpoint_files
from switch_tf.conversion.untrusted_files import Tensor, read_object
from switch_tf.refusals import Refusal

T5, MT5, UMT5, SWITCH = "t5", "mt5", "umt5", "switch_transformers"
EMBEDDING, LOGITS = "shared.weight", "lm_head.weight"
STACK_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# In checkpoints converted from T5X without a rule for logits (switch-xxl-128, switch-c-2048).
T5X_LOGITS = "decoder.logits_dense.weight"

# Our name -> theirs.
_COMMON = {"num_encoder_layers": "num_layers"} | {name: name for name in (
    "vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_decoder_layers", "dropout_rate", "layer_norm_epsilon",
    "relative_attention_num_buckets", "relative_attention_max_distance")}
_SPARSE = {
    "num_experts": "num_experts", "jitter_noise": "router_jitter_noise", "router_dtype": "router_dtype",
    "expert_capacity": "expert_capacity", "load_balancing_loss_weight": "router_aux_loss_coef",
    "router_z_loss_weight": "router_z_loss_coef"}
_NUM_LAYERS = {"encoder": "num_layers", "decoder": "num_decoder_layers"}

# Their function -> our activation without and with a gate. The first of equivalent names is written.
_FUNCTIONS = {
    "relu": ("relu", "reglu"), "gelu": ("gelu", "geglu_exact"), "gelu_python": ("gelu", "geglu_exact"),
    "gelu_new": ("gelu_tanh", "geglu"), "gelu_pytorch_tanh": ("gelu_tanh", "geglu"), "silu": ("silu", "swiglu"),
    "swish": ("silu", "swiglu")}

_OTHER_FAMILIES = {
    "longt5": "LongT5 has local and transient-global attention, which switch_tf does not have",
    "pix2struct": "Pix2Struct reads images, which switch_tf does not"}

# Defaults of transformers. For a T5 they are T5 Small, as in SwitchConfig.
_SMALL = {theirs: getattr(SwitchConfig, ours) for ours, theirs in _COMMON.items() if ours != "num_decoder_layers"}
_MT5_DEFAULTS = {**_SMALL, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
                 "feed_forward_proj": "gated-gelu"}
_DEFAULTS = {
    T5: {**_SMALL, "feed_forward_proj": "relu"}, MT5: _MT5_DEFAULTS, UMT5: _MT5_DEFAULTS,
    SWITCH: {
        **_SMALL, "d_model": 768, "num_layers": 12, "num_heads": 12, "num_experts": 8,
        "num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 3, "dense_act_fn": "relu",
        "router_jitter_noise": 0.01, "router_dtype": "float32", "expert_capacity": 64,
        "router_aux_loss_coef": 0.001, "router_z_loss_coef": 0.001}}

_PAD, _END, _START, _BEGIN = "pad_token_id", "eos_token_id", "decoder_start_token_id", "bos_token_id"
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_DEFAULT_END = 1  # in transformers, without the key

_MAX_LAYERS = 512  # of a stack; published T5s have 24
_LAYER = re.compile(r"(encoder|decoder)\.block\.(\d+)\.(layer\.\d+\.(?:mlp|DenseReluDense)\.(router|experts)?)?")


def read_folder(folder: pathlib.Path) -> tuple[SwitchConfig, dict[str, Tensor]]:
    """Returns a model's configuration and tensors by name. Copies of the embedding are merged."""
    values = _values(folder)
    stated = _fill_defaults(values)
    tensors = checkpoint_files.open_folder(folder)
    # transformers 5 ties every T5, and a Switch Transformer unless tie_word_embeddings is false.
    _unify_embeddings(tensors, stated["model_type"] != SWITCH or stated.get("tie_word_embeddings") is not False)
    config = _config(folder, values, read_structure(tensors))
    if T5X_LOGITS in tensors and LOGITS not in tensors:
        tensors[LOGITS] = tensors.pop(T5X_LOGITS)
    return config, tensors


def read_config(folder: pathlib.Path) -> SwitchConfig:
    """Returns a model's configuration. Without tensors, config.json suffices."""
    if checkpoint_files.find_file(folder) is not None:
        return read_folder(folder)[0]
    values = _values(folder)
    stated = _fill_defaults(values)
    num_layers = {stack: _integer(stated, key) for stack, key in _NUM_LAYERS.items()}
    if is_encoder := _says_encoder(stated):
        num_layers["decoder"] = 0
    activation = stated["dense_act_fn" if stated["model_type"] == SWITCH else "feed_forward_proj"]
    # transformers 5 renamed the former meaning of tie_word_embeddings, see `from_hugging_face`.
    is_tied = stated.get("scale_decoder_outputs", stated.get("tie_word_embeddings", True))
    unknown = dict.fromkeys(num_layers, set())  # `_found_step` takes them from config.json
    return _config(folder, values, Structure(
        num_layers, unknown, unknown,
        is_gated=str(activation).startswith("gated"),
        has_logits=is_tied is False and not is_encoder, has_t5x_logits=False))


def _values(folder):
    if not (folder / "config.json").is_file():
        raise Refusal(f"{str(folder)!r} must be a folder with config.json and the tensors of a model; a "
                      "name on the Hugging Face hub is first downloaded with: hf download NAME "
                      "--local-dir FOLDER")
    return read_object(folder / "config.json")


def _config(folder, values, structure):
    generation = folder / "generation_config.json"
    ends = end_id(values, read_object(generation) if generation.exists() else None)
    return dataclasses.replace(from_hugging_face(values, structure), end_id=ends)


def _unify_embeddings(tensors, ties_logits):
    """Renames the embedding to EMBEDDING and removes its copies. Separate logits stay under LOGITS.

    Versions of transformers store a tied weight as `shared`, as `embed_tokens` of a stack, or as `lm_head`. Files of
    PyTorch have all of them. If `ties_logits`, `lm_head` is the embedding when no other name stores one.
    """
    names = [name for name in (EMBEDDING, *STACK_EMBEDDINGS) if name in tensors]
    if not names and LOGITS in tensors and ties_logits:
        names = [LOGITS]
    if not names:
        return
    embedding = tensors.pop(names[0])
    for name in names[1:]:
        if not _are_equal(embedding, tensors.pop(name)):
            raise Refusal(
                f"The checkpoint's {name!r} and {names[0]!r} differ, but encoder and decoder share one embedding in "
                "switch_tf, as they do in T5, so a model with two cannot be read; if they should be equal, one of "
                "them is damaged or was left out of fine-tuning: remove the wrong one from the file.")
    tensors[EMBEDDING] = embedding
    if LOGITS in tensors and _are_equal(embedding, tensors[LOGITS]):
        del tensors[LOGITS]


def _are_equal(first, second):
    return first.shape == second.shape and np.array_equal(first.read(), second.read())


class Structure(NamedTuple):
    """Structure of a model, from its tensors' names. Dictionaries have the keys "encoder" and "decoder".

    `sparse_layers`, `dense_layers`: indices of layers with experts, and with a plain feed-forward layer.
    `is_gated`: whether feed-forward layers have wi_0 and wi_1.
    `has_logits`: whether the logits have separate weights.
    `has_t5x_logits`: whether those weights have T5X's name.
    """

    num_layers: dict[str, int]
    sparse_layers: dict[str, set[int]]
    dense_layers: dict[str, set[int]]
    is_gated: bool
    has_logits: bool
    has_t5x_logits: bool


def read_structure(names: Iterable[str]) -> Structure:
    """Returns the structure of a model from its tensors' names."""
    names = set(names)
    layers, sparse, dense = ({stack: set() for stack in _NUM_LAYERS} for _ in range(3))
    for match in filter(None, map(_LAYER.match, names)):
        stack, layer = match[1], int(match[2])
        layers[stack].add(layer)
        if match[3]:
            (sparse if match[4] else dense)[stack].add(layer)
    for stack, indices in layers.items():
        if len(indices) > _MAX_LAYERS:
            raise Refusal(f"The checkpoint's {stack} has tensors of {len(indices)} layers, and at most {_MAX_LAYERS} "
                          "are read.")
        if missing := set(range(len(indices))) - indices:
            raise Refusal(f"The checkpoint has tensors of {stack} layer {max(indices)}, but none of {stack} layer "
                          f"{min(missing)}; it is incomplete or damaged, so download it again.")
    num_layers = {stack: len(indices) for stack, indices in layers.items()}
    return Structure(num_layers, sparse, dense, is_gated=any(name.endswith(".wi_0.weight") for name in names),
                     has_logits=bool({LOGITS, T5X_LOGITS} & names), has_t5x_logits=T5X_LOGITS in names)


def sparse_layers(num_layers: int, step: int) -> tuple[int, ...]:
    """Returns a stack's sparse layers by Hugging Face's rule."""
    return SwitchConfig(num_encoder_layers=num_layers, encoder_sparse_step=step, num_experts=1, expert_capacity=1,
                        semantics="hf").encoder_sparse_layers


def step_for(layers: tuple[int, ...], num_layers: int, preferred: int) -> int | None:
    """Returns a sparse step that makes exactly `layers` sparse, `preferred` if possible, or None."""
    steps = (preferred, *range(num_layers + 1))
    return next((step for step in steps if sparse_layers(num_layers, step) == layers), None)


def from_hugging_face(values: dict, structure: Structure) -> SwitchConfig:
    """Returns the configuration for a config.json's `values` and the tensors' `structure`.

    Refuses what switch_tf cannot represent, and values that contradict the tensors.
    """
    values = _fill_defaults(values)
    kind = values["model_type"]
    if values.get("tokenizer_class") == "ByT5Tokenizer":
        _warn("This is a ByT5, whose gaps are the ids 258, 257, 256, ...: the last bytes. The vocabulary 'bytes' has "
              "the same bytes, but reads <extra_id_0> as 358, which ByT5 was not trained on: fine-tune it to other "
              "tasks, or give the ids of its gaps yourself.")
    if kind == UMT5:
        _warn("UMT5 was trained with 300 gaps after its pieces, and a VOCABULARY here adds 100, so <extra_id_0> has "
              "another id: fine-tune it to tasks without gaps, or give the ids of its gaps yourself.")
    if _says_encoder(values) and not structure.num_layers["decoder"]:
        values["num_decoder_layers"] = 0
    for stack, key in _NUM_LAYERS.items():
        stated, held = _integer(values, key), structure.num_layers[stack]
        if held < stated:
            raise Refusal(f"config.json says {key}={stated}, but the checkpoint's {stack} ends after {held} layers; it "
                          "is incomplete, or of another kind of model (switch_tf reads encoder-decoders).")
        if held > stated:
            _warn(f"config.json says {key}={stated}, but the checkpoint holds {held} {stack} layers: all are read.")
        values[key] = held
    fields = {field: values[key] for field, key in _COMMON.items()} | {
        "activation": _activation(values, kind == SWITCH, structure.is_gated),
        "logits_via_embedding": not structure.has_logits, "relative_attention_per_layer": kind == UMT5,
        "scale_decoder_outputs": False}
    if structure.has_t5x_logits:
        _warn(f"The checkpoint's logits are {T5X_LOGITS!r}, a name that transformers does not know: they are read as "
              "in T5X, from a hidden state that is not scaled, whatever config.json says.")
    elif kind != MT5:
        # transformers 5 writes tie_word_embeddings=True for every T5. Its former meaning has a new key.
        key = "scale_decoder_outputs" if "scale_decoder_outputs" in values else "tie_word_embeddings"
        fields["scale_decoder_outputs"] = checks.flag(f"{key} in config.json", values.get(key, True))
    if kind != SWITCH:
        return SwitchConfig(**fields)
    if values.get("router_bias"):
        raise Refusal("router_bias in config.json must be false, not true; switch_tf's router, like the paper's, "
                      "has no bias.")
    fields |= {field: values[key] for field, key in _SPARSE.items()}
    # transformers has one dropout rate.
    fields |= {"semantics": "hf", "expert_dropout_rate": values["dropout_rate"]}
    for stack, key in _NUM_LAYERS.items():
        num_layers, num_sparse = values[key], _integer(values, f"num_sparse_{stack}_layers")
        if num_layers:
            # With 0 sparse layers, transformers sets the step to the number of layers, so layer 1 is still sparse.
            values.setdefault(f"{stack}_sparse_step", num_layers // num_sparse if num_sparse else num_layers)
            step = _integer(values, f"{stack}_sparse_step")
            fields[f"{stack}_sparse_step"] = _found_step(step, num_layers, stack, structure)
    return SwitchConfig(**fields)


def _fill_defaults(values):
    model_type = values.get("model_type")
    if model_type not in [*_DEFAULTS]:
        reason = _OTHER_FAMILIES.get(model_type, "other architectures have weights that switch_tf does not have") if (
            isinstance(model_type, str)) else "a name is expected"
        raise Refusal(f"model_type in config.json must be one of {', '.join(map(repr, _DEFAULTS))}, not "
                      f"{checks.shown(model_type)}: {reason}.")
    values = _DEFAULTS[model_type] | {key: value for key, value in values.items() if value is not None}
    values.setdefault("num_decoder_layers", values["num_layers"])
    return values


def _says_encoder(values):
    architectures = values.get("architectures", [])
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise Refusal("architectures in config.json must be a list of names, not "
                      f"{checks.shown(architectures)}.")
    return any(name.endswith("EncoderModel") for name in architectures) or (
        values.get("is_encoder_decoder") is False or values["num_decoder_layers"] == 0)


def _integer(values, key):
    return checks.integer(f"{key} in config.json", values[key], at_least=0)


def _found_step(stated, num_layers, stack, structure):
    """Returns a stack's sparse step."""
    # A layer without tensors follows config.json, to be reported as missing.
    layers = tuple(sorted(structure.sparse_layers[stack] | (
        {*sparse_layers(num_layers, stated)} - structure.dense_layers[stack])))
    step = step_for(layers, num_layers, stated)
    if step is None:
        raise Refusal(f"The checkpoint's {stack} holds experts in the layers {list(layers)} of {num_layers}, which "
                      "no sparse step describes (layers 1, 1 + step, 1 + 2 step, ..., or all).")
    if step != stated:
        _warn(f"config.json says {stack}_sparse_step={stated}, but the checkpoint holds experts in the {stack} layers "
              f"{list(layers)}: they are read with {stack}_sparse_step={step}.")
    return step


def _activation(values, is_switch, is_gated):
    key = "dense_act_fn" if is_switch else "feed_forward_proj"
    stated, function, says_gated = values[key], None, False
    if isinstance(stated, str):
        gate, dash, function = stated.rpartition("-")
        says_gated = "gated" in (gate, stated)
        # "gated-gelu" is the tanh form, and a Switch Transformer's only gate.
        if stated == "gated-gelu":
            function = "gelu_new"
        elif dash and (is_switch or not says_gated):
            function = None
    source = "dense_act_fn" if function is not None and "dense_act_fn" in values else key  # takes precedence
    if source != key:
        function = values[source]
    if function not in [*_FUNCTIONS]:  # a list: values may be unhashable
        gated = "and 'gated-gelu'" if is_switch else "each also with 'gated-' in front"
        raise Refusal(f"{source} in config.json is {checks.shown(values[source])}, and switch_tf has the activations "
                      f"{', '.join(map(repr, _FUNCTIONS))}, {gated}.")
    if says_gated != is_gated and not (is_switch and is_gated):
        raise Refusal(f"config.json says {key}={stated!r}, but the feed-forward layers hold "
                      f"{'wi_0 and wi_1' if is_gated else 'wi'}; correct the one that is wrong.")
    if is_switch and is_gated and function != "gelu_new":
        _warn(f"config.json says dense_act_fn={stated!r}, but the feed-forward layers hold wi_0 and wi_1: they are "
              "read as gated gelu, the only gated form of Switch Transformers.")
        return "geglu"
    return _FUNCTIONS[function][is_gated]


def end_id(values: dict, generation: dict | None) -> int | tuple[int, ...]:
    """Checks the special ids, and returns `SwitchConfig.end_id`.

    The end of a sequence may be any id, several, or null for none, from generation_config.json if it exists, else from
    config.json. Padding and the decoder's first token must be 0 in both, as in T5: models here mask token 0.
    """
    files = {"config.json": values} | ({} if generation is None else {"generation_config.json": generation})
    for file, content in files.items():
        for key in (_PAD, _START):
            # null in generation_config.json, or a missing key, leaves it to generate's caller.
            if key in content and (content[key] is not None or (file, key) == ("config.json", _PAD)):
                _check_zero(file, key, content[key])
        for key in _FORCED:
            if content.get(key) is not None:
                raise Refusal(f"{key} in {file} is {checks.shown(content[key])}, and switch_tf forces no token while "
                              "it decodes; remove the key to read the model without it.")
    if content.get(_START) is None and content.get(_BEGIN) is not None:
        _check_zero(file, _BEGIN, content[_BEGIN])
    if generation is not None and _END not in generation:
        _warn(f"generation_config.json has no {_END}, so sequences never end before their greatest length, as "
              "in transformers; add the key, or call generate with end_id.")
        return ()
    value = content.get(_END, _DEFAULT_END)
    if value is None:
        return ()
    ends = checks.ids(f"{_END} in {file}", value)
    if not ends or isinstance(ends, tuple) and 0 in ends:
        raise Refusal(f"{_END} in {file} must be the id of an end of sequence, several, or null for none, not "
                      f"{checks.shown(value)}; 0 is the padding.")
    return ends


def _check_zero(file, key, value):
    if type(value) is not int or value != 0:
        raise Refusal(f"{key} in {file} must be 0, not {checks.shown(value)}: switch_tf masks token 0 as padding "
                      "and starts every decoder with it, as T5 does, so such a model would compute other numbers "
                      "here.")


def _warn(sentence):
    warnings.warn(sentence, stacklevel=2)


def to_hugging_face(config: SwitchConfig, expert_capacity: int | None) -> dict:
    """Returns the content of config.json.

    Args:
        expert_capacity: Slots of an expert for each sequence. None takes the value of `config`.
    """
    if config.is_encoder_only and not config.logits_via_embedding:
        raise Refusal("Hugging Face's encoders have no logits, but this one has weights of its own for them "
                      "(logits_via_embedding=False); it cannot be written in their format.")
    if config.relative_attention_per_layer and config.num_experts:
        raise Refusal("Hugging Face's Switch Transformer shares one position bias among the layers of a stack, but "
                      "here each layer has its own (relative_attention_per_layer=True); it cannot be written in its "
                      "format.")
    if config.relative_attention_per_layer and not config.scales_logits and not config.is_encoder_only:
        raise Refusal("Hugging Face's UMT5, in transformers 5, always scales the last hidden state by d_model^-0.5, "
                      "but this model does not (scale_decoder_outputs); it cannot be written in its format.")
    function = next(name for name, activations in _FUNCTIONS.items() if config.activation in activations)
    is_gated = config.activation == _FUNCTIONS[function][1]
    values = {key: getattr(config, field) for field, key in _COMMON.items()} | {
        "is_encoder_decoder": not config.is_encoder_only, "use_cache": True, "dtype": "float32",
        "initializer_factor": 1.0, "dense_act_fn": function, _PAD: 0, _START: 0,
        _END: (list(config.end_id) or None) if isinstance(config.end_id, tuple) else config.end_id,
        # transformers reads it as "the last hidden state is scaled", and ties weights without a tensor.
        "tie_word_embeddings": config.scales_logits}
    if not config.num_experts:
        if expert_capacity is not None:
            raise Refusal(f"expert_capacity={expert_capacity} belongs to a model with experts; leave it out.")
        name, scaling = ("UMT5", {}) if config.relative_attention_per_layer else (
            "T5", {"scale_decoder_outputs": config.scales_logits})
        short = "gelu" if function == "gelu_new" and is_gated else function
        return values | scaling | {
            "is_gated_act": is_gated, "feed_forward_proj": f"gated-{short}" if is_gated else short,
            "model_type": name.lower(),
            "architectures": [f"{name}{'EncoderModel' if config.is_encoder_only else 'ForConditionalGeneration'}"]}
    if is_gated:
        raise Refusal("Hugging Face's Switch Transformer has no gated experts (its 'gated-gelu' raises KeyError), "
                      f"but activation is {config.activation!r}; such a model cannot be written in its format.")
    for name, value, only in (("routing_policy", config.routing_policy, "switch"),
                              ("decoder_routing_policy", config.decoder_policy, "switch"),
                              ("extra_mlp", config.extra_mlp, False),
                              ("expert_d_ff", config.expert_width, config.d_ff),
                              ("expert_sublayers", config.expert_sublayers, "feed_forward")):
        if value != only:
            raise Refusal(f"Hugging Face's Switch Transformer knows {name}={only!r} only, but it is {value!r}; "
                          "such a model cannot be written in its format.")
    for stack in ("encoder",) if config.is_encoder_only else ("encoder", "decoder"):
        num_layers, layers, step = (getattr(config, name) for name in (
            f"num_{stack}_layers", f"{stack}_sparse_layers", f"{stack}_sparse_step"))
        step = step_for(layers, num_layers, step)
        if step is None:
            raise Refusal("Hugging Face's Switch Transformer has experts in the layers 1, 1 + step, 1 + 2 step, "
                          f"..., or in all, but the {stack} of this model in {list(layers)} of {num_layers}; it "
                          "cannot be written in its format.")
        values |= {f"num_sparse_{stack}_layers": len(layers), f"{stack}_sparse_step": step}
    if config.expert_dropout_rate != config.dropout_rate:
        _warn(f"Hugging Face's Switch Transformer has one dropout rate: dropout_rate={config.dropout_rate} is written "
              f"for the experts too, whose expert_dropout_rate={config.expert_dropout_rate} is not.")
    if expert_capacity is None:
        expert_capacity = config.expert_capacity
    if expert_capacity is None:
        raise Refusal(
            "Hugging Face's Switch Transformer gives each expert a fixed number of slots for each sequence, padding "
            f"included, instead of a capacity factor (here {config.eval_capacity_factor} for groups of "
            f"{config.group_size} tokens): other tokens would be dropped; choose that number with expert_capacity=... "
            "(--expert_capacity of switch-tf convert), where the length of the longest sequence drops none.")
    return values | {key: getattr(config, field) for field, key in _SPARSE.items()} | {
        "model_type": SWITCH, "expert_capacity": checks.integer("expert_capacity", expert_capacity, at_least=1),
        "architectures": ["SwitchTransformersEncoderModel" if config.is_encoder_only
                          else "SwitchTransformersForConditionalGeneration"],
        "router_bias": False, "router_ignore_padding_tokens": False, "add_router_probs": False}
