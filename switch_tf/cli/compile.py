"""`switch-tf compile`: does a gin run fit a TPU pod, what does it send, how long may a step take; without a TPU."""

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from importlib import metadata

import gin

import switch_tf
from switch_tf import accounting, environment
from switch_tf.cli import compile_choices, compile_text, gin_files, gin_run, quiet
from switch_tf.cli.main import Mistake


def add_arguments(parser) -> None:
    """Declares the gin arguments and what to compile for."""
    gin_files.add_arguments(parser)
    parser.add_argument("--topology", required=True, metavar="NAME",
                        help="the pod, as libtpu calls it: v5e:4x4, v6e:16x16, v5p:4x4x4, v4:4x4x4 ...")
    parser.add_argument("--full", action="store_true",
                        help="compile all layers; otherwise two shallow depths, from which the rest is extrapolated")
    parser.add_argument("--save", metavar="FOLDER", help="keep the StableHLO and the optimised HLO there")
    parser.add_argument("--compare", metavar="LAYOUTS",
                        help="layouts to put side by side, separated by commas: names such as expert,expert_model, or "
                             "gin files")
    parser.add_argument("--search", action="store_true",
                        help="try meshes, group sizes and capacity factors, and rank them by predicted time")


def run(arguments) -> dict:
    """Prints memory, collectives and roofline of one chip; the same as a JSON object. Status 1 where it does not fit.

    The model computes in bfloat16 unless ACTIVATION_DTYPE says otherwise; no data, vocabulary or network is touched.
    """
    _check_compiler()
    if (arguments.compare is not None) + arguments.search + (arguments.save is not None) > 1:
        raise Mistake("--compare, --search and --save do not go together; give one of them.")
    if arguments.save is not None:
        _check_folder(pathlib.Path(arguments.save))
    macros = gin_run.load(arguments, ["MODEL_DIR=''", "ACTIVATION_DTYPE='bfloat16'"])
    if arguments.compare is not None:
        return compile_choices.compare(arguments)
    if arguments.search:
        return compile_choices.search(arguments, macros)
    cached = _cache_file(arguments)
    is_known, programs = cached.exists() and arguments.save is None, {}
    if is_known:
        result = json.loads(cached.read_text())
        compile_text.say(f"The compiler was asked before; its answer is {cached}.")
    else:
        try:
            result = _compile(arguments, programs)
        except ValueError as error:
            raise Mistake(gin_files.first_line(error)) from error
    compile_text.show(compile_text.describe(result), arguments)
    # A full disk loses no answer.
    if not is_known:
        _keep(cached, json.dumps(result))
    is_saved = all(_keep(pathlib.Path(arguments.save) / name, text) for name, text in programs.items())
    return {**result, "exit_status": int(not (result["fits"] and is_saved))}


def _check_folder(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Mistake(f"--save needs a folder that can be written to, and {str(folder)!r} is none ({error.strerror}); "
                      "name another.") from error


def _keep(file, text):
    """Writes a file, or says why not; whole or not at all, as another process may write the same, or this be killed."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text)
        unfinished.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        compile_text.say(f"{file} could not be written ({error.strerror}): only what is printed here is kept.")
        return False
    return True


def _check_compiler():
    wanted = environment.KNOWN_GOOD["tensorflow"]["libtpu"]
    found = environment.installed_version("libtpu")
    if environment.installed_version("tensorflow-tpu"):
        raise Mistake("The TPU compiler for machines without a TPU does not go with tensorflow-tpu; run this where "
                      "tensorflow is installed (docs/install.md).")
    if found is None or not environment.goes_with(found, wanted):
        what = "is not installed" if found is None else f"is libtpu {found}, which jaxlib does not go with"
        raise Mistake(f"The TPU compiler {what}; run: {environment.pip()} install --no-deps libtpu=={wanted}")


def _cache_file(arguments):
    """Where the answer to this question is kept: gin's configuration, the topology, and every program that answers."""
    question = hashlib.sha256()
    for text in (gin.config_str(), arguments.topology, str(arguments.full),
                 *(f"{name}={metadata.version(name)}" for name in ("tensorflow", "keras", "jaxlib", "libtpu"))):
        question.update(text.encode())
    for file in sorted(pathlib.Path(switch_tf.__file__).parent.rglob("*.py")):
        question.update(file.read_bytes())
    return environment.cache_folder() / "compiled" / f"{question.hexdigest()[:24]}.json"


def _compile(arguments, programs):
    """The answer; with --save, `programs` gets the text of each program by its file's name."""
    from switch_tf.aot import advice, faults, plan, report
    from switch_tf.aot import compile as compiler

    with quiet.held_back():  # libtpu says that there is no TPU
        num_devices = compiler.num_devices(arguments.topology)
    chip = report.CHIPS.get(arguments.topology.partition(":")[0])
    if chip is None:
        raise ValueError(f"The memory and speed of the chips of {arguments.topology!r} are not known here; they are of "
                         f"{', '.join(report.CHIPS)}.")
    described = gin_run.on_devices(num_devices, "TPU")
    config, layout, run_, settings = described.config, described.layout, described.run, described.settings
    if settings.steps_per_call != 1:
        raise ValueError(f"One step is compiled, so steps_per_call must be 1, not {settings.steps_per_call}.")

    def save(depth, lowered, compiled):
        if arguments.save is not None:
            name = f"step_{depth[0]}_{depth[1]}"
            programs[f"{name}.stablehlo.mlir"] = lowered.text
            programs[f"{name}.optimized.hlo"] = compiled.hlo

    question = plan.Question(config, described.make_model().dtype_policy, described.make_optimizer, layout,
                             arguments.topology, chip, run_.batch_size, run_.task_feature_lengths, settings)
    answer = plan.ask(question, arguments.full, compile_text.say, save)
    fits = answer.refused is None and plan.needed(answer.memory) <= chip.memory
    result = {
        "topology": arguments.topology, "mesh": layout.mesh, "num_parameters": config.num_parameters,
        "layers": [config.num_encoder_layers, config.num_decoder_layers],
        "compiled_layers": [list(depth) for depth in answer.compiled],
        "fits": fits, "chip_bytes": int(chip.memory), "collectives": answer.collectives,
        "advice": [] if fits else advice.advice(answer, config, layout, settings, run_.batch_size, chip)}
    if answer.refused is not None:
        return {**result, "refused": answer.refused}
    roofline = answer.roofline
    lengths = run_.task_feature_lengths
    model_flops = accounting.flops_per_step(config, run_.batch_size, lengths["inputs"], lengths["targets"])
    tokens = run_.batch_size * (lengths["inputs"] + (0 if config.is_encoder_only else lengths["targets"]))
    return {
        **result, "bytes_per_device": {**answer.memory, "needed": plan.needed(answer.memory)},
        "flops_per_device": answer.flops, "warnings": faults.find(
            answer.program, config, layout, run_.batch_size, lengths, settings.num_microbatches),
        "largest_collectives": [one._asdict() for one in sorted(
            answer.program.collectives, key=lambda one: -one.bytes)[:8]],
        "predicted": {
            "compute_seconds": roofline.compute, "memory_seconds": roofline.memory,
            "links_seconds": roofline.links, "step_seconds": [roofline.at_best, roofline.in_turn],
            "tokens_per_second": [tokens / roofline.in_turn, tokens / roofline.at_best],
            "model_flops_utilization": [model_flops / num_devices / seconds / chip.flops
                                        for seconds in (roofline.in_turn, roofline.at_best)]}}
