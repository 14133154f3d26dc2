"""`switch-tf infer`, `serve` and `export`: answers of a trained run to texts."""

import collections
import contextlib
import gc
import hashlib
import importlib
import itertools
import pathlib
import sys
import time
from argparse import Namespace

from etils import epy

from switch_tf.checkpoints import folders, run_config
from switch_tf.checkpoints.run_folder import CONFIGURATION, select_one
from switch_tf.cli import options
from switch_tf.cli.parser import count, option
from switch_tf.configs import gin_syntax, parts
from switch_tf.hardware import host
from switch_tf.installation import quiet
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress
from switch_tf.storage import lock, outputs, places

with epy.lazy_imports():  # imports TensorFlow
    from switch_tf import data, decoding, inference
    from switch_tf.checkpoints import tensors
    from switch_tf.data import task_catalog
    from switch_tf.inference import exporting, lines, listening, saved_runs, server

_OF_MODEL = "--model; a run has its own."
# Sampler -> (name, type, help) of its settings.
_SAMPLERS = {
    "greedy": (),
    "sample": (("temperature", float, "divides the logits; below 1 favours likely tokens (default 1)"),
               ("top_k", int, "number of most probable tokens to draw from"),
               ("top_p", float, "draw from the fewest tokens whose probabilities add up to this"),
               ("seed", int, "seed of the random numbers (default 0)")),
    "beam": (("num_beams", int, "sequences that are followed at a time (default 4)"),
             ("length_penalty", float, "T5's alpha, 0 for none (default 0.6)"),
             ("num_results", int, "sequences to write (default 1)")),
}

def _decoding_arguments(answers=True):
    of_answers = (
        option("--backend",
               "auto (default): one device of TensorFlow, whatever layout the run trained under; pjrt: the run's "
               "layout on PJRT (on TPUs and GPUs the default for runs that recorded it)", "NAME",
               one_of=("auto", "pjrt")),
        count("--devices", "with --backend pjrt: virtual devices to make of this machine's CPU",
              goes_with="--backend=pjrt; otherwise one device answers."))
    return (
        *options.RUN,
        option("--step",
               "a step, the best one by the run's BEST_METRIC, or the newest (default)", "N|best|last", default="last"),
        option("--raw", "read texts as they are: without the task's prefix, and <extra_id_0> as a gap",
               goes_with="--run; the texts of a saved model are always read as they are."),
        count("--max_length", "tokens to decode at most (default: the targets of TASK_FEATURE_LENGTHS)"),
        option("--sampler", "the most probable token (default), a drawn one, or beam search",
               choices=tuple(_SAMPLERS), default="greedy"),
        *(option(f"--{name}", f"with --sampler {sampler}: {meaning}", "X", type=kind,
                 goes_with=f"--sampler {sampler}, not {{sampler}}.")
          for sampler, settings in _SAMPLERS.items() for name, kind, meaning in settings),
        *of_answers * answers)


INFER_EXAMPLES = r"""
switch-tf infer runs/first --input lines.txt --output answers.jsonl
switch-tf infer runs/first --interactive
"""
INFER_ARGUMENTS = (
    *_decoding_arguments(),
    option("--input",
           "a file of any kind that training reads (.txt, .jsonl, .json, .tsv, .csv, each also as .gz), or lines "
           "of text, or JSON lines with --field; - for standard input", "FILE"),
    option("--output",
           "JSON lines, gone on with where it ends; - (default) for standard output", "FILE", default="-"),
    option("--field",
           "key or column of the text, or the column's number in a table without a header (default: as in "
           "training)", "NAME"),
    option("--score", "the log-likelihood of given targets, in --target_field"),
    option("--target_field", "see --score (default: as in training)", "NAME",
           goes_with="--score; without it targets are not read."),
    option("--interactive", "answer what is typed, line by line"),
    count("--batch_size", "lines at a time (default 32)", 32),
)


