"""`switch-tf compile`: does a gin run fit a TPU pod, what does it send, how long may a step take; without a TPU."""

import hashlib
import json
import pathlib
import sys
from importlib import metadata

import switch_tf
from switch_tf import environment
from switch_tf.cli import gin_files, quiet
from switch_tf.cli.main import Mistake


def add_arguments(parser) -> None:
    """Declares the gin arguments and what to compile for."""
    gin_files.add_arguments(parser)
    parser.add_argument("--topology", required=True, metavar="NAME",
                        help="the pod, as libtpu calls it: v5e:4x4, v6e:16x16, v5p:4x4x4, v4:4x4x4 ...")
    parser.add_argument("--full", action="store_true",
                        help="compile all layers; otherwise two shallow depths, from which the rest is extrapolated")
    parser.add_argument("--save", metavar="FOLDER", help="keep the StableHLO and the optimised HLO there")


def run(arguments) -> dict:
    """Prints memory, collectives and roofline of one chip; the same as a JSON object. Status 1 where it does not fit.

    The model computes in bfloat16 unless ACTIVATION_DTYPE says otherwise; no data, vocabulary or network is touched.
    """
    if not arguments.gin_file:
        raise Mistake("Say which run to compile: a model, a task, a run and a layout, each with --gin_file.")
    _check_compiler()
    quiet.import_tensorflow()
    bindings = ["MODEL_DIR=''", "ACTIVATION_DTYPE='bfloat16'", *arguments.gin_bindings]
    gin_files.parse(arguments.gin_file, bindings, arguments.gin_search_paths)
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
    print(_describe(result), file=sys.stderr if arguments.json else sys.stdout)
    return {**result, "exit_status": int(not result["fits"])}


def _say(text):
    print(text, file=sys.stderr, flush=True)


def _check_compiler():
    wanted = environment.KNOWN_GOOD["tensorflow"]["libtpu"]
    found = environment.installed_version("libtpu")
    if environment.installed_version("tensorflow-tpu"):
        raise Mistake("The TPU compiler for machines without a TPU does not go with tensorflow-tpu; run this where "
                      "tensorflow is installed (docs/install.md).")
    if found is None:
        raise Mistake(f"The TPU compiler is not installed; run: {environment.pip()} install --no-deps libtpu=={wanted}")


def _cache_file(arguments):
    """Where the answer to this question is kept: gin's configuration, the topology, and every program that answers."""
    import gin

    question = hashlib.sha256()
    for text in (gin.config_str(), arguments.topology, str(arguments.full),
                 *(f"{name}={metadata.version(name)}" for name in ("tensorflow", "keras", "jaxlib", "libtpu"))):
        question.update(text.encode())
    for file in sorted(pathlib.Path(switch_tf.__file__).parent.rglob("*.py")):
        question.update(file.read_bytes())
    return environment.cache_folder() / "compiled" / f"{question.hexdigest()[:24]}.json"


def _compile(arguments):
    import gin

    from switch_tf.aot import compile as compiler
    from switch_tf.aot import plan, report
    from switch_tf.models.switch_transformer import SwitchTransformer
    from switch_tf.optim import factoring
    from switch_tf.partitioning.layout import Layout
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
    layout = gin.get_configurable(Layout)().resolve(num_devices, "TPU")
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

    answer = plan.ask(make_model, lambda: gin_files.trainer_argument("optimizer"), layout, arguments.topology,
                      run_.batch_size, run_.task_feature_lengths, settings, arguments.full, _say, save)
    slots = sum(weight.count * factoring.num_slot_elements(weight.shape, weight.axes) for weight in config.weights())
    state = 4 * (config.num_parameters + slots)
    fits = answer.refused is None and plan.needed(answer.memory) <= chip.memory
    result = {
        "topology": arguments.topology, "mesh": layout.mesh, "num_parameters": config.num_parameters,
        "layers": [config.num_encoder_layers, config.num_decoder_layers], "compiled_layers": answer.compiled,
        "fits": fits, "chip_bytes": int(chip.memory), "collectives": answer.collectives,
        "advice": [] if fits else plan.advice(answer, config, settings, chip, state, num_devices)}
    if answer.refused is not None:
        return {**result, "refused": answer.refused}
    roofline = report.roofline(answer.flops, answer.bytes_accessed, answer.link_bytes, chip)
    lengths = run_.task_feature_lengths
    parts = config.flops_by_part(lengths["inputs"], lengths["targets"])
    model_flops = 3 * run_.batch_size * sum(size for part, size in parts.items() if part != "capacity_padding")
    tokens = run_.batch_size * (lengths["inputs"] + (0 if config.is_encoder_only else lengths["targets"]))
    return {
        **result, "bytes_per_device": {**answer.memory, "needed": plan.needed(answer.memory)},
        "flops_per_device": answer.flops, "warnings": _warnings(answer.sent, config),
        "largest_collectives": [one._asdict() for one in sorted(answer.sent, key=lambda one: -one.bytes)[:8]],
        "predicted": {
            "compute_seconds": roofline.compute, "memory_seconds_at_most": roofline.memory,
            "links_seconds": roofline.links, "step_seconds": [roofline.at_best, roofline.in_turn],
            "tokens_per_second": [tokens / roofline.in_turn, tokens / roofline.at_best],
            "model_flops_utilization": [model_flops / num_devices / seconds / chip.flops
                                        for seconds in (roofline.in_turn, roofline.at_best)]}}


