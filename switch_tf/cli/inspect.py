"""`switch-tf inspect`: parameters by part, FLOPs, bytes and, under a layout, bytes per device; builds no model."""

import pathlib
import sys

from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints import sizes as checkpoint_sizes
from switch_tf.cli import gin_files, gin_run
from switch_tf.configs import shipped_gin
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.messages import first_line
from switch_tf.optim import memory
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal

EXAMPLES = r"""
switch-tf inspect switch_base_8
switch-tf inspect --list
"""


def add_arguments(parser) -> None:
    """Declares what to inspect and the lengths of a sequence."""
    parser.add_argument("what", nargs="?", metavar="PRESET|GIN_FILE|RUN|CHECKPOINT|FOLDER",
                        help="a preset such as switch_base_8, a model's gin file, a run folder, a checkpoint folder or "
                             "a folder of Hugging Face")
    parser.add_argument("--list", action="store_true", help="name all presets")
    parser.add_argument("--inputs_length", type=int, default=512, help="tokens, for the FLOPs (default 512)")
    parser.add_argument("--targets_length", type=int, default=114, help="tokens, for the FLOPs (default 114)")
    gin_files.add_arguments(parser)


def run(arguments) -> dict:
    """Prints what is asked for; the same as a JSON object."""
    stream = sys.stderr if arguments.json else sys.stdout
    if arguments.list:
        configs = {name: SwitchConfig.from_preset(name) for name in shipped_gin.preset_names()}
        _print_list(configs, stream)
        return {"presets": list(configs)}
    layout = None
    if arguments.what and pathlib.Path(arguments.what).is_dir():
        result = _inspect_folder(pathlib.Path(arguments.what), arguments)
    else:
        config, layout = _config_and_layout(arguments)
        result = _inspect_config(config, arguments.inputs_length, arguments.targets_length)
        if layout is not None and not layout.open_axes:
            result["bytes_per_device"] = memory.bytes_per_device(config, layout)
    _print(result, stream)
    if layout is not None and layout.open_axes:
        print(f"Bytes per device depend on the size of mesh axis {layout.open_axes[0]!r}, for example "
              f"--gin.MESH_SHAPE=\"'{','.join([layout.open_axes[0] + '=8', *filter(None, [layout.mesh_shape])])}'\".",
              file=stream)
    return result


def _config_and_layout(arguments):
    """Returns the configuration, and the layout that the gin files bind or None."""
    name, files = arguments.what, list(arguments.gin_file)
    if not name and not files:
        raise Refusal("Name what to inspect: a preset (`switch-tf inspect --list` names them all), a model's gin file, "
                      "a run folder, a checkpoint folder or a folder of Hugging Face.")
    if name and "/" in name and not name.endswith(".gin"):
        raise Refusal(f"There is no folder {name!r} here.")
    if name and not name.endswith(".gin"):
        if not files and not arguments.gin_bindings:
            return SwitchConfig.from_preset(name), None
        name = f"gin/models/{name}.gin"
    import gin

    gin_files.parse([name, *files] if name else files, arguments.gin_bindings, arguments.gin_search_paths)
    config = gin_run.or_mistake(gin.get_configurable(SwitchConfig))
    if ("", "switch_tf.partitioning.layout.Layout") not in gin.config._CONFIG:
        return config, None
    return config, gin_run.or_mistake(gin.get_configurable(Layout))


def _inspect_config(config, inputs_length, targets_length):
    if inputs_length < 1 or targets_length < 0:
        raise Refusal(f"--inputs_length must be at least 1 and --targets_length at least 0, not {inputs_length} and "
                      f"{targets_length}.")
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
        "bytes": memory.stored_bytes(config),
    }


def _sizes(config):
    """The fields of a configuration by which people know a model; experts are 0 for a dense one."""
    names = ("d_model", "d_ff", "num_heads", "d_kv", "num_encoder_layers", "num_decoder_layers", "num_experts",
             "encoder_sparse_step", "decoder_sparse_step", "vocab_size")
    return {name: getattr(config, name) for name in names if config.num_experts or "sparse" not in name}


