"""Reads the configuration of a T5X checkpoint from the gin file in its run folder.

T5X's `config.gin` has all values, resolved: of `network.T5Config` for T5X's own T5, of the layers for Flaxformer. It
is never executed. Values without effect on weights or numbers are ignored, other unknown ones refused.
"""

from typing import Any

from switch_tf import checks
from switch_tf.configs import gin_syntax
from switch_tf.configs.gin_syntax import Reference
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal, first_line

FILES = ("config.gin", "operative_config.gin", "model.gin")
# Flax's gelu is the tanh form.
_ACTIVATIONS = {("relu",): "relu", ("gelu",): "gelu_tanh", ("silu",): "silu", ("swish",): "silu",
                ("relu", "linear"): "reglu", ("gelu", "linear"): "geglu", ("silu", "linear"): "swiglu",
                ("swish", "linear"): "swiglu"}
_T5X = {"vocab_size": "vocab_size", "emb_dim": "d_model", "num_heads": "num_heads", "head_dim": "d_kv",
        "mlp_dim": "d_ff", "num_encoder_layers": "num_encoder_layers", "num_decoder_layers": "num_decoder_layers",
        "dropout_rate": "dropout_rate", "logits_via_embedding": "logits_via_embedding", "mlp_activations": "activation",
        "scan_layers": "relative_attention_per_layer"}
# T5X's other defaults are T5 Small's, as in SwitchConfig.
_T5X_DEFAULTS = {"logits_via_embedding": False, "activation": ("relu",)}
_T5X_WITHOUT_EFFECT = {"dtype", "float32_attention_logits", "remat_policy", "scan_unroll", "param_scan_axis"}

_ARCHITECTURE = "t5_architecture.EncoderDecoder"
_ATTENTION, _MLP = "dense_attention.MultiHeadDotProductAttention", "dense.MlpBlock"
_BIAS, _MOE = "relative_position_biases.RelativePositionBiases", "moe_layers.MoeLayer"
_TOKENS_CHOOSE, _EXPERTS_CHOOSE = "routing.TokensChooseMaskedRouter", "routing.ExpertsChooseMaskedRouter"
_STACKS = {"encoder": ("t5_architecture.Encoder", "moe_architecture.SparseEncoder"),
           "decoder": ("t5_architecture.Decoder", "moe_architecture.SparseDecoder")}

_REQUIRED = {"embedding.Embed.num_embeddings": "vocab_size", "embedding.Embed.features": "d_model",
             f"{_ATTENTION}.num_heads": "num_heads", f"{_ATTENTION}.head_dim": "d_kv",
             f"{_MLP}.intermediate_dim": "d_ff", f"{_MLP}.activations": "activation"}
_OPTIONAL = {f"{_BIAS}.num_buckets": "relative_attention_num_buckets",
             f"{_BIAS}.max_distance": "relative_attention_max_distance", "layer_norm.T5LayerNorm.epsilon":
             "layer_norm_epsilon", f"{_MLP}.intermediate_dropout_rate": "dropout_rate"}
_EXPERTS = {f"{_MOE}.num_experts": "num_experts", f"{_MOE}.max_group_size": "group_size",
            f"{_MOE}.train_capacity_factor": "train_capacity_factor",
            f"{_MOE}.eval_capacity_factor": "eval_capacity_factor"}
_COPIED = {*_REQUIRED, *_OPTIONAL, *_EXPERTS}
# These parameters repeat values of attention and vocabulary.
_REPEATED = {f"{_BIAS}.num_heads", "dense.DenseGeneral.features", f"{_ATTENTION}.dropout_rate"}
# Parameters of any class that functions here read, or for which models of this package have one value.
_READ = {"encoder_factory", "decoder_factory", "num_layers", "num_sparse_layers", "sparse_layout", "router",
         "num_selected_experts", "batch_prioritized_routing", "jitter_noise", "output_logits_factory", "extra_mlp",
         "min_expert_capacity", "shared_relative_position_bias_factory"}
_FIXED = {
    "use_bias": (False,), "ignore_padding_tokens": (False,), "position_embedder_factory": (None,),
    "strict_group_size": (False,), "fuse_kernels": (False,), "final_dropout_rate": (0,),
    "shared_token_embedder_factory": ("embedding.Embed",), "layer_norm_factory": ("layer_norm.T5LayerNorm",),
    "layer_factory": ("t5_architecture.EncoderLayer", "t5_architecture.DecoderLayer"),
    "sparse_layer_factory": ("moe_architecture.SparseEncoderLayer", "moe_architecture.SparseDecoderLayer"),
    "attention": (_ATTENTION,), "self_attention": (_ATTENTION,), "encoder_decoder_attention": (_ATTENTION,),
    "mlp": (_MLP, _MOE), "expert": (_MLP,), "router_weights": ("routing.RouterWeights",),
    "relative_position_bias_factory": (_BIAS, None)}
