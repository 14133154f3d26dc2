"""May a run go on from a checkpoint? Its configuration then and now, compared before anything is built or restored.

Every checkpoint holds the record of what it was trained with, names as a user binds them. Of each name that differs:

* what the weights are, or what they mean: refused;
* which batches come next: refused, or the data start anew where `Run.restart_changed_data` asks for it;
* all else: a line says so.

What cannot change a number (MODEL_DIR, layout, devices, dispatch, rematerialisation) is not in it. Needs no TensorFlow.
"""

import dataclasses
import json
from typing import Any

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

# Fields of SwitchConfig: the shapes of the weights, and how they are read.
_MODEL = {f"SwitchConfig.{name}" for name in (
    "vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_encoder_layers", "num_decoder_layers", "activation",
    "logits_via_embedding", "scale_decoder_outputs", "layer_norm_epsilon", "relative_attention_num_buckets",
    "relative_attention_max_distance", "num_experts", "encoder_sparse_step", "decoder_sparse_step", "extra_mlp",
    "expert_sublayers")}
_FIXED = _MODEL | {"optimizer", "objective", "vocabulary", "StepSettings.trainable"}
# A saved position holds batches that were read ahead, so their shape belongs to it.
_DATA = {"MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "BATCH_SIZE", "Run.pack", "Run.cache_parts",
         "StepSettings.steps_per_call", "training data"}
_WITHOUT_EFFECT = {
    "SwitchConfig": ("dispatch", "remat"),
    "Run": ("model_dir", "restart_changed_data", "vocabulary", "use_cached_tasks",
            "cache_dir"),  # their contents are in "vocabulary" and "training data"
    "StepSettings": ("num_microbatches", "use_xla"),
}
_MACROS = ("mixture_or_task_name", "task_feature_lengths", "train_steps", "batch_size", "log_period", "eval_period",
           "checkpoint_period", "seed", "initial_checkpoint")


def record(config, run, settings, dtype: str, optimizer, objective, training_data: dict, held_out_data: dict,
           vocabulary: list) -> dict[str, Any]:
    """What a checkpoint keeps of the configuration that trained it: name -> JSON value.

    Args:
        config: SwitchConfig.
        run: Run.
        settings: StepSettings.
        dtype: str, the model's policy.
        optimizer: Keras optimizer, not built.
        objective: Objective.
        training_data, held_out_data, vocabulary: from `data.fingerprint` and `data.vocabulary_fingerprint`.
    """
    found = {"optimizer": type(optimizer).__name__, "objective": type(objective).__name__,
             "SwitchTransformer.dtype": dtype, "vocabulary": vocabulary, "training data": training_data,
             "held-out data": held_out_data}
    for part in (config, run, settings):
        kind = type(part).__name__
        for field in dataclasses.fields(part):
            if field.name not in _WITHOUT_EFFECT.get(kind, ()):
                name = field.name.upper() if kind == "Run" and field.name in _MACROS else f"{kind}.{field.name}"
                found[name] = getattr(part, field.name)
    found |= {f"{type(optimizer).__name__}.{name}": value for name, value in _settings_of(optimizer).items()}
    found |= {f"{type(objective).__name__}.{name}": value for name, value in objective.get_config().items()}
    return json.loads(json.dumps(found, default=lambda value: type(value).__name__))


def record_of_model(config) -> dict[str, Any]:
    """What a checkpoint of weights alone keeps: the part of `record` that is its model's."""
    return {f"SwitchConfig.{field.name}": getattr(config, field.name) for field in dataclasses.fields(config)
            if field.name not in _WITHOUT_EFFECT["SwitchConfig"]}


def model_fields(saved: dict) -> dict[str, Any]:
    """The fields of the SwitchConfig in a checkpoint's record.

    Raises:
        Refusal: one that SwitchConfig has not.
    """
    parts = (name.partition(".") for name in saved)
    found = {field: saved[f"{kind}.{field}"] for kind, _, field in parts if kind == "SwitchConfig"}
    if unknown := sorted(found.keys() - {field.name for field in dataclasses.fields(SwitchConfig)}):
        raise Refusal(f"The checkpoint is of a model with {unknown[0]!r}, which this SwitchConfig does not have; "
                      "use the version of switch_tf that wrote it.")
    return found


