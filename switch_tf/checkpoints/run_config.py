"""`config.json` of a run folder: everything needed to use the model, as data.

A run folder may be a stranger's, so the contents are checked. Needs no TensorFlow.
"""

import dataclasses
from typing import Any

from switch_tf import __version__, checks
from switch_tf.checkpoints import folders
from switch_tf.configs import policies
from switch_tf.configs.choices import check_choice
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import json_lines
from switch_tf.storage.whole_file import write_whole

FILE = "config.json"
FORMAT_VERSION = 1
ACTIVATION_DTYPES = ("auto", "float32", "bfloat16", "float64")
DTYPES = ("float32", "float64", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16")
_LONGEST = 2**16  # tokens, because decoding caches their keys and values
FEATURES = {"inputs", "targets"}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The contents of `config.json`, without `format_version` and `package_version`.

    Args:
        dtype: Keras policy that the run trained with.
        activation_dtype: The ACTIVATION_DTYPE of this policy. "auto" depends on the device.
        task: Name of the seqio task or mixture.
        task_feature_lengths: Tokens of "inputs" and "targets".
        reading: JSON-able rules that turn texts into ids.
        vocabularies: "inputs" and "targets" -> fields of `data.vocabularies.Stored`.
        policies: Name of a user's routing policy -> "module:function".
    """

    model: SwitchConfig
    dtype: str
    activation_dtype: str | None
    task: str
    task_feature_lengths: dict
    reading: dict
    vocabularies: dict
    policies: dict = dataclasses.field(default_factory=dict)


def write(folder: Any, config: RunConfig) -> None:
    """Writes `config.json` into a run folder, atomically."""
    contents = {"format_version": FORMAT_VERSION, "package_version": __version__, **dataclasses.asdict(config)}
    write_whole(folder / FILE, json_lines.dumps(contents, indent=1) + "\n")


def is_in(folder: Any) -> bool:
    """Whether a folder has the `config.json` of a run, damaged or not."""
    return (folder / FILE).is_file() and (folder / "checkpoints").is_dir() and not is_foreign(folder)


def is_hugging_face(folder: Any) -> bool:
    """Whether a folder has a `config.json` and is neither a run nor a checkpoint."""
    return (folder / FILE).is_file() and not (
        (folder / "checkpoint.json").is_file() or folders.steps(folder / "checkpoints") or is_in(folder))


def is_foreign(folder: Any) -> bool:
    """Whether a folder has another kind of `config.json`, such as a Hugging Face model's."""
    path = folder / FILE
    if not path.is_file():
        return False
    try:
        contents = json_lines.load(path)
    except ValueError:  # damaged, so a run rewrites it
        return False
    return not isinstance(contents, dict) or "format_version" not in contents


def read(folder: Any) -> RunConfig:
    """Reads `config.json` of a run folder without executing code."""
    path = folder / FILE
    try:
        contents = json_lines.load(path, is_strict=True)
    except (ValueError, OSError) as error:
        raise Refusal(f"{path} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}.") from error
    if not isinstance(contents, dict) or "format_version" not in contents:
        raise Refusal(f"{path} is no configuration of a run: it has no format_version.")
    if contents["format_version"] != FORMAT_VERSION:
        raise Refusal(f"{path} has format {checks.shown(contents['format_version'])} and this version of switch_tf "
                      f"reads format {FORMAT_VERSION}; use the version that wrote it.")
    keys = {field.name for field in dataclasses.fields(RunConfig)} | {"format_version", "package_version"}
    if different := sorted(keys ^ contents.keys()):
        raise Refusal(f"{path} must have the keys {', '.join(sorted(keys))}; {checks.shown(different[0])} is "
                      f"{'missing' if different[0] in keys else 'none of them'}.")
    try:
        for name in ("model", "reading", "vocabularies", "policies"):
            if not isinstance(contents[name], dict):
                raise Refusal(f"{name} must be an object, not {checks.shown(contents[name])}.")
        check_choice("dtype", contents["dtype"], DTYPES)
        checks.optional("activation_dtype", contents["activation_dtype"], check_choice, ACTIVATION_DTYPES)
        if contents["vocabularies"].keys() != FEATURES or not all(
                isinstance(vocabulary, dict) for vocabulary in contents["vocabularies"].values()):
            raise Refusal("vocabularies must describe inputs and targets, not "
                          f"{checks.shown(contents['vocabularies'])}.")
        lengths = checks.lengths("task_feature_lengths", contents["task_feature_lengths"])
        if max(lengths.values()) > _LONGEST:
            raise Refusal(f"task_feature_lengths must be at most {_LONGEST}, not {lengths}.")
        checks.text("task", contents["task"])
        fields, own_policies = contents["model"], contents["policies"]
        # A missing field is newer than the run, and has its default.
        if unknown := sorted(fields.keys() - {field.name for field in dataclasses.fields(SwitchConfig)}):
            raise Refusal(f"model must have the fields of SwitchConfig; {checks.shown(unknown[0])} is none of them.")
        for name in ("routing_policy", "decoder_routing_policy"):
            policy = fields.get(name)
            if isinstance(policy, str) and policy in own_policies and policy not in policies.names():
                raise Refusal(f"the model needs the routing policy {policy!r} ({checks.shown(own_policies[policy])}), "
                              f"which is not registered here; read operative_config.gin in {folder}, whose imports "
                              "register it, and add --trust to run it.")
        config = SwitchConfig(**fields)
        if config.expert_capacity is not None and config.expert_capacity > _LONGEST:
            raise Refusal(f"expert_capacity must be at most {_LONGEST}, not {config.expert_capacity}.")
        del contents["format_version"], contents["package_version"]
        return RunConfig(**{**contents, "model": config, "task_feature_lengths": lengths})
    except RecursionError:
        raise Refusal(f"{path} cannot be read: its brackets are nested too deeply.") from None
    except (ValueError, TypeError) as error:
        raise Refusal(f"{path}: {first_line(error)}") from error
