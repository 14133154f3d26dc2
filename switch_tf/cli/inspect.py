"""`switch-tf inspect`: prints the sizes of a model, or reads the files of checkpoints."""

from argparse import Namespace

from switch_tf.checkpoints import folders, run_config
from switch_tf.cli import options
from switch_tf.cli.parser import Parser
from switch_tf.configs import shipped_gin
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_config
from switch_tf.optim import factoring
from switch_tf.refusals import Refusal
from switch_tf.reporting import costs, progress
from switch_tf.storage import places

INSPECT_EXAMPLES = r"""
switch-tf inspect switch_base_8
switch-tf inspect runs/x --verify
"""


def add_inspect_arguments(parser: Parser) -> None:
    """Declares arguments."""
    parser.add("what",
               "a preset such as switch_base_8, a model's gin file, a run folder, a checkpoint folder or a folder of "
               "Hugging Face", "PRESET|GIN_FILE|RUN|CHECKPOINT|FOLDER", nargs="?")
    parser.add("--list", "name all presets")
    parser.add("--verify",
               "read every file of a run's checkpoints, or of one, and compare it with its recorded sum; status 1 if "
               "one is damaged")
    parser.count("--inputs_length", "tokens, for the FLOPs (default 512)", 512)
    parser.count("--targets_length", "tokens, for the FLOPs (default 114)", 114, at_least=0)
    options.add_gin_arguments(parser)


def run_inspect(arguments: Namespace) -> dict:
    """Prints and returns the presets, a model's sizes, or the state of checkpoints."""
    if arguments.verify:
        return _verify(arguments)
    if arguments.list:
        configs = {name: SwitchConfig.from_preset(name) for name in shipped_gin.preset_names()}
        print(costs.table(configs))
        return {"presets": list(configs)}
    config = layout = None
    folder = places.at(arguments.what) if arguments.what else None
    if folder is None or not folder.is_dir():
        config, layout = _config_and_layout(arguments)
    elif (folder / run_config.FILE).is_file() and not run_config.is_in(folder):
        config = huggingface_config.read_config(folder)
    if config is None:
        result = costs.checkpoint_costs(folder)
    else:
        result = costs.as_json(config, arguments.inputs_length, arguments.targets_length)
    if layout is not None and not layout.open_axes:
        result["bytes_per_device"] = factoring.bytes_per_device(config, layout)
    print(costs.describe(result))
    if layout is not None and layout.open_axes:
        example = ",".join([f"{layout.open_axes[0]}=8", *filter(None, [layout.mesh_shape])])
        print(f"Bytes per device depend on the size of mesh axis {layout.open_axes[0]!r}, for example "
              f"--gin.MESH_SHAPE=\"'{example}'\".")
    return result


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
    return {"checkpoints": [{"checkpoint": str(finding.checkpoint), "is_whole": finding.damage is None,
                             "damage": finding.damage, "has_sums": finding.has_sums, "bytes": finding.num_bytes}
                            for finding in findings],
            "exit_status": int(any(finding.damage for finding in findings))}


def _config_and_layout(arguments):
    name, files = arguments.what, arguments.gin_file
    if not name and not files:
        raise Refusal("Name what to inspect: a preset (`switch-tf inspect --list` names them all), a model's gin file, "
                      "a run folder, a checkpoint folder or a folder of Hugging Face.")
    if name and "/" in name and not name.endswith(".gin"):
        raise Refusal(f"There is no folder {name!r} here.")
    if name and not name.endswith(".gin"):
        if not files and not arguments.gin_bindings:
            return SwitchConfig.from_preset(name), None
        name = f"gin/models/{name}.gin"
    arguments.gin_file = [name, *files] if name else files
    return options.read_model(arguments)
