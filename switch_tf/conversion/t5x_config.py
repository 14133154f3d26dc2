"""The configuration of a T5X checkpoint, from the gin file that T5X wrote beside it.

`config.gin` in the folder of a run has all values, resolved: those of `network.T5Config` for T5X's own T5, and for
Flaxformer those of its layers. The file is read as data (`gin_syntax.py`), never executed. Values that change neither
weights nor numbers are passed over, and any other that is not understood is refused by its name.
"""

from collections.abc import Mapping
from typing import Any

from switch_tf import checks
from switch_tf.configs import gin_syntax
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import flaxformer_config
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
_T5X_DEFAULTS = {"d_model": 512, "num_heads": 8, "d_kv": 64, "d_ff": 2048, "num_encoder_layers": 6,
                 "num_decoder_layers": 6, "dropout_rate": 0.1, "logits_via_embedding": False, "activation": ("relu",)}
_WITHOUT_EFFECT = {"dtype", "float32_attention_logits", "remat_policy", "scan_unroll", "param_scan_axis"}


def find(folder: Any) -> tuple[SwitchConfig, Any] | None:
    """Returns the configuration of a checkpoint and the file that has it, beside or above it; None if none is there.

    Args:
        folder: Path of the checkpoint, which may be in a bucket, or of `state` within it.

    Raises:
        Refusal: The file describes a model that is not understood.
    """
    for place in (folder, folder.parent, *([folder.parent.parent] if folder.name == "state" else [])):
        for path in (place / name for name in FILES):
            if path.is_file() and (config := read(path)) is not None:
                return config, path
    return None


def read(path: Any) -> SwitchConfig | None:
    """Returns the configuration of a gin file of T5X, or None if it describes no model of T5X.

    Raises:
        Refusal: It describes one that is not understood.
    """
    try:
        values, includes = gin_syntax.assignments(path)
        values = {_short(name): value for name, value in values.items()}
        if any(name.startswith("network.T5Config.") for name in values):
            fields = _fields_of_t5x(values)
        elif flaxformer_config.is_described(values):
            fields = flaxformer_config.fields_of(values)
        else:
            return None
        if includes:
            raise Refusal(f"it includes {checks.shown(includes[0])}, which is not read")
        unread = next((name for name, value in fields.items()
                       if isinstance(value, gin_syntax.Macro | gin_syntax.Reference)), None)
        if unread is not None:
            raise Refusal(f"{unread} would be {fields[unread]}, which is no value")
        return SwitchConfig(**{**fields, "activation": _activation(fields["activation"])})
    except Refusal as error:
        raise Refusal(f"The model cannot be taken from {path} ({first_line(error).rstrip('.')}); give its "
                      "configuration with --gin_file.") from None


def _short(name):
    """Returns a name as "scope/module.Class.parameter", without the package of the module."""
    scope, slash, selector = name.rpartition("/")
    return f"{scope}{slash}{'.'.join(selector.split('.')[-3:])}"


def _fields_of_t5x(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(_T5X_DEFAULTS)
    for name, value in values.items():
        kind, _, parameter = name.rpartition(".")  # with its scope, and a scoped one is not understood
        if kind == "network.T5Config" and parameter in _T5X:
            fields[_T5X[parameter]] = value
        elif kind.rpartition("/")[2].startswith("network.") and name != "network.Transformer.config" and not (
                kind == "network.T5Config" and parameter in _WITHOUT_EFFECT):
            raise Refusal(f"{name} is {checks.shown(value)}, and it is not known what that means")
    if "vocab_size" not in fields:
        raise Refusal("network.T5Config.vocab_size is missing")
    return fields


def _activation(value):
    names = tuple(value) if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value) else ()
    if names not in _ACTIVATIONS:
        raise Refusal(f"the activations are {checks.shown(value)}, and this package has "
                      f"{', '.join(str(names) for names in _ACTIVATIONS)}")
    return _ACTIVATIONS[names]
