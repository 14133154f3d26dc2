"""`switch-tf compile`: does a gin run fit a TPU pod, what does it send, how long may a step take; without a TPU."""

import hashlib
import json
import pathlib
import sys
from importlib import metadata

import gin

import switch_tf
from switch_tf import environment
from switch_tf.cli import compile_many, compile_text, gin_files, quiet
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
    if not arguments.gin_file:
        raise Mistake("Say which run to compile: a model, a task, a run and a layout, each with --gin_file.")
    _check_compiler()
    if (arguments.compare is not None) + arguments.search + (arguments.save is not None) > 1:
        raise Mistake("--compare, --search and --save do not go together; give one of them.")
    quiet.import_tensorflow()
    bindings = ["MODEL_DIR=''", "ACTIVATION_DTYPE='bfloat16'", *arguments.gin_bindings]
    gin_files.parse(arguments.gin_file, bindings, arguments.gin_search_paths)
    if arguments.compare is not None:
        return _compare(arguments)
    if arguments.search:
        return _search(arguments)
    cached = _cache_file(arguments)
    if cached.exists() and not arguments.save:
        result = json.loads(cached.read_text())
        _say(f"The compiler was asked before; its answer is {cached}.")
    else:
        try:
            result = _compile(arguments)
        except ValueError as error:
            raise Mistake(gin_files.first_line(error)) from error
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps(result))
    _show(compile_text.describe(result), arguments)
    return {**result, "exit_status": int(not result["fits"])}


def _show(text, arguments):
    print(text, file=sys.stderr if arguments.json else sys.stdout)


def _words(arguments, files=(), bindings=()):
    """The command line of this question with more files and bindings."""
    return [*(f"--gin_file={file}" for file in (*arguments.gin_file, *files)),
            f"--gin_search_paths={arguments.gin_search_paths}", f"--topology={arguments.topology}",
            *(["--full"] if arguments.full else []), *(f"--gin.{binding}" for binding in arguments.gin_bindings),
            *(f"--gin.{binding}" for binding in bindings)]


def _compare(arguments):
    """The same run under several layouts, one table. Status 1 where none fits."""
    from switch_tf.partitioning.layout import Layout

    if _layout() != Layout():
        raise Mistake("--compare names the layouts, so leave out the layout's --gin_file.")
    files = {name: name if name.endswith(".gin") else f"gin/layouts/{name}.gin"
             for name in filter(None, arguments.compare.split(","))}
    if len(files) < 2:
        raise Mistake(f"--compare needs at least two layouts, as in --compare=expert,expert_model, not "
                      f"{arguments.compare!r}.")
    _say(f"Compiling {len(files)} layouts ...")
    results = compile_many.ask({name: _words(arguments, [file]) for name, file in files.items()}, _say)
    _show(compile_text.table(results), arguments)
    return {"layouts": results, "exit_status": int(not any(result.get("fits") for result in results.values()))}


def _search(arguments):
    """Meshes, then group sizes on the best mesh, then capacity factors. Status 1 where nothing fits."""
    from switch_tf.aot import compile as compiler
    from switch_tf.aot import search
    from switch_tf.training import trainer

    try:
        with quiet.held_back():
            num_devices = compiler.num_devices(arguments.topology)
        layout = _layout().resolve(num_devices, "TPU")
    except ValueError as error:
        raise Mistake(gin_files.first_line(error)) from error
    config = gin_files.trainer_argument("model").config
    num_microbatches = gin.get_configurable(trainer.StepSettings)().num_microbatches
    own = search.Choice(",".join(f"{axis}={size}" for axis, size in layout.mesh.items()), config.group_size,
                        config.num_groups_multiple, config.train_capacity_factor)
    meshes = search.meshes(own, layout, num_devices, num_microbatches)
    own = next((choice for choice in meshes if choice.mesh_shape == own.mesh_shape), own)
    mesh = "MESH_SHAPE" if "MESH_SHAPE" in gin_files.macros() else "Layout.mesh_shape"
    results = {}

    def try_out(what, choices):
        new = {choice.describe(): choice for choice in choices if choice not in results}
        if new:
            _say(f"Trying {len(new)} {what} ...")
            found = compile_many.ask({name: _words(arguments, bindings=_bindings(choice, mesh, config))
                                      for name, choice in new.items()}, _say)
            results.update({new[name]: result for name, result in found.items()})
        return search.ranked(results)[0]

    best = try_out("meshes", [own, *meshes])
    if config.num_experts:
        best = try_out("group sizes", search.group_sizes(best))
        best = try_out("capacity factors", search.capacity_factors(best))
    order = search.ranked(results)
    lines = [compile_text.table({choice.describe(): results[choice] for choice in order})]
    if results[best].get("fits"):
        lines.append("The best: " + " ".join(f"--gin.{binding}" for binding in _bindings(best, mesh, config)))
        other = own if best != own and "predicted" in results[own] else next(
            (choice for choice in order if choice != best and "predicted" in results[choice]), None)
        if other is not None:
            lines.append(f"Against {other.describe()}{' (as it was)' if other == own else ''}: "
                         f"{compile_text.why(results[best], results[other])}.")
    _show("\n".join(lines), arguments)
    return {"candidates": [{**choice._asdict(), **results[choice]} for choice in order],
            "exit_status": int(not results[best].get("fits"))}