_WITHOUT_EFFECT = {
    "dtype", "kernel_init", "bias_init", "embedding_init", "dropout_factory", "input_dropout_factory",
    "output_dropout_factory", "activation_partitioning_dims", "broadcast_dropout", "cast_input_dtype", "attend_dtype",
    "one_hot", "name", "input_axis_name", "intermediate_axis_name", "output_axis_name", "data_sharding_constraints",
    "kernel_axis_names", "num_model_partitions", "num_expert_partitions", "layer_remat", "sow_intermediates",
    "capture_gradients", "split_params", "precision", "scanned", "scan_layers", "scan_axis"}
_MODULES = {"t5_architecture", "moe_architecture", "moe_layers", "routing", "dense_attention", "dense", "embedding",
            "layer_norm", "relative_position_biases"}


def find(folder: Any) -> tuple[SwitchConfig, Any] | None:
    """Finds a checkpoint's configuration in one of FILES, in its folder or above.

    Args:
        folder: The checkpoint, or `state` within it.

    Returns:
        `(configuration, path of its file)`, or None.
    """
    for place in (folder, folder.parent, *([folder.parent.parent] if folder.name == "state" else [])):
        for path in (place / name for name in FILES):
            if path.is_file() and (config := read(path)) is not None:
                return config, path
    return None


def read(path: Any) -> SwitchConfig | None:
    """Returns the configuration in a gin file of T5X, or None."""
    try:
        assigned, includes = gin_syntax.assignments(path)
        values = {}  # "scope/module.Class.parameter" -> value, without the module's package
        for name, value in assigned.items():
            scope, slash, selector = name.rpartition("/")
            values[f"{scope}{slash}{'.'.join(selector.split('.')[-3:])}"] = (
                tuple(value) if isinstance(value, list) else value)
        if any(name.startswith("network.T5Config.") for name in values):
            fields = _fields_of_t5x(values)
        elif f"{_ARCHITECTURE}.encoder_factory" in values:
            fields = _fields_of_flaxformer(values)
        else:
            return None
        if includes:
            raise Refusal(f"it includes {checks.shown(includes[0])}, which is not read")
        for name, value in fields.items():
            if isinstance(value, gin_syntax.Macro | Reference):
                raise Refusal(f"{name} would be {value}, which is no value")
        if (names := fields["activation"]) not in [*_ACTIVATIONS]:  # a list: values may be unhashable
            raise Refusal(f"the activations are {checks.shown(names)}, and this package has "
                          f"{', '.join(map(str, _ACTIVATIONS))}")
        return SwitchConfig(**{**fields, "activation": _ACTIVATIONS[names]})
    except Refusal as error:
        raise Refusal(f"The model cannot be taken from {path} ({first_line(error).rstrip('.')}); give its "
                      "configuration with --gin_file.") from None


def _fields_of_t5x(values):
    fields = dict(_T5X_DEFAULTS)
    for name, value in values.items():
        kind, _, parameter = name.rpartition(".")  # with the scope: scoped values are refused
        if kind == "network.T5Config" and parameter in _T5X:
            fields[_T5X[parameter]] = value
        elif kind.rpartition("/")[2].startswith("network.") and name != "network.Transformer.config" and not (
                kind == "network.T5Config" and parameter in _T5X_WITHOUT_EFFECT):
            raise _unknown(name, value)
    if "vocab_size" not in fields:
        raise Refusal("network.T5Config.vocab_size is missing")
    return fields


