"""Compares the configuration of a checkpoint with the run that resumes from it, before anything is built.

A difference in the weights or their meaning is refused. A difference in the training batches is refused, unless
`Run.restart_changed_data` restarts the data. Anything else is printed. Settings that cannot change a number (MODEL_DIR,
layout, devices, dispatch, rematerialisation) are not recorded.
"""

import dataclasses
import json
from typing import Any

from switch_tf.checkpoints import best, folders, run_config
from switch_tf.configs import names
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.run import MACROS, Run, StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

# Fields that determine the shapes or the meaning of the weights.
_MODEL = {f"SwitchConfig.{name}" for name in (
    "vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_encoder_layers", "num_decoder_layers", "activation",
    "logits_via_embedding", "scale_decoder_outputs", "layer_norm_epsilon", "relative_attention_num_buckets",
    "relative_attention_max_distance", "relative_attention_per_layer", "num_experts", "expert_d_ff",
    "encoder_sparse_step", "decoder_sparse_step", "encoder_sparse_indices", "decoder_sparse_indices", "extra_mlp",
    "expert_sublayers")}
_FIXED = _MODEL | {"optimizer", "objective", "vocabulary", "StepSettings.trainable"}
# A data position contains batches read ahead, so it depends on their shape.
_DATA = {"MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "BATCH_SIZE", "Run.pack", "Run.cache_parts",
         "StepSettings.steps_per_call", "training data"}
_WITHOUT_EFFECT = {
    "SwitchConfig": ("dispatch", "remat"),
    "Run": ("model_dir", "restart_changed_data", "profile_steps", "max_hours",
            "vocabulary", "use_cached_tasks", "cache_dir"),  # recorded by content
    "StepSettings": ("num_microbatches", "use_xla"),
}
_INITIAL = ("INITIAL_CHECKPOINT", "Run.initial_variables")  # of no effect on a resumed run
# Fields of Run that a record names by macro. Earlier versions named these three by field.
_BY_MACRO = set(MACROS) - {"best_metric", "patience", "cache_parts"}


def record(config: SwitchConfig, run: Run, settings: StepSettings, dtype: str, optimizer: Any, objective: Any,
           training_data: dict, held_out_data: dict, vocabulary: list, pieces: list) -> dict:
    """Returns the record of a configuration for a checkpoint: name -> JSON value.

    Args:
        dtype: The model's policy.
        optimizer: Keras optimizer, not built.
        training_data, held_out_data, vocabulary, pieces: From `data.fingerprint`, `data.vocabulary_fingerprint` and
            `data.pieces_fingerprint`.
    """
    entries = {"optimizer": type(optimizer).__name__, "objective": type(objective).__name__,
               "SwitchTransformer.dtype": dtype, "vocabulary": vocabulary, "pieces": pieces,
               "training data": training_data, "held-out data": held_out_data}
    entries |= record_of(config, run, settings)
    try:
        arguments = {name: _plain(value) for name, value in optimizer.get_config().items() if name != "name"}
    except NotImplementedError:  # a user's schedule need not be serializable
        arguments = {"learning_rate": type(optimizer._learning_rate).__name__}
    entries |= {f"{type(optimizer).__name__}.{name}": value for name, value in arguments.items()}
    entries |= {f"{type(objective).__name__}.{name}": value for name, value in objective.get_config().items()}
    return _json_values(entries)


def _json_values(entries):
    return json.loads(json.dumps(entries, default=lambda value: type(value).__name__))


def record_of(*parts: SwitchConfig | Run | StepSettings) -> dict:
    """Returns the record of parts of the configuration."""
    return _json_values({
        field.name.upper() if field.name in _BY_MACRO else f"{type(part).__name__}.{field.name}":
        getattr(part, field.name) for part in parts for field in dataclasses.fields(part)
        if field.name not in _WITHOUT_EFFECT[type(part).__name__]})


def model_difference(first: dict, second: dict) -> str:
    """Returns the first difference between the models of two records, or ""."""
    return _describe([name for name in _differences(first, second) if name in {"vocabulary"} | _MODEL][:1],
                     first, second)


def model_fields(saved: dict) -> dict:
    """Returns the fields of SwitchConfig in a checkpoint's record."""
    fields = {name.removeprefix("SwitchConfig."): value for name, value in saved.items()
              if name.startswith("SwitchConfig.")}
    if unknown := sorted(fields.keys() - {field.name for field in dataclasses.fields(SwitchConfig)}):
        raise Refusal(f"The checkpoint is of a model with {unknown[0]!r}, which this SwitchConfig does not have; "
                      "use the version of switch_tf that wrote it.")
    return fields