def _warnings(sent, config):
    """What should not be there: a gathered stack of experts."""
    if not config.num_experts:
        return []
    stacked = {weight.shape for weight in config.weights() if "expert" in weight.axes}
    shapes = {",".join(map(str, shape)) for shape in stacked}
    return [f"{one.kind} of {one.shape} in {one.where}: the weights of all experts are brought together on each chip"
            for one in sent if one.kind == "all-gather" and one.shape.partition("[")[2].rstrip("]") in shapes]


def _describe(result):
    mesh = ", ".join(f"{axis}={size}" for axis, size in result["mesh"].items())
    layers, compiled = result["layers"], result["compiled_layers"]
    depths = " and ".join(f"{encoder} + {decoder}" for encoder, decoder in compiled)
    how = f"{layers[0]} + {layers[1]} layers "
    how += "compiled whole" if len(compiled) == 1 else f"extrapolated from {depths}"
    lines = [f"{result['num_parameters']:,} parameters on {result['topology']}, mesh {mesh}; {how}."]
    gib = 2**30
    if "bytes_per_device" in result:
        memory = result["bytes_per_device"]
        lines.append("Memory of one chip, GiB:")
        lines += [f"  {name:<38}{value / gib:>8.3f}" for name, value in (
            ("weights, slots, batch (arguments)", memory["arguments"]),
            ("results that replace nothing", memory["outputs"] - memory["aliased"]),
            ("activations and temporaries", memory["temporaries"]), ("program", memory["code"]),
            ("needed", memory["needed"]), ("the chip has", result["chip_bytes"]))]
        lines.append("Collectives of a step: count, MiB of results on each chip:")
        lines += [f"  {kind:<20}{entry['count']:>6}{entry['bytes'] / 2**20:>12.2f}"
                  for kind, entry in sorted(result["collectives"].items())]
        lines.append("The largest:")
        lines += [f"  {one['bytes'] / 2**20:>9.2f} MiB  {one['kind']} over {' and '.join(one['axes'])}  {one['shape']}"
                  f"  {one['where']}" for one in result["largest_collectives"]]
        predicted = result["predicted"]
        low, high = predicted["step_seconds"]
        compute, memory, links = (1e3 * predicted[name] for name in (
            "compute_seconds", "memory_seconds_at_most", "links_seconds"))
        lines += [f"Predicted, not measured (peak rates, nothing else in the way): compute {compute:.2f} ms, memory at "
                  f"most {memory:.2f} ms, links {links:.2f} ms;",
                  f"  a step {low * 1e3:.2f} to {high * 1e3:.2f} ms, {predicted['tokens_per_second'][0]:,.0f} to "
                  f"{predicted['tokens_per_second'][1]:,.0f} tokens/s, model FLOP utilisation "
                  f"{predicted['model_flops_utilization'][0]:.0%} to {predicted['model_flops_utilization'][1]:.0%}."]
        lines += [f"Warning: {warning}." for warning in result["warnings"]]
    else:
        lines.append(f"The compiler refuses: {result['refused']}")
    lines.append("It fits." if result["fits"] else "It does not fit.")
    return "\n".join(lines + [f"  {line}" for line in result["advice"]])
