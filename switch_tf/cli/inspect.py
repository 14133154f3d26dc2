"""`switch-tf inspect`: prints the sizes of a model, or reads the files of checkpoints."""

import sys
from argparse import Namespace

from switch_tf.checkpoints import folders, run_config
from switch_tf.cli import options
from switch_tf.cli.parser import count, option
from switch_tf.configs import shipped_gin
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_config
from switch_tf.optim import factoring
from switch_tf.refusals import Refusal, first_line
from switch_tf.reporting import progress
from switch_tf.storage import places

_SIZES = ("d_model", "d_ff", "num_heads", "d_kv", "num_encoder_layers", "num_decoder_layers", "num_experts",
          "encoder_sparse_step", "decoder_sparse_step", "vocab_size")
_SIZES_IF_SET = ("expert_d_ff", "encoder_sparse_indices", "decoder_sparse_indices")
# Unit -> (least number, prefix).
_PREFIXES = {"B": ((2**40, " Ti"), (2**30, " Gi"), (2**20, " Mi"), (2**10, " Ki"), (1, " ")),
             "FLOP": ((1e12, " T"), (1e9, " G"), (1e6, " M")), "": ((1e9, "B"), (1e6, "M"))}

INSPECT_EXAMPLES = r"""
switch-tf inspect switch_base_8
switch-tf inspect runs/x --verify
"""
INSPECT_ARGUMENTS = (
    option("what",
           "a preset such as switch_base_8, a model's gin file, a run folder, a checkpoint folder or a folder of "
           "Hugging Face", "PRESET|GIN_FILE|RUN|CHECKPOINT|FOLDER", nargs="?"),
    option("--list", "name all presets"),
    option("--verify",
           "read every file of a run's checkpoints, or of one, and compare it with its recorded sum; status 1 if "
           "one is damaged"),
    count("--inputs_length", "tokens, for the FLOPs (default 512)", 512),
    count("--targets_length", "tokens, for the FLOPs (default 114)", 114, at_least=0),
    *options.GIN,
)


def run_inspect(arguments: Namespace) -> dict | tuple[dict, str]:
    """Returns the presets, a model's sizes, or the state of checkpoints."""
    if arguments.verify:
        return _verify(arguments)
    if arguments.list:
        lines = [f"{'preset':<24}{'parameters':>12}{'d_model':>9}{'layers':>10}{'heads':>7}{'experts':>9}"]
        for name in shipped_gin.preset_names():
            config = SwitchConfig.from_preset(name)
            layers = f"{config.num_encoder_layers} + {config.num_decoder_layers}"
            lines.append(f"{name:<24}{_short(config.num_parameters, ''):>12}{config.d_model:>9,}{layers:>10}"
                         f"{config.num_heads:>7}{config.num_experts or 'dense':>9}")
        return {"presets": shipped_gin.preset_names()}, "\n".join(lines)
    config = layout = None
    folder = places.at(arguments.what) if arguments.what else None
    if not folder or not folder.is_dir():
        config, layout = _config_and_layout(arguments)
    elif (folder / run_config.FILE).is_file() and not run_config.is_in(folder):
        config = huggingface_config.read_config(folder)
    if config:
        result = _model_costs(config, arguments.inputs_length, arguments.targets_length)
    else:
        result = _checkpoint_costs(folder)
    hint = ""
    if layout and layout.open_axes:
        example = ",".join([f"{layout.open_axes[0]}=8", *filter(None, [layout.mesh_shape])])
        hint = (f"\nBytes per device depend on the size of mesh axis {layout.open_axes[0]!r}, for example "
                f"--gin.MESH_SHAPE=\"'{example}'\".")
    elif layout:
        result["bytes_per_device"] = factoring.bytes_per_device(config, layout)
    return result, _describe(result) + hint


def _verify(arguments):
    if not arguments.what:
        raise Refusal("--verify reads checkpoints: name a run folder, or one of its checkpoints/step_... folders.")
    checkpoints = folders.checkpoints_in(arguments.what)
    if not checkpoints:
        raise Refusal(f"{arguments.what!r} holds no checkpoint to verify: name a run folder, or one of its "
                      "checkpoints/step_... folders.")
    findings = []
    with progress.bar(sum(map(folders.num_bytes_of, checkpoints)), "verifying") as bar:
        for checkpoint in checkpoints:
            findings.append(folders.verify(checkpoint, bar.update))
            bar.clear()  # `bar.write` would draw the bar too early
            print(findings[-1], flush=True)
    return {"checkpoints": [{"checkpoint": str(finding.checkpoint), "is_whole": not finding.damage,
                             "damage": finding.damage, "has_sums": finding.has_sums, "bytes": finding.num_bytes}
                            for finding in findings],
            "exit_status": int(any(finding.damage for finding in findings))}


def _config_and_layout(arguments):
    name, files = arguments.what, arguments.gin_file
    if not name and not files:
        raise Refusal("Name what to inspect: a preset (`switch-tf inspect --list` names them all), a model's gin file, "
                      "a run folder, a checkpoint folder or a folder of Hugging Face.")
    if name and not name.endswith(".gin"):
        if "/" in name:
            raise Refusal(f"There is no folder {name!r} here.")
        if not files and not arguments.gin_bindings:
            return SwitchConfig.from_preset(name), None
        name = f"gin/models/{name}.gin"
    arguments.gin_file = [name, *files] if name else files
    return options.read_model(arguments)


def _sizes(config):
    """Returns the main fields of a configuration, for a dense model without the sparse ones."""
    if not config.num_experts:
        return {name: getattr(config, name) for name in _SIZES if "sparse" not in name}
    return {name: value for name in (*_SIZES, *_SIZES_IF_SET)
            if (value := getattr(config, name)) is not None or name in _SIZES}


def _model_costs(config, inputs_length, targets_length):
    """Returns the sizes, parameters, FLOPs of a sequence and bytes of a model without building it."""
    flops = config.flops_by_part(inputs_length, targets_length)
    apart = {part: flops.pop(part) for part in ("attention_scores", "logits", "capacity_padding")}
    return {
        "sizes": _sizes(config),
        "num_parameters": config.num_parameters,
        "parameters_by_part": config.parameters_by_part(),
        "flops_per_sequence": config.flops_per_sequence(inputs_length, targets_length),
        "flops_by_part": flops,
        "flops_apart": apart,
        "lengths": {"inputs": inputs_length, "targets": targets_length},
        "bytes": factoring.stored_bytes(config),
    }


def _checkpoint_costs(folder):
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
                      "vocabulary": " and ".join(names), "sizes": _sizes(saved.model)}
        except Refusal as error:
            print(first_line(error), file=sys.stderr)
    return {**of_run, "checkpoint": str(checkpoint), **folders.summary(checkpoint)}


def _describe(result):
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