def run_infer(arguments: Namespace) -> dict:
    """Answers the input. Returns the numbers of lines and errors."""
    source, output = places.at(arguments.input or "-"), places.at(arguments.output)
    has_file, has_output = str(source) != "-", str(output) != "-"
    if arguments.interactive and (arguments.input or has_output or arguments.field or arguments.score):
        raise Refusal("--interactive answers what is typed; leave out --input, --output and --score, and --field.")
    if not arguments.interactive and not arguments.input:
        raise Refusal("Give --input, a file of lines or - for standard input, or --interactive.")
    if has_file and not source.is_file():
        raise Refusal(f"--input must be a file, or - for standard input; {arguments.input!r} is none.")
    if has_output and (
            output.exists() and not output.is_file() or places.is_local(output) and not output.parent.is_dir()):
        raise Refusal(f"--output must be a file in a folder that is there, or - for standard output, not "
                      f"{arguments.output!r}.")
    if has_file and source.resolve() == output.resolve():
        raise Refusal("--output must be another file than --input.")
    if arguments.score and arguments.sampler != "greedy":
        raise Refusal("--score decodes nothing; leave out --sampler.")
    folder = options.folder_of(arguments)
    checkpoint = select_one(folder, arguments.step)
    with contextlib.ExitStack() as stack:
        if has_output:
            stack.enter_context(lock.held(arguments.output))
        _, model, identity = _load_text_model(
            arguments, folder, checkpoint, None if arguments.interactive else arguments.batch_size)
        if arguments.interactive:
            return {"lines": _converse(model)}
        form = data.kind_of(arguments.input) if has_file else None
        if form in (None, "lines"):  # without a file ending, chosen fields are keys of JSON objects
            form = "json" if arguments.field or arguments.score else "lines"
        fields = _choose_fields(arguments.field, arguments.target_field, arguments.score, model.features.fields, form)
        if has_file:
            file = data.TextFile(arguments.input, fields, form)
            examples, total = file.examples(), file.num_lines()
        else:
            examples, total = data.examples_of_lines(sys.stdin.buffer, form, fields), None
        remaining, num_known, answered = lines.read(examples), 0, None
        if has_output:
            answered = stack.enter_context(contextlib.closing(lines.Output(arguments.output, {
                "run": str(folder.resolve()), **identity, "sampler": str(model.sampler),
                "fields": fields if form != "lines" else None, "score": arguments.score})))
            remaining, num_known = answered.after_what_is_there(remaining), answered.num_known
            if num_known:
                outputs.say(f"Going on after the {num_known} lines that {arguments.output} holds.")
        bar = stack.enter_context(progress.bar(total, f"Step {identity['step']}", " lines", num_known))
        counts = collections.Counter()  # of the records' keys
        for records in lines.answers(remaining, model, arguments.score):
            if answered:
                answered.write(records)
            else:
                print(lines.format_lines(records), end="", file=arguments.stdout, flush=True)
            bar.update(len(records))
            counts.update(itertools.chain(*records))
    outputs.say(f"{counts['input']} lines answered, {counts['error']} of them with an error, {counts['cut']} cut to "
                f"{model.inputs_length} tokens.")
    return {"run": str(folder), "step": identity["step"], "output": arguments.output, "lines": counts["input"],
            "errors": counts["error"], "cut": counts["cut"]}


def _choose_fields(field, target_field, has_targets, defaults, form):
    """Returns the keys or columns of inputs and, with `has_targets`, of targets. `form` is one of `data.rows.KINDS`."""
    is_table = form in ("tsv", "csv")
    fields = []
    asked = ("--field", field, defaults[0]), ("--target_field", target_field, defaults[1])
    for flag, chosen, default in asked[:1 + has_targets]:
        if chosen:
            fields.append(int(chosen) if is_table and chosen.isdecimal() else chosen)
        elif is_table or isinstance(default, str):
            fields.append(default)
        elif form == "lines":  # any name will do
            fields.append("inputs")
        else:
            raise Refusal(f"The run was trained on column {default} of tables, and this input holds JSON objects: name "
                          f"the key of the text with {flag}.")
    return fields


def _converse(model):
    gap = ", such as one with <extra_id_0> for a gap" * (model.features.sentinels == "gaps")
    outputs.say(f"Type a text{gap}; Ctrl-D ends.")
    count = 0
    for line in lines.read(data.examples_of_lines(sys.stdin.buffer, "lines", ["inputs"])):
        ((record,),) = lines.answers([line], model)
        if "error" in record:
            outputs.say(record["error"])
            continue
        for result in (record, *record.get("others", ())):
            print(f"{result['score']:9.3f}  {result['output']}", flush=True)
        count += 1
    return count