def check_weights(saved: dict, new: dict, checkpoint: folders.Folder,
                  vocabularies: tuple[str, str] | None = None, initial_variables: str = "all") -> None:
    """Refuses weights that a new run cannot start from. Arguments as in `check` and `Run`."""
    compared = {"all": {"vocabulary"} | _MODEL, "matching": {"vocabulary"},
                "with_optimizer": _FIXED - {"objective"}}[initial_variables]
    if different := [name for name in _differences(saved, new) if name in compared]:
        raise Refusal(f"The weights of {checkpoint} are of another model: "
                      f"{_describe(different, saved, new, vocabularies)}. Use the model file and the VOCABULARY that "
                      "it was trained with, or another INITIAL_CHECKPOINT.")


def check(saved: dict, new: dict, checkpoint: folders.Folder, restart_changed_data: bool = False,
          vocabularies: tuple[str, str] | None = None) -> tuple[list[str], bool]:
    """Compares a checkpoint's record with the run that would resume from it.

    Args:
        saved, new: From `record`. `saved` is empty if an older version wrote it.
        vocabularies: Descriptions of the old and the new vocabulary.

    Returns: `(lines, restarts_data)`: lines to print, and whether to read the data from their beginning.
    """
    if not saved:
        return [f"{checkpoint} is of a version that kept no record of the configuration, so only its variables are "
                "compared with the model and the optimizer." +
                " The data are read from their beginning." * restart_changed_data], restart_changed_data
    differences = [name for name in _differences(saved, new) if name not in _INITIAL]
    if fixed := [name for name in differences if name in _FIXED]:
        raise Refusal(
            f"{checkpoint} is of another model or optimizer: {_describe(fixed, saved, new, vocabularies)}. Start it "
            "with the configuration it was saved with (operative_config.gin in its run folder), or use another "
            "MODEL_DIR.")
    data = [name for name in differences if name in _DATA]
    if data and not restart_changed_data:
        raise Refusal(
            f"{checkpoint} stands in other data: {_describe(data, saved, new)}. Go on with the data as they were, or "
            "from the beginning of the new ones with --gin.Run.restart_changed_data=True, or use another MODEL_DIR.")
    lines = []
    if data:
        lines.append(f"The data are others, so they are read from their beginning: {_describe(data, saved, new)}.")
    changed = [name for name in differences if name not in _FIXED | _DATA]
    if changed:
        lines.append(f"Changed since {checkpoint}: {_describe(changed, saved, new)}.")
    return lines, bool(data)


def _differences(saved, new):
    """Compares common names, because versions record different ones."""
    return [name for name in saved if name in new and saved[name] != new[name]]


def _describe(names, saved, new, vocabularies=None):
    return "; ".join(
        f"VOCABULARY was {vocabularies[0]} and is {vocabularies[1]}" if name == "vocabulary" and vocabularies else
        _difference(name, saved[name], new[name]) for name in names)


def _difference(name, saved, new):
    if name not in ("training data", "held-out data"):
        return f"{name} was {saved!r} and is {new!r}"
    files = [file for file in sorted({*saved, *new}) if saved.get(file) != new.get(file)]
    first, more = files[0], f" and {len(files) - 1} more" * (len(files) > 1)
    return f"the {name}, {first}{more}, was {saved.get(first, 'not there')} and is {new.get(first, 'not there')}"


def _plain(value):
    if isinstance(value, float):
        return float(f"{value:.7g}")  # a learning rate was rounded to float32
    if isinstance(value, dict) and "class_name" in value:
        arguments = ", ".join(f"{name}={_plain(entry)}" for name, entry in (value.get("config") or {}).items())
        return f"{value['class_name']}({arguments})"
    return value


def check_early(described: Experiment) -> None:
    """Refuses a run that cannot start or resume, as known without TensorFlow.

    Checks VOCABULARY, the task of BEST_METRIC, and the newest checkpoint's model, batches and trained weights.
    """
    run = described.run
    checkpoints = folders.checkpoints_of(run.model_dir)
    if run.vocabulary is not None and not run_config.is_in(checkpoints.parent):  # a run folder has a copy
        names.check_vocabulary(run.vocabulary)
    if run.best_metric and not run.best_metric.startswith(tuple(f"eval/{task}" for task in names.task_names())):
        best.check(run.best_metric, [run.mixture_or_task_name], declares_directions=True)
    newest = described.config and next(folders.described(checkpoints), None)
    if newest:  # the trainer compares all values
        path, description = newest
        check(description["configuration"], record_of(described.config, run, described.settings), path,
              run.restart_changed_data)