def _bindings(choice, mesh, config):
    """What gives a run this choice."""
    bindings = [f"{mesh}='{choice.mesh_shape}'"]
    if config.num_experts:
        bindings += [f"SwitchConfig.group_size={choice.group_size}",
                     f"SwitchConfig.num_groups_multiple={choice.num_groups_multiple}",
                     f"SwitchConfig.train_capacity_factor={choice.capacity_factor}"]
    return bindings


def _layout():
    from switch_tf.partitioning.layout import Layout

    return gin.get_configurable(Layout)()


def _say(text):
    print(text, file=sys.stderr, flush=True)


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


def _compile(arguments):
    from switch_tf.aot import compile as compiler
    from switch_tf.aot import faults, plan, report
    from switch_tf.models.switch_transformer import SwitchTransformer
    from switch_tf.training import trainer
    from switch_tf.training.fit import check_fit

    def make_model(num_encoder_layers, num_decoder_layers):
        model = gin_files.trainer_argument("model")
        config = plan.shallower(model.config, num_encoder_layers, num_decoder_layers)
        return SwitchTransformer(config, dtype=model.dtype_policy)

    with quiet.held_back():  # libtpu says that there is no TPU
        num_devices = compiler.num_devices(arguments.topology)
    chip = report.CHIPS.get(arguments.topology.partition(":")[0])
    if chip is None:
        raise ValueError(f"The memory and speed of the chips of {arguments.topology!r} are not known here; they are of "
                         f"{', '.join(report.CHIPS)}.")
    layout = _layout().resolve(num_devices, "TPU")
    run_, settings = gin.get_configurable(trainer.Run)(), gin.get_configurable(trainer.StepSettings)()
    config = gin_files.trainer_argument("model").config
    check_fit(config, layout, run_.batch_size, run_.task_feature_lengths, settings.num_microbatches)
    if settings.steps_per_call != 1:
        raise ValueError(f"One step is compiled, so steps_per_call must be 1, not {settings.steps_per_call}.")

    def save(depth, lowered, compiled):
        if arguments.save:
            folder = pathlib.Path(arguments.save)
            folder.mkdir(parents=True, exist_ok=True)
            name = f"step_{depth[0]}_{depth[1]}"
            (folder / f"{name}.stablehlo.mlir").write_text(lowered.text)
            (folder / f"{name}.optimized.hlo").write_text(compiled.hlo)

    question = plan.Question(make_model, lambda: gin_files.trainer_argument("optimizer"), layout, arguments.topology,
                             chip, run_.batch_size, run_.task_feature_lengths, settings)
    answer = plan.ask(question, arguments.full, _say, save)
    fits = answer.refused is None and plan.needed(answer.memory) <= chip.memory
    result = {
        "topology": arguments.topology, "mesh": layout.mesh, "num_parameters": config.num_parameters,
        "layers": [config.num_encoder_layers, config.num_decoder_layers],
        "compiled_layers": [list(depth) for depth in answer.compiled],
        "fits": fits, "chip_bytes": int(chip.memory), "collectives": answer.collectives,
        "advice": [] if fits else plan.advice(answer, config, settings, chip, num_devices)}
    if answer.refused is not None:
        return {**result, "refused": answer.refused}
    roofline = answer.roofline
    lengths = run_.task_feature_lengths
    parts = config.flops_by_part(lengths["inputs"], lengths["targets"])
    model_flops = 3 * run_.batch_size * sum(size for part, size in parts.items() if part != "capacity_padding")
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