EXPORT_EXAMPLES = r"""
switch-tf export runs/first --output exported
switch-tf export runs/first --step best --sampler beam --num_beams 4 --output exported_beam
"""
EXPORT_ARGUMENTS = (
    *_decoding_arguments(answers=False),
    option("--model", "in place of --run: a model that Keras saved, model.keras", "FILE"),
    option("--vocabulary",
           "with --model: a vocabulary, for text in and text out; without it ids in and out", "NAME_OR_FILE",
           goes_with=_OF_MODEL),
    count("--inputs_length", "with --model and --vocabulary: tokens of a text to read at most (default 512)",
          goes_with=_OF_MODEL),
    options.OUTPUT,
)


def run_export(arguments: Namespace) -> tuple[dict, str]:
    """Writes the SavedModel. Returns its origin, path and size."""
    if (arguments.run is None) == (arguments.model is None):
        raise Refusal("Give either --run FOLDER (trained by switch-tf train) or --model FILE (saved by Keras).")
    if arguments.num_results not in (None, 1):
        raise Refusal("An exported model gives the best result; leave out --num_results.")
    if not arguments.model:
        folder = options.folder_of(arguments)
        checkpoint = select_one(folder, arguments.step)
    else:
        if arguments.gin_file or arguments.gin_bindings or arguments.step != "last":
            raise Refusal("--step and gin arguments go with --run; a saved model has its own configuration.")
        if not places.at(arguments.model).is_file():
            raise Refusal(f"--model must name a file that Keras saved, such as model.keras, not {arguments.model!r}.")
        if arguments.inputs_length and not arguments.vocabulary:
            raise Refusal("--inputs_length goes with --vocabulary; ids are read whole.")
    with options.new_output(arguments) as output:
        if arguments.model:
            quiet.import_tensorflow()
            importlib.import_module("switch_tf.tasks")  # declares the names that --vocabulary takes
            model = exporting.load(arguments.model)
            print(f"Writing {arguments.model} as a SavedModel.", flush=True)
            exporting.export(model, output, arguments.vocabulary, arguments.max_length or 64,
                             _sampler_of(arguments), arguments.inputs_length or 512,
                             {"model": pathlib.Path(arguments.model).name})
            result = {"model": arguments.model}
        else:
            task, text_model, identity = _load_text_model(arguments, folder, checkpoint, batch_size=1)
            print(f"Writing step {identity['step']} of {folder} as a SavedModel.", flush=True)
            exporting.export_texts(text_model, output, {"run": folder.resolve().name, "task": task, **identity})
            result = {"run": str(folder), "step": identity["step"]}
    size = places.tree_size(output)
    return ({**result, "output": str(output), "bytes": size},
            f"{output}: {size / 1e6:.1f} MB; {exporting.CARD} in it shows how to call it.")


SERVE_EXAMPLES = r"""
switch-tf serve runs/first
switch-tf serve runs/first --port 9000 --sampler beam --num_beams 4
"""
SERVE_ARGUMENTS = (
    *_decoding_arguments(),
    option("--host", "to listen at; 0.0.0.0 for other machines too, whoever they are (default 127.0.0.1)",
           "ADDRESS", default="127.0.0.1"),
    option("--port", "0 for any that is free (default 8501)", "N", type=int, default=8501),
    option("--allow_host",
           "another name that requests and pages may give this server, such as a proxy's; may be repeated (by "
           "default localhost and the address it listens at)", "NAME", action="append", default=[]),
    count("--batch_size", "texts that are answered at a time, at most (default 32)", 32),
    count("--max_waiting",
          "texts that may wait; further requests are refused with 503 (default 256)", 256),
    count("--max_request_bytes",
          "largest request; longer ones are refused with 413 (default 1048576)", 2**20),
)


def run_serve(arguments: Namespace) -> dict:
    """Serves until a signal. Returns the address."""
    try:
        import starlette  # noqa: F401  of the extra `serve`
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise Refusal(f"Serving needs the package {error.name}, which is not installed; run: pip install --no-deps "
                      "starlette==1.10.0 uvicorn==0.54.0 anyio==4.16.0 h11==0.16.0 (they are the extra serve of "
                      "switch-tf).") from None
    folder = options.folder_of(arguments)
    checkpoint = select_one(folder, arguments.step)
    quiet.import_tensorflow()
    allowed = server.Hosts(arguments.host, arguments.allow_host)
    with listening.bind(arguments.host, arguments.port) as listener:  # before the model is loaded
        start = time.perf_counter()
        outputs.say(f"Loading {checkpoint}.")
        task, text_model, identity = _load_text_model(arguments, folder, checkpoint, arguments.batch_size,
                                                          any_batch=True)
        config = text_model.model.config
        served = server.Server(text_model, folder.resolve().name, {
            **identity, "task": task, "parameters": config.num_parameters,
            "experts": config.num_experts if config.sparse_layer_names else 0},
            arguments.batch_size, arguments.max_waiting, arguments.max_request_bytes, allowed)
        outputs.say("Compiling.")
        text_model.warm_up()
        gc.collect()
        gc.freeze()  # or large requests would make the collector visit TensorFlow's objects again and again
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        listening.HttpServer(served.app, listening.make_room(), lambda: outputs.say(
            f"Step {identity['step']} of {folder} is ready after {time.perf_counter() - start:.1f} s: {address}/ is a "
            f"page, {address}/v1/models/{served.name}:predict takes texts. Ctrl-C stops.")
        ).run([listener])
        return {"run": str(folder), "step": identity["step"], "address": address}


