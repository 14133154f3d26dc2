"""Fields of SwitchConfig from the gin values of Flaxformer's T5 and its mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from switch_tf import checks
from switch_tf.configs.gin_syntax import Reference
from switch_tf.refusals import Refusal

Values = Mapping[str, Any]
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
# Parameters that other functions here read, or that have one value in a model of this package, for any class.
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
# Given elsewhere: the heads of a bias and the width of logits have one value each, of attention and vocabulary.
_REPEATED = {f"{_BIAS}.num_heads", "dense.DenseGeneral.features", f"{_ATTENTION}.dropout_rate"}


def is_described(values: Values) -> bool:
    """Returns whether the values describe an encoder and a decoder of Flaxformer."""
    return f"{_ARCHITECTURE}.encoder_factory" in values


def fields_of(values: Values) -> dict[str, Any]:
    """Returns the fields of SwitchConfig; "activation" as the names of Flax's functions.

    Args:
        values: "scope/module.Class.parameter" -> value, from `gin_syntax.assignments`.

    Raises:
        Refusal: A value is missing or not understood.
    """
    for name, value in values.items():
        _check(name, value)
    fields = {field: _get(values, name) for name, field in _REQUIRED.items()}
    if not isinstance(fields["activation"], list | tuple):
        raise _unknown(f"{_MLP}.activations", fields["activation"])
    fields |= {field: values[name] for name, field in _OPTIONAL.items() if name in values}
    sparse_stacks = []
    for stack, classes in _STACKS.items():
        kind = _name(_get(values, f"{_ARCHITECTURE}.{stack}_factory"))
        if kind not in classes:
            raise _unknown(f"{_ARCHITECTURE}.{stack}_factory", kind)
        fields[f"num_{stack}_layers"] = _get(values, f"{kind}.num_layers")
        if kind == classes[1]:
            sparse_stacks.append(stack)
        if stack == "decoder":
            logits = values.get(f"{kind}.output_logits_factory")
            if _name(logits) not in (None, "dense.DenseGeneral"):
                raise _unknown(f"{kind}.output_logits_factory", logits)
            fields["logits_via_embedding"] = logits is None
    biases = [values.get(f"{classes[stack in sparse_stacks]}.shared_relative_position_bias_factory")
              for stack, classes in _STACKS.items()]
    bias = _same("shared_relative_position_bias_factory", biases, (None, _BIAS))
    fields["relative_attention_per_layer"] = bias is None
    return fields | (_sparse_fields(values, fields, sparse_stacks) if sparse_stacks else {})


def _check(name, value):
    """Refuses a value of a model's class that nothing here reads and that may matter."""
    scope, _, selector = name.rpartition("/")
    kind, _, parameter = selector.rpartition(".")
    if kind.partition(".")[0] not in _MODULES or kind == "t5_architecture.DecoderOnly":
        return
    is_read = selector in {*_REQUIRED, *_OPTIONAL, *_EXPERTS, *_REPEATED} or parameter in _READ | _WITHOUT_EFFECT
    # Experts may have sizes of their own, and nothing else.
    is_elsewhere = scope not in ("", "expert") and selector in {*_REQUIRED, *_OPTIONAL, *_EXPERTS}
    if is_elsewhere or (not is_read and _name(value) not in _FIXED.get(parameter, ())):
        raise _unknown(name, value)


def _sparse_fields(values: Values, fields, stacks) -> dict[str, Any]:
    sparse = {field: _get(values, name) for name, field in _EXPERTS.items()} | {"semantics": "t5x"}
    num_sparse = 0
    for stack, classes in _STACKS.items():
        step = _step(values, classes[1], fields[f"num_{stack}_layers"]) if stack in stacks else 0
        sparse[f"{stack}_sparse_step"] = step
        num_sparse += fields[f"num_{stack}_layers"] // step if step else 0
    sparse |= _routing_fields(values) | {"min_expert_capacity": values.get(f"{_MOE}.min_expert_capacity", 4)}
    activations = _get(values, f"{_MLP}.activations", "expert")
    if not isinstance(activations, list | tuple) or [*activations] != [*fields["activation"]]:
        raise _unknown(f"expert/{_MLP}.activations", activations)
    sparse["expert_d_ff"] = _get(values, f"{_MLP}.intermediate_dim", "expert")
    sparse["expert_dropout_rate"] = values.get(f"expert/{_MLP}.intermediate_dropout_rate",
                                               fields.get("dropout_rate", 0.1))
    extras = [values.get(f"{classes[1]}Layer.extra_mlp") for classes in _STACKS.values()]
    sparse["extra_mlp"] = _same("extra_mlp", extras, (None, _MLP)) is not None
    # T5X averages over sparse layers what this package sums.
    for name, field in (("aux_loss_factor", "load_balancing_loss_weight"),
                        ("router_z_loss_factor", "router_z_loss_weight")):
        weight = values.get(f"models.MoeEncoderDecoderModel.{name}", 0.0)
        sparse[field] = checks.number(name, weight, "0 or above") / max(1, num_sparse)
    return sparse


def _routing_fields(values) -> dict[str, Any]:
    (policy, number, noise), (decoder_policy, decoder_number, decoder_noise) = (
        _routing(values, f"sparse_{stack}") for stack in _STACKS)
    if policy == "expert_choice" and (decoder_policy, decoder_number) == ("top_n", 2):
        decoder_policy, decoder_number = "top2", 1  # num_selected_experts would be of the encoder
    if noise != decoder_noise or number != decoder_number:
        raise _unknown("the router of the decoder", f"another one than the encoder's ({decoder_number} and {number} "
                       f"experts of a token, jitter {decoder_noise} and {noise})")
    return {"routing_policy": policy, "decoder_routing_policy": decoder_policy, "jitter_noise": noise,
            "num_selected_experts": number if number != 1 else None, "second_expert_policy": "all",
            "allow_non_causal_decoder": decoder_policy != "switch"}


def _same(parameter, values, choices):
    """Returns the class or None that a parameter names in both stacks."""
    first, second = map(_name, values)
    if first != second or first not in choices:
        raise _unknown(f"{parameter} of encoder and decoder", [first, second])
    return first


def _step(values, kind, num_layers):
    number, layout = _get(values, f"{kind}.num_sparse_layers"), values.get(f"{kind}.sparse_layout")
    if layout is not None and not str(getattr(layout, "name", layout)).endswith("MIXED"):
        raise _unknown(f"{kind}.sparse_layout", layout)
    if type(number) is not int or type(num_layers) is not int or number < 0 or (number and num_layers % number):
        raise _unknown(f"{kind}.num_sparse_layers", number)
    return num_layers // number if number else 0


def _routing(values, scope) -> tuple[str, int, float]:
    """Returns the policy of a stack, the number of experts of a token, and the jitter."""
    router = _get(values, f"{_MOE}.router", scope)
    kind = _name(router)
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
    """Returns a value, within a scope if it has one there."""
    for key in (f"{scope}/{name}", name):
        if key in values:
            return values[key]
    raise Refusal(f"{name} is missing")


def _name(value):
    """Returns the class that a Reference names as "module.Class", or the value itself."""
    return ".".join(value.name.split(".")[-2:]) if isinstance(value, Reference) else value


def _unknown(name, value):
    return Refusal(f"{name} is {checks.shown(value)}, and it is not "
                   "known what that means")