def _fields_of_flaxformer(values):
    """Returns the fields of SwitchConfig, with Flax's names as "activation"."""
    for name, value in values.items():
        scope, _, selector = name.rpartition("/")
        kind, _, parameter = selector.rpartition(".")
        if kind.partition(".")[0] not in _MODULES or kind == "t5_architecture.DecoderOnly":
            continue
        is_read = selector in _COPIED | _REPEATED or parameter in _READ | _WITHOUT_EFFECT
        # Only experts may have sizes of their own.
        is_elsewhere = scope not in ("", "expert") and selector in _COPIED
        if is_elsewhere or (not is_read and _class(value) not in _FIXED.get(parameter, ())):
            raise _unknown(name, value)
    fields = {field: _get(values, name) for name, field in _REQUIRED.items()}
    fields |= {field: values[name] for name, field in _OPTIONAL.items() if name in values}
    stacks, steps = {}, {}
    for stack, classes in _STACKS.items():
        stacks[stack] = kind = _class(_get(values, f"{_ARCHITECTURE}.{stack}_factory"))
        if kind not in classes:
            raise _unknown(f"{_ARCHITECTURE}.{stack}_factory", kind)
        fields[f"num_{stack}_layers"] = _get(values, f"{kind}.num_layers")
        if kind == classes[1]:
            steps[stack] = _step(values, kind, fields[f"num_{stack}_layers"])
    logits = values.get(f"{stacks['decoder']}.output_logits_factory")
    if _class(logits) not in (None, "dense.DenseGeneral"):
        raise _unknown(f"{stacks['decoder']}.output_logits_factory", logits)
    fields |= {"logits_via_embedding": logits is None, "relative_attention_per_layer": not _has(
        values, stacks.values(), "shared_relative_position_bias_factory", _BIAS)}
    if not steps:
        return fields
    num_sparse = 0
    for stack in _STACKS:
        step = fields[f"{stack}_sparse_step"] = steps.get(stack, 0)
        num_sparse += fields[f"num_{stack}_layers"] // step if step else 0
    activations = _get(values, f"{_MLP}.activations", "expert")
    if activations != fields["activation"]:
        raise _unknown(f"expert/{_MLP}.activations", activations)
    # T5X averages losses over sparse layers; here they are summed.
    weights = {field: checks.number(name, values.get(f"models.MoeEncoderDecoderModel.{name}", 0.0), "0 or above") / max(
        1, num_sparse) for name, field in (("aux_loss_factor", "load_balancing_loss_weight"),
                                           ("router_z_loss_factor", "router_z_loss_weight"))}
    return fields | weights | _routing_fields(values) | {
        field: _get(values, name) for name, field in _EXPERTS.items()} | {
        "semantics": "t5x", "min_expert_capacity": values.get(f"{_MOE}.min_expert_capacity", 4),
        "expert_d_ff": _get(values, f"{_MLP}.intermediate_dim", "expert"),
        "expert_dropout_rate": values.get(f"expert/{_MLP}.intermediate_dropout_rate", fields.get("dropout_rate", 0.1)),
        "extra_mlp": _has(values, (f"{kind}Layer" for _, kind in _STACKS.values()), "extra_mlp", _MLP)}


def _has(values, kinds, parameter, choice):
    """Returns whether a parameter names `choice` in both stacks."""
    classes = [_class(values.get(f"{kind}.{parameter}")) for kind in kinds]
    if classes not in ([None, None], [choice, choice]):
        raise _unknown(f"{parameter} of encoder and decoder", classes)
    return classes[0] is not None


def _step(values, kind, num_layers):
    """Returns a stack's sparse step, 0 without sparse layers."""
    number, layout = _get(values, f"{kind}.num_sparse_layers"), values.get(f"{kind}.sparse_layout")
    if layout is not None and not str(getattr(layout, "name", layout)).endswith("MIXED"):
        raise _unknown(f"{kind}.sparse_layout", layout)
    if type(number) is not int or type(num_layers) is not int or number < 0 or (number and num_layers % number):
        raise _unknown(f"{kind}.num_sparse_layers", number)
    return num_layers // number if number else 0


def _routing_fields(values):
    (policy, number, noise), (decoder_policy, decoder_number, decoder_noise) = (
        _routing(values, f"sparse_{stack}") for stack in _STACKS)
    if policy == "expert_choice" and (decoder_policy, decoder_number) == ("top_n", 2):
        decoder_policy, decoder_number = "top2", 1  # num_selected_experts would apply to the encoder
    if noise != decoder_noise or number != decoder_number:
        raise _unknown("the router of the decoder", f"another one than the encoder's ({decoder_number} and {number} "
                       f"experts of a token, jitter {decoder_noise} and {noise})")
    return {"routing_policy": policy, "decoder_routing_policy": decoder_policy, "jitter_noise": noise,
            "num_selected_experts": number if number != 1 else None, "second_expert_policy": "all",
            "allow_non_causal_decoder": decoder_policy != "switch"}


def _routing(values, scope):
    """Returns a stack's policy, experts per token, and jitter."""
    router = _get(values, f"{_MOE}.router", scope)
    kind = _class(router)
    if kind not in (_TOKENS_CHOOSE, _EXPERTS_CHOOSE):
        raise _unknown(f"{scope}/{_MOE}.router", router)
    noise = _get(values, f"{kind}.jitter_noise", scope)
    if kind == _EXPERTS_CHOOSE:
        return "expert_choice", 1, noise
    number = checks.integer("num_selected_experts", _get(values, f"{kind}.num_selected_experts", scope), 1)
    if checks.flag("batch_prioritized_routing", _get(values, f"{kind}.batch_prioritized_routing", scope)):
        return "batch_prioritized", number, noise
    return ("switch" if number == 1 else "top_n"), number, noise


def _get(values, name, scope=None):
    """Returns a value of the scope, or else the unscoped one."""
    for key in (f"{scope}/{name}", name):
        if key in values:
            return values[key]
    raise Refusal(f"{name} is missing")


def _class(value):
    """Returns "module.Class" of a Reference, or the value itself."""
    return ".".join(value.name.split(".")[-2:]) if isinstance(value, Reference) else value


def _unknown(name, value):
    return Refusal(f"{name} is {checks.shown(value)}, and it is not known what that means")