def check_weights(saved: dict, new: dict, checkpoint, vocabularies=None) -> None:
    """Raises Refusal where a new run could not start from the weights of a checkpoint; arguments as of `check`."""
    if different := [name for name in _differences(saved, new) if name in _MODEL | {"vocabulary"}]:
        told = _told(different, saved, new, vocabularies)
        raise Refusal(f"The weights of {checkpoint} are of another model: {told}. Use the model file and the "
                      "VOCABULARY that it was trained with, or another INITIAL_CHECKPOINT.")


def check(saved: dict, new: dict, checkpoint, restart_changed_data=False, vocabularies=None) -> tuple[list[str], bool]:
    """Compares a checkpoint's record with that of the run that would go on from it.

    Args:
        saved, new: from `record`; `saved` is empty where an older version wrote the checkpoint.
        checkpoint: its folder, to be named.
        restart_changed_data: bool, see `Run`.
        vocabularies: descriptions of the old and the new vocabulary, or None if there are none.

    Returns:
        The lines to say, and whether the data start anew.

    Raises:
        Refusal: what differs, with both values, and the way out.
    """
    if not saved:
        return [f"{checkpoint} is of a version that kept no record of the configuration, so only its variables are "
                "compared with the model and the optimizer." +
                " The data are read from their beginning." * restart_changed_data], restart_changed_data
    differences = [name for name in _differences(saved, new) if name != "INITIAL_CHECKPOINT"]  # it has its weights
    if fixed := [name for name in differences if name in _FIXED]:
        told = _told(fixed, saved, new, vocabularies)
        raise Refusal(
            f"{checkpoint} is of another model or optimizer: {told}. Start it with the "
            "configuration it was saved with (operative_config.gin in its run folder), or use another MODEL_DIR.")
    data = [name for name in differences if name in _DATA]
    if data and not restart_changed_data:
        raise Refusal(
            f"{checkpoint} stands in other data: {_told(data, saved, new)}. Go on with the data as they were, or from "
            "the beginning of the new ones with --gin.Run.restart_changed_data=True, or use another MODEL_DIR.")
    lines = [f"The data are others, so they are read from their beginning: {_told(data, saved, new)}."] if data else []
    changed = [name for name in differences if name not in _FIXED | _DATA]
    if changed:
        lines.append(f"Changed since {checkpoint}: {_told(changed, saved, new)}.")
    return lines, bool(data)


def _differences(saved, new):
    """Names that differ, of those in both records: a name that another version of this package lacks says nothing."""
    return [name for name in saved if name in new and saved[name] != new[name]]


def _told(names, saved, new, vocabularies=None):
    return "; ".join(
        f"VOCABULARY was {vocabularies[0]} and is {vocabularies[1]}" if name == "vocabulary" and vocabularies else
        _difference(name, saved[name], new[name]) for name in names)


def _difference(name, saved, new):
    if name not in ("training data", "held-out data"):
        return f"{name} was {saved!r} and is {new!r}"
    files = [file for file in sorted({*saved, *new}) if saved.get(file) != new.get(file)]
    first, more = files[0], f" and {len(files) - 1} more" * (len(files) > 1)
    return f"the {name}, {first}{more}, was {saved.get(first, 'not there')} and is {new.get(first, 'not there')}"


def _settings_of(optimizer):
    """The optimizer's arguments, a schedule as one text."""
    try:
        arguments = optimizer.get_config()
    except NotImplementedError:  # a user's own schedule need not be serializable to be trained with
        return {"learning_rate": type(optimizer._learning_rate).__name__}
    arguments.pop("name", None)
    return {name: _plain(value) for name, value in arguments.items()}


def _plain(value):
    if isinstance(value, float):
        return float(f"{value:.7g}")  # a learning rate has been through float32
    if isinstance(value, dict) and "class_name" in value:
        arguments = ", ".join(f"{name}={_plain(entry)}" for name, entry in (value.get("config") or {}).items())
        return f"{value['class_name']}({arguments})"
    return value
