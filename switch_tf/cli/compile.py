"""`switch-tf compile`: does a gin run fit a TPU pod, what does it send, how long may a step take; without a TPU."""

import json
import pathlib
import sys
import tempfile

import gin

from switch_tf import environment
from switch_tf.aot import answer_text
from switch_tf.aot.network import check_topology
from switch_tf.cli import gin_files, gin_run
from switch_tf.installation import quiet
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal

EXAMPLES = r"""
switch-tf compile --gin_file=gin/models/switch_base_8.gin --gin_file=gin/tasks/c4.gin \
    --gin_file=gin/runs/pretrain.gin --gin_file=gin/layouts/data.gin --topology=v5e:2x4
switch-tf compile --gin_file=gin/models/switch_base_8.gin --gin_file=gin/tasks/c4.gin \
    --gin_file=gin/runs/pretrain.gin --topology=v5e:2x4 --compare=data,expert
"""


def add_arguments(parser) -> None:
    """Declares the gin arguments and what to compile for."""
    gin_files.add_arguments(parser)
    parser.add_argument("--topology", required=True, metavar="NAME",
                        help="the pod, as libtpu calls it: v5e:4x4, v6e:16x16, v5p:4x4x4, v4:4x4x4 ...")
    parser.add_argument("--full", action="store_true",
                        help="compile all layers; otherwise two shallow depths, from which the rest is extrapolated")
    parser.add_argument("--save", metavar="FOLDER",
                        help="keep the StableHLO, the optimised HLO and the schedule there, as a trace for Perfetto")
    parser.add_argument("--plot", metavar="FILE", help="draw the schedule and the time of each part, as PNG")
    parser.add_argument("--compare", metavar="LAYOUTS",
                        help="layouts to put side by side, separated by commas: names such as expert,expert_model, or "
                             "gin files")
    parser.add_argument("--search", action="store_true",
                        help="try meshes, group sizes and capacity factors, and rank them by predicted time")


def run(arguments) -> dict:
    """Prints memory, collectives and times of one chip; the same as a JSON object. Status 1 where it does not fit.

    The model computes in bfloat16 unless ACTIVATION_DTYPE says otherwise; no data, vocabulary or network is touched.
    """
    _check_compiler()
    gin_run.or_mistake(lambda: check_topology(arguments.topology))
    keeps = arguments.save is not None or arguments.plot is not None
    if (arguments.compare is not None) + arguments.search + keeps > 1:
        raise Refusal("--compare and --search do not go with each other, nor with --save and --plot; give one of them.")
    if arguments.save is not None:
        _check_folder("--save", pathlib.Path(arguments.save))
    if arguments.plot is not None:
        if pathlib.Path(arguments.plot).is_dir():
            raise Refusal(f"--plot needs a file, and {arguments.plot!r} is a folder; name one in it, such as step.png.")
        _check_folder("--plot", pathlib.Path(arguments.plot).parent)
    macros = gin_run.load(arguments, ["MODEL_DIR='unused'", "ACTIVATION_DTYPE='bfloat16'"])
    if arguments.compare is not None:
        return _compare(arguments)
    if arguments.search:
        return _search(arguments, macros)
    return _answer(arguments)


def process(words: list[str]) -> list[str]:
    """The command that answers a question as JSON in a process of its own; `words`: what follows "compile"."""
    return [sys.executable, "-m", "switch_tf.cli", "compile", *words, "--json"]


