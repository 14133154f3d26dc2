"""Converts config.json of Hugging Face's T5 and Switch Transformers to a SwitchConfig and back.

Released config.json files sometimes contradict the tensors beside them. For the number of layers, the sparse layers and
gated feed-forward layers the tensors take precedence, with a warning.
"""

import warnings

from switch_tf import checks
from switch_tf.configs.choices import GATED_ACTIVATIONS
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_activations, huggingface_ids
from switch_tf.conversion.huggingface_structure import T5X_LOGITS, Structure, sparse_layers, step_for
from switch_tf.refusals import Refusal

T5, MT5, UMT5, SWITCH = "t5", "mt5", "umt5", "switch_transformers"

# Our name -> theirs.
_COMMON = {
    "vocab_size": "vocab_size", "d_model": "d_model", "d_ff": "d_ff", "d_kv": "d_kv", "num_heads": "num_heads",
    "num_encoder_layers": "num_layers", "num_decoder_layers": "num_decoder_layers", "dropout_rate": "dropout_rate",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance"}
_SPARSE = {
    "num_experts": "num_experts", "jitter_noise": "router_jitter_noise", "router_dtype": "router_dtype",
    "expert_capacity": "expert_capacity", "load_balancing_loss_weight": "router_aux_loss_coef",
    "router_z_loss_weight": "router_z_loss_coef"}

_NUM_LAYERS = {"encoder": "num_layers", "decoder": "num_decoder_layers"}

_OTHER_FAMILIES = {
    "longt5": "LongT5 has local and transient-global attention, which switch_tf does not have",
    "pix2struct": "Pix2Struct reads images, which switch_tf does not"}

# Defaults of transformers for keys that are missing in the file.
_COMMON_DEFAULTS = {
    "vocab_size": 32128, "d_kv": 64, "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
_DEFAULTS = {
    T5: {**_COMMON_DEFAULTS, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
         "feed_forward_proj": "relu"},
    MT5: {**_COMMON_DEFAULTS, "vocab_size": 250112, "d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
          "feed_forward_proj": "gated-gelu"},
    UMT5: {**_COMMON_DEFAULTS, "vocab_size": 250112, "d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
           "feed_forward_proj": "gated-gelu"},
    SWITCH: {
        **_COMMON_DEFAULTS, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "num_experts": 8,
        "num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 3, "dense_act_fn": "relu",
        "router_jitter_noise": 0.01, "router_dtype": "float32", "expert_capacity": 64,
        "router_aux_loss_coef": 0.001, "router_z_loss_coef": 0.001}}


# From Hugging Face.


def family(values: dict) -> str:
    """Returns the model_type of config.json's `values`: "t5", "mt5", "umt5" or "switch_transformers".

    Raises:
        Refusal: the file has another model_type.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULTS:
        reason = _OTHER_FAMILIES.get(model_type, "other architectures have weights that switch_tf does not have") if (
            isinstance(model_type, str)) else "a name is expected"
        raise Refusal(f"model_type in config.json must be one of {', '.join(map(repr, _DEFAULTS))}, not "
                      f"{checks.shown(model_type)}: {reason}.")
    return model_type


def ties_logits(values: dict, kind: str) -> bool:
    """Returns whether transformers uses `lm_head` as the embedding if no other name stores one.

    transformers 5 ties every T5, and a Switch Transformer unless tie_word_embeddings is false.
    """
    return kind != SWITCH or values.get("tie_word_embeddings") is not False


def stated_structure(values: dict) -> Structure:
    """Returns the structure stated by config.json's `values`, for a folder without tensors.

    Raises:
        Refusal: the model_type is unknown, or a number of layers is not an integer.
    """
    kind = family(values)
    values = _with_defaults(values, kind)
    num_layers = {stack: _integer(values, key) for stack, key in _NUM_LAYERS.items()}
    if is_encoder := _says_encoder(values):
        num_layers["decoder"] = 0
    stated = values["dense_act_fn" if kind == SWITCH else "feed_forward_proj"]
    # transformers 5 writes the former meaning of tie_word_embeddings under another name, see `_scales_logits`.
    is_tied = values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True))
    # Unknown sparse layers are taken from config.json later.
    return Structure(num_layers, {stack: set() for stack in num_layers}, {stack: set() for stack in num_layers},
                     is_gated=isinstance(stated, str) and stated.startswith("gated"),
                     has_logits=is_tied is False and not is_encoder, has_t5x_logits=False)


def _with_defaults(values, kind):
    values = {**_DEFAULTS[kind], **{key: value for key, value in values.items() if value is not None}}
    values.setdefault("num_decoder_layers", values["num_layers"])
    return values


def from_hugging_face(values: dict, structure: Structure) -> SwitchConfig:
    """Returns the configuration for the `values` of a config.json and the `structure` of the tensors.

    Raises:
        Refusal: switch_tf cannot represent the model, or values contradict the tensors.
    """
    kind = family(values)
    if values.get("tokenizer_class") == "ByT5Tokenizer":
        _warn("This is a ByT5, whose gaps are the ids 258, 257, 256, ...: the last bytes. The vocabulary 'bytes' has "
              "the same bytes, but reads <extra_id_0> as 358, which ByT5 was not trained on: fine-tune it to other "
              "tasks, or give the ids of its gaps yourself.")
    if kind == UMT5:
        _warn("UMT5 was trained with 300 gaps after its pieces, and a VOCABULARY here adds 100, so <extra_id_0> has "
              "another id: fine-tune it to tasks without gaps, or give the ids of its gaps yourself.")
    values = _with_defaults(values, kind)
    if _says_encoder(values) and not structure.num_layers["decoder"]:
        values["num_decoder_layers"] = 0
    for stack, key in _NUM_LAYERS.items():
        values[key] = _num_layers(_integer(values, key), stack, key, structure)
    fields = {ours: values[theirs] for ours, theirs in _COMMON.items()}
    activation = huggingface_activations.of_switch if kind == SWITCH else huggingface_activations.of_t5
    fields["activation"] = activation(values, structure.is_gated)
    fields["logits_via_embedding"] = not structure.has_logits
    fields["scale_decoder_outputs"] = _scales_logits(values, kind, structure)
    fields["relative_attention_per_layer"] = kind == UMT5
    if kind == SWITCH:
        fields |= _sparse_fields(values, structure)
    return SwitchConfig(**fields)


def _says_encoder(values):
    """Returns whether config.json describes an encoder without a decoder, in one of several ways."""
    architectures = values.get("architectures", [])
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise Refusal("architectures in config.json must be a list of names, not "
                      f"{checks.shown(architectures)}.")
    return any(name.endswith("EncoderModel") for name in architectures) or (
        values.get("is_encoder_decoder") is False or values["num_decoder_layers"] == 0)


def _num_layers(stated, stack, key, structure):
    held = structure.num_layers[stack]
    if held < stated:
        raise Refusal(f"config.json says {key}={stated}, but the checkpoint's {stack} ends after {held} layers; it "
                      "is incomplete, or of another kind of model (switch_tf reads encoder-decoders).")
    if held > stated:
        _warn(f"config.json says {key}={stated}, but the checkpoint holds {held} {stack} layers: all are read.")
    return held


def _scales_logits(values, family, structure):
    if structure.has_t5x_logits:
        _warn(f"The checkpoint's logits are {T5X_LOGITS!r}, a name that transformers does not know: they are read as "
              "in T5X, from a hidden state that is not scaled, whatever config.json says.")
        return False
    if family == MT5:
        return False
    # transformers 5 writes tie_word_embeddings=True for every T5. This key has the former meaning.
    key = "scale_decoder_outputs" if "scale_decoder_outputs" in values else "tie_word_embeddings"
    return checks.flag(f"{key} in config.json", values.get(key, True))


def _sparse_fields(values, structure):
    if values.get("router_bias"):
        raise Refusal("router_bias in config.json must be false, not true; switch_tf's router, like the paper's, "
                      "has no bias.")
    fields = {ours: values[theirs] for ours, theirs in _SPARSE.items()}
    # transformers has one rate for both.
    fields |= {"semantics": "hf", "expert_dropout_rate": values["dropout_rate"]}
    for stack, key in _NUM_LAYERS.items():
        num_layers, num_sparse = values[key], _integer(values, f"num_sparse_{stack}_layers")
        if not num_layers:
            continue
        # Without sparse layers the step is the number of layers, and layer 1 is sparse nevertheless.
        values.setdefault(f"{stack}_sparse_step", num_layers // num_sparse if num_sparse else num_layers)
        step = _integer(values, f"{stack}_sparse_step")
        fields[f"{stack}_sparse_step"] = _found_step(step, num_layers, stack, structure)
    return fields


def _integer(values, key):
    return checks.integer(f"{key} in config.json", values[key], at_least=0)


def _found_step(stated, num_layers, stack, structure):
    """Returns the sparse step of a stack. Tensors take precedence over config.json."""
    expected = sparse_layers(num_layers, stated)
    sparse, dense = (layers[stack] for layers in (structure.sparse_layers, structure.dense_layers))
    # For a layer without tensors config.json decides, so that its missing tensors are named later.
    layers = tuple(i for i in range(num_layers) if i in sparse or (i not in dense and i in expected))
    step = step_for(layers, num_layers, stated)
    if step is None:
        raise Refusal(f"The checkpoint's {stack} holds experts in the layers {list(layers)} of {num_layers}, which "
                      "no sparse step describes (layers 1, 1 + step, 1 + 2 step, ..., or all).")
    if step != stated:
        _warn(f"config.json says {stack}_sparse_step={stated}, but the checkpoint holds experts in the {stack} layers "
              f"{list(layers)}: they are read with {stack}_sparse_step={step}.")
    return step


def _warn(sentence):
    warnings.warn(sentence, stacklevel=2)


# To Hugging Face.


def to_hugging_face(config: SwitchConfig, expert_capacity: int | None) -> dict:
    """Returns the content of config.json for a configuration.

    Args:
        config: SwitchConfig.
        expert_capacity: int or None. Slots of an expert for each sequence. None takes the value of `config`.

    Raises:
        Refusal: Hugging Face's classes cannot represent the model.
    """
    _check_representable(config)
    values = {theirs: getattr(config, ours) for ours, theirs in _COMMON.items()}
    values |= {
        "is_encoder_decoder": not config.is_encoder_only, "use_cache": True, "dtype": "float32",
        "initializer_factor": 1.0, **huggingface_ids.keys(config.end_id),
        # Their code reads it as "the last hidden state is scaled", and ties every weight without a tensor.
        "tie_word_embeddings": config.scales_logits}
    if not config.num_experts:
        if expert_capacity is not None:
            raise Refusal(f"expert_capacity={expert_capacity} belongs to a model with experts; leave it out.")
        name, scaling = ("UMT5", {}) if config.relative_attention_per_layer else (
            "T5", {"scale_decoder_outputs": config.scales_logits})
        return values | scaling | {
            **huggingface_activations.keys(config.activation), "model_type": name.lower(),
            "architectures": [f"{name}{'EncoderModel' if config.is_encoder_only else 'ForConditionalGeneration'}"]}
    values |= {theirs: getattr(config, ours) for ours, theirs in _SPARSE.items()}
    values |= {
        "model_type": SWITCH, "dense_act_fn": huggingface_activations.keys(config.activation)["dense_act_fn"],
        "architectures": ["SwitchTransformersEncoderModel" if config.is_encoder_only
                          else "SwitchTransformersForConditionalGeneration"],
        "expert_capacity": _expert_capacity(config, expert_capacity), "router_bias": False,
        "router_ignore_padding_tokens": False, "add_router_probs": False}
    for stack, num_layers, layers, step in _stacks(config):
        values |= {f"num_sparse_{stack}_layers": len(layers),
                   f"{stack}_sparse_step": step_for(layers, num_layers, step)}
    return values


def _stacks(config):
    encoder = ("encoder", config.num_encoder_layers, config.encoder_sparse_layers, config.encoder_sparse_step)
    if config.is_encoder_only:
        return (encoder,)
    return (encoder, ("decoder", config.num_decoder_layers, config.decoder_sparse_layers, config.decoder_sparse_step))


def _check_representable(config):
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
    if not config.num_experts:
        return
    if config.activation in GATED_ACTIVATIONS:
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
    for stack, num_layers, layers, step in _stacks(config):
        if step_for(layers, num_layers, step) is None:
            raise Refusal("Hugging Face's Switch Transformer has experts in the layers 1, 1 + step, 1 + 2 step, "
                          f"..., or in all, but the {stack} of this model in {list(layers)} of {num_layers}; it "
                          "cannot be written in its format.")
    if config.expert_dropout_rate != config.dropout_rate:
        _warn(f"Hugging Face's Switch Transformer has one dropout rate: dropout_rate={config.dropout_rate} is written "
              f"for the experts too, whose expert_dropout_rate={config.expert_dropout_rate} is not.")


def _expert_capacity(config, expert_capacity):
    if expert_capacity is None:
        expert_capacity = config.expert_capacity
    if expert_capacity is None:
        raise Refusal(
            "Hugging Face's Switch Transformer gives each expert a fixed number of slots for each sequence, padding "
            f"included, instead of a capacity factor (here {config.eval_capacity_factor} for groups of "
            f"{config.group_size} tokens): other tokens would be dropped; choose that number with expert_capacity=... "
            "(--expert_capacity of switch-tf convert), where the length of the longest sequence drops none.")
    return checks.integer("expert_capacity", expert_capacity, at_least=1)
