"""Sizes of a model: parameters, FLOPs and bytes."""

import pathlib
import sys

from switch_tf.checkpoints import folders, run_config
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.optim import factoring
from switch_tf.refusals import Refusal, first_line

_SIZES = ("d_model", "d_ff", "num_heads", "d_kv", "num_encoder_layers", "num_decoder_layers", "num_experts",
          "encoder_sparse_step", "decoder_sparse_step", "vocab_size")

# Unit -> (least number, prefix).
_PREFIXES = {"B": ((2**40, " Ti"), (2**30, " Gi"), (2**20, " Mi"), (2**10, " Ki"), (1, " ")),
             "FLOP": ((1e12, " T"), (1e9, " G"), (1e6, " M")), "": ((1e9, "B"), (1e6, "M"))}


def sizes(config: SwitchConfig) -> dict[str, int]:
    """Returns the main fields of a configuration, for a dense model without the sparse ones."""
    shown = {name: getattr(config, name) for name in _SIZES if config.num_experts or "sparse" not in name}
    chosen = ("expert_d_ff", "encoder_sparse_indices", "decoder_sparse_indices") if config.num_experts else ()
    return shown | {name: getattr(config, name) for name in chosen if getattr(config, name) is not None}


def as_json(config: SwitchConfig, inputs_length: int, targets_length: int) -> dict:
    """Returns the sizes, parameters, FLOPs of a sequence and bytes of a model without building it."""
    flops = config.flops_by_part(inputs_length, targets_length)
    apart = {part: flops.pop(part) for part in ("attention_scores", "logits", "capacity_padding")}
    return {
        "sizes": sizes(config),
        "num_parameters": config.num_parameters,
        "parameters_by_part": config.parameters_by_part(),
        "flops_per_sequence": config.flops_per_sequence(inputs_length, targets_length),
        "flops_by_part": flops,
        "flops_apart": apart,
        "lengths": {"inputs": inputs_length, "targets": targets_length},
        "bytes": factoring.stored_bytes(config),
    }


def checkpoint_costs(folder: str | pathlib.Path) -> dict:
    """Returns the step, parameters and bytes of a (run's newest) checkpoint, and its run's task and vocabulary."""
    try:
        checkpoint = folders.resolve(folder)
    except Refusal as error:
        raise Refusal(f"{str(folder)!r} holds no checkpoint: name a run folder, one of its checkpoints/step_... "
                      "folders, or a folder of Hugging Face, which holds config.json.") from error
    of_run, folder = {}, checkpoint.resolve().parent.parent
    if run_config.is_in(folder):
        try:
            saved = run_config.read(folder)
            names = dict.fromkeys(str(vocabulary.get("name")) for vocabulary in saved.vocabularies.values())
            of_run = {"task": saved.task, "task_feature_lengths": saved.task_feature_lengths,
                      "vocabulary": " and ".join(names), "sizes": sizes(saved.model)}
        except Refusal as error:
            print(first_line(error), file=sys.stderr)
    return {**of_run, "checkpoint": str(checkpoint), **folders.summary(checkpoint)}


def table(configs: dict[str, SwitchConfig]) -> str:
    """Returns a table of presets."""
    lines = [f"{'preset':<24}{'parameters':>12}{'d_model':>9}{'layers':>10}{'heads':>7}{'experts':>9}"]
    for name, config in configs.items():
        layers = f"{config.num_encoder_layers} + {config.num_decoder_layers}"
        parameters = _short(config.num_parameters, "")
        lines.append(f"{name:<24}{parameters:>12}{config.d_model:>9,}{layers:>10}{config.num_heads:>7}"
                     f"{config.num_experts or 'dense':>9}")
    return "\n".join(lines)


def describe(result: dict) -> str:
    """Returns the text of a result with any of: `as_json`, `checkpoint_costs`, "bytes_per_device"."""
    lines = [f"{name:<12}{result[name]}" for name in ("task", "vocabulary") if name in result]

    def add(title, entries, unit):
        lines.append(title)
        for name, value in entries.items():
            short = "" if unit is None else _short(value, unit)
            number = ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:,}"
            lines.append(f"  {name:<22}{number:>24}  {short}".rstrip())

    if "checkpoint" in result:
        lines.append(f"{result['checkpoint']}: step {result['step']}")
    if "sizes" in result:
        add("Model", result["sizes"], None)
    add("Parameters", {**result.get("parameters_by_part", {}), "total": result["num_parameters"]}, "")
    if "flops_per_sequence" in result:
        lengths = result["lengths"]
        add(f"FLOPs of a forward pass, {lengths['inputs']} tokens in, {lengths['targets']} out",
            {**result["flops_by_part"], "total": result["flops_per_sequence"]}, "FLOP")
        add("not in that total", result["flops_apart"], "FLOP")
    add("Bytes", result["bytes"], "B")
    if "bytes_per_device" in result:
        device, model = result["bytes_per_device"], result["bytes"]
        add(f"Bytes per device under {','.join(f'{axis}={size}' for axis, size in device['mesh'].items())}",
            {"weights": device["weights"], "Adafactor slots": device["optimizer_slots"], "total": device["total"],
             "(whole model)": model["weights"] + model["optimizer"]}, "B")
    return "\n".join(lines)


def _short(value, unit):
    """Returns "1571.3B" for 1571327875360 parameters, "1.6 TFLOP", "5.7 TiB"."""
    for size, prefix in _PREFIXES[unit]:
        if value >= size or size == 1:
            return f"{value / size:.{2 if not unit and 1e9 <= value < 1e10 else 1}f}{prefix}{unit}"
    return ""