def _check_folder(flag, folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refusal(f"{flag} needs a folder that can be written to, and {str(folder)!r} is none ({error.strerror}); "
                      "name another.") from error


def _check_compiler():
    wanted = environment.KNOWN_GOOD["tensorflow"]["libtpu"]
    found = environment.installed_version("libtpu")
    if environment.installed_version("tensorflow-tpu"):
        raise Refusal("The TPU compiler for machines without a TPU does not go with tensorflow-tpu; run this where "
                      "tensorflow is installed (docs/install.md).")
    if found is None or not environment.goes_with(found, wanted):
        what = "is not installed" if found is None else f"is libtpu {found}, which jaxlib does not go with"
        raise Refusal(f"The TPU compiler {what}; run: {environment.pip()} install --no-deps libtpu=={wanted}")


def _question(topology):
    """What the parsed configuration asks of the compiler.

    Raises:
        Refusal: an unknown topology, or a configuration that contradicts itself.
    """
    from switch_tf.aot import chips, compiler
    from switch_tf.aot.plan import Question

    try:
        with quiet.held_back():  # libtpu says that there is no TPU
            num_devices = compiler.num_devices(topology)
        chip = chips.of(topology)
    except ValueError as error:
        raise Refusal(first_line(error)) from error
    # Not checked: a search is for what fits, and the plan of an answer checks.
    described = gin_run.on_devices(num_devices, "TPU", is_checked=False)
    return Question(described.config, described.make_model().dtype_policy, described.make_optimizer, described.layout,
                    topology, chip, described.run.batch_size, described.run.task_feature_lengths, described.settings,
                    described.run.pack, described.make_objective)


def _answer(arguments):
    """One question, from the files where it was asked before."""
    from switch_tf.aot import kept

    file = kept.answer_file(gin.config_str(), arguments.topology, str(arguments.full))
    is_known, files = file.exists() and arguments.save is None and arguments.plot is None, {}
    if is_known:
        result = json.loads(file.read_text())
        answer_text.say(f"The compiler was asked before; its answer is {file}.")
    else:
        result = _compile(arguments, files)
    answer_text.show(answer_text.describe(result), arguments)
    # A full disk loses no answer.
    if not is_known:
        kept.write(file, json.dumps(result), answer_text.say)
    is_saved = all(kept.write(path, content, answer_text.say) for path, content in files.items())
    return {**result, "exit_status": int(not (result["fits"] and is_saved))}


def _compile(arguments, files):
    """Asks the compiler; `files` gets what --save and --plot ask for: path -> content."""
    from switch_tf.aot import picture, plan, result

    def keep(name, text):
        if arguments.save is not None:
            files[pathlib.Path(arguments.save) / name] = text

    question = _question(arguments.topology)
    try:
        answer = plan.ask(question, arguments.full, answer_text.say, keep)
    except ValueError as error:
        raise Refusal(first_line(error)) from error
    found = result.as_json(question, answer)
    if arguments.plot is not None and answer.schedule is not None:
        files[pathlib.Path(arguments.plot)] = picture.draw(answer.schedule, answer.parts, answer.compiled[-1],
                                                           found["layers"])
    return found


def _compare(arguments):
    """The same run under several layouts, one table. Status 1 where none fits."""
    from switch_tf.aot import many
    from switch_tf.partitioning.layout import Layout

    if gin.get_configurable(Layout)() != Layout():
        raise Refusal("--compare names the layouts, so leave out the layout's --gin_file.")
    files = {name: name if name.endswith(".gin") else f"gin/layouts/{name}.gin"
             for name in filter(None, arguments.compare.split(","))}
    if len(files) < 2:
        raise Refusal(f"--compare needs at least two layouts, as in --compare=expert,expert_model, not "
                      f"{arguments.compare!r}.")
    answer_text.say(f"Compiling {len(files)} layouts ...")
    results = many.ask({name: process(_words(arguments, [file])) for name, file in files.items()}, answer_text.say)
    answer_text.show(answer_text.table(results), arguments)
    return {"layouts": results, "exit_status": int(not any(result.get("fits") for result in results.values()))}


def _search(arguments, macros):
    """The same run with other meshes, groups and capacities, ranked. Status 1 where nothing fits."""
    from switch_tf.aot import many
    from switch_tf.aot.search import search

    question = _question(arguments.topology)
    mesh = "MESH_SHAPE" if "MESH_SHAPE" in macros else "Layout.mesh_shape"

    def ask(choices):
        return many.ask({name: process(_words(arguments, bindings=_bindings(choice, mesh, question.config)))
                         for name, choice in choices.items()}, answer_text.say)

    own, results = search(question, ask, answer_text.say)
    best = next(iter(results))
    typed = map(_typed, _bindings(best, mesh, question.config))
    answer_text.show(answer_text.ranking(own, results, typed), arguments)
    return {"candidates": [{**choice._asdict(), **result} for choice, result in results.items()],
            "exit_status": int(not results[best].get("fits"))}


def _bindings(choice, mesh, config):
    """What gives a run this choice; `mesh`: the name that its files give the shape of the mesh."""
    bindings = [f"{mesh}='{choice.mesh_shape}'"]
    if config.num_experts:
        bindings += [f"SwitchConfig.group_size={choice.group_size}",
                     f"SwitchConfig.num_groups_multiple={choice.num_groups_multiple}",
                     f"SwitchConfig.train_capacity_factor={choice.capacity_factor}"]
    return bindings


def _words(arguments, files=(), bindings=()):
    """The command line of this question with more files and bindings."""
    return [*(f"--gin_file={file}" for file in (*arguments.gin_file, *files)),
            f"--gin_search_paths={arguments.gin_search_paths}", f"--topology={arguments.topology}",
            *(["--full"] if arguments.full else []), *(f"--gin.{binding}" for binding in arguments.gin_bindings),
            *(f"--gin.{binding}" for binding in bindings)]


def _typed(binding):
    """A binding as one types it in a shell."""
    name, _, value = binding.partition("=")
    return f'--gin.{name}="{value}"' if "'" in value else f"--gin.{name}={value}"