def _sampler_of(arguments):
    return decoding.SAMPLERS[arguments.sampler](**{
        name: value for name, *_ in _SAMPLERS[arguments.sampler] if (value := getattr(arguments, name)) is not None})


def _load_text_model(arguments, folder, checkpoint, batch_size, any_batch=False):
    """Returns the task's name, a TextModel, and everything but the sampler that answers depend on.

    `any_batch`: no `batch_size` unless shapes are fixed.
    """
    described, sampler = _load_to_answer(arguments, folder), _sampler_of(arguments)
    run, config = described.run, described.config
    folders.check_size(config, checkpoint)
    reading = getattr(described, "reading", None)
    if not reading:
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
        reading = data.reading_of(run.mixture_or_task_name, run.vocabulary)
    model = described.make_model()
    described.partitioner.build(model, draws_weights=False)
    text_model = inference.TextModel(
        model, reading.raw() if arguments.raw else reading, run.task_feature_lengths["inputs"],
        arguments.max_length or run.task_feature_lengths["targets"], sampler,
        None if any_batch and not described.partitioner.has_fixed_shapes else batch_size, described.partitioner)
    step = tensors.restore(checkpoint, tensors.state_variables(model))["step"]
    return run.mixture_or_task_name, text_model, {
        "step": step, "weights": folders.hash_of_weights(checkpoint),
        "model": hashlib.sha256(f"{config!r} {model.dtype_policy.name}".encode()).hexdigest(),
        "vocabulary": sorted({task_catalog.fingerprint_of_vocabulary(vocabulary)
                              for vocabulary in (reading.inputs, reading.targets)}),
        "reading": text_model.features.as_data(),
        "inputs_length": text_model.inputs_length, "max_length": text_model.max_length}


def _load_to_answer(arguments, folder):
    """Returns the run for a command on texts: on one device, or under its layout with the pjrt back end.

    Without gin arguments, --trust or pjrt, `config.json` suffices unless only code can create the vocabulary. Then no
    task or data is needed, and no code in the folder is executed.
    """
    if hasattr(arguments, "backend") and _is_for_pjrt(arguments, folder):
        if (count := len(cluster.members().addresses)) > 1:
            raise Refusal(f"`switch-tf {arguments.command}` answers in one process, and TF_CONFIG or "
                          f"TPU_WORKER_HOSTNAMES names {count}; unset it, or answer with --backend=auto on the CPU of "
                          "one machine.")
        described = options.load_run(arguments, folder, arguments.devices)
        described.layout.check_sizes(described.config.axis_sizes)
        return described
    arguments.gin_bindings = [binding for binding in arguments.gin_bindings if binding != "Layout.backend='auto'"]
    if run_config.is_in(folder) and not (arguments.gin_file or arguments.gin_bindings or arguments.trust):
        saved = run_config.read(folder)
        quiet.import_tensorflow()
        options.use_host(arguments)
        if saved_run := saved_runs.from_config(saved, folder):
            return saved_run
    return options.load_run(arguments, folder, on_one_device=True)


def _is_for_pjrt(arguments, folder):
    """Whether PJRT answers: on request, or on JAX's TPU or GPU for runs trained with it."""
    configuration = folder / CONFIGURATION
    has_accelerator = host.has_tpu() or host.has_gpu_of_jax()
    if arguments.backend is None and has_accelerator and configuration.is_file():
        try:
            return gin_syntax.read([str(configuration)]).bound.get(("", parts.LAYOUT), {}).get("backend") == "pjrt"
        except Refusal:  # config.json may suffice
            return False
    return arguments.backend == "pjrt"