def _print_list(configs, stream):
    """Prints a table of presets."""
    print(f"{'preset':<24}{'parameters':>12}{'d_model':>9}{'layers':>10}{'heads':>7}{'experts':>9}", file=stream)
    for name, config in configs.items():
        layers = f"{config.num_encoder_layers} + {config.num_decoder_layers}"
        parameters = _short(config.num_parameters, "")
        print(f"{name:<24}{parameters:>12}{config.d_model:>9,}{layers:>10}{config.num_heads:>7}"
              f"{config.num_experts or 'dense':>9}", file=stream)


def _inspect_folder(folder, arguments):
    """Inspects a run, a checkpoint, or a folder of Hugging Face, whose `config.json` is not that of a run."""
    if not (folder / run_config.FILE).is_file() or run_config.is_in(folder):
        return _inspect_checkpoint(folder)
    from switch_tf.conversion import huggingface_folder

    config = huggingface_folder.read_config(folder)
    return _inspect_config(config, arguments.inputs_length, arguments.targets_length)


def _inspect_checkpoint(folder):
    try:
        checkpoint = folders.resolve(folder)
    except Refusal as error:
        raise Refusal(f"{str(folder)!r} holds no checkpoint: name a run folder, one of its checkpoints/step_... "
                      "folders, or a folder of Hugging Face, which holds config.json.") from error
    summary = checkpoint_sizes.summary(checkpoint)
    return {**_of_run(checkpoint.resolve().parent.parent), "checkpoint": str(checkpoint), **summary}


def _of_run(folder):
    """Returns the task, vocabulary and sizes in a run's `config.json`; {} if it has none that can be read."""
    if not run_config.is_in(folder):
        return {}
    try:
        saved = run_config.read(folder)
    except ValueError as error:  # the checkpoint can be looked at nevertheless
        print(first_line(error), file=sys.stderr)
        return {}
    names = dict.fromkeys(str(one.get("name")) for one in saved.vocabularies.values())
    return {"task": saved.task, "task_feature_lengths": saved.task_feature_lengths, "vocabulary": " and ".join(names),
            "sizes": _sizes(saved.model)}


def _print(result, stream):
    for name in ("task", "vocabulary"):
        if name in result:
            print(f"{name:<12}{result[name]}", file=stream)

    def show(title, entries, unit):
        print(f"{title}", file=stream)
        for name, value in entries.items():
            shown = "" if unit is None else _short(value, unit)
            print(f"  {name:<20}{value:>26,}  {shown}".rstrip(), file=stream)

    if "checkpoint" in result:
        print(f"{result['checkpoint']}: step {result['step']}", file=stream)
    if "sizes" in result:
        show("Model", result["sizes"], None)
    parts = {**result.get("parameters_by_part", {}), "total": result["num_parameters"]}
    show("Parameters", parts, "")
    if "flops_per_sequence" in result:
        lengths = result["lengths"]
        show(f"FLOPs of a forward pass, {lengths['inputs']} tokens in, {lengths['targets']} out",
             {**result["flops_by_part"], "total": result["flops_per_sequence"]}, "FLOP")
        show("not in that total", result["flops_apart"], "FLOP")
    show("Bytes", result["bytes"], "B")
    if "bytes_per_device" in result:
        each, whole = result["bytes_per_device"], result["bytes"]
        show(f"Bytes per device under {','.join(f'{axis}={size}' for axis, size in each['mesh'].items())}",
             {"weights": each["weights"], "Adafactor slots": each["optimizer_slots"], "total": each["total"],
              "(whole model)": whole["weights"] + whole["optimizer"]}, "B")


def _short(value, unit):
    """1571327875360 -> "1571.3B" for parameters, "1.6 TFLOP", "5.7 TiB"."""
    if unit == "B":
        for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
            if value < 1024 or prefix == "Ti":
                return f"{value:.1f} {prefix}B"
            value /= 1024
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if unit and value >= size:
            return f"{value / size:.1f} {prefix}{unit}"
    if not unit and value >= 1e9:
        return f"{value / 1e9:.2f}B" if value < 1e10 else f"{value / 1e9:.1f}B"
    return f"{value / 1e6:.1f}M" if not unit and value >= 1e6 else ""
