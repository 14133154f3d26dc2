"""From gin files to a checked run, for every command that takes one.

In two steps, because importing TensorFlow takes seconds: `load` refuses what can be known to be wrong before that, and
`on_this_machine` or `on_devices` what is wrong with the parts together.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import gin

from switch_tf.cli import gin_files, sources
from switch_tf.cli.gin_statements import Statements, Unknown
from switch_tf.configs.choices import nearest
from switch_tf.configs.run import Run, StepSettings, check_periods
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.installation import quiet
from switch_tf.messages import first_line
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal
from switch_tf.training import processes

PARTS = ("a model (gin/models/switch_tiny.gin), a task (gin/tasks/docs_corpus.gin) and a run "
         "(gin/runs/pretrain.gin)")
_TRAINER = "switch_tf.training.trainer.Trainer"


class GinRun(NamedTuple):
    """A run whose parts go together.

    `config`: SwitchConfig; `layout`: Layout with its mesh complete; `partitioner`: Partitioner of that layout, None
    where it is of other devices than this machine's; `run`: Run; `settings`: StepSettings; `make_model`,
    `make_optimizer`, `make_objective`: functions that return a new SwitchTransformer, Keras optimizer and Objective,
    none of them built.
    """

    config: SwitchConfig
    layout: Layout
    partitioner: Any
    run: Run
    settings: StepSettings
    make_model: Callable
    make_optimizer: Callable
    make_objective: Callable


def load(arguments, defaults=(), num_cpu_devices=None) -> set[str]:
    """Has gin parse a command's files and bindings, and imports TensorFlow when nothing is known to be wrong with them.

    Args:
        arguments: what `gin_files.add_arguments` declares.
        defaults: list of "NAME=VALUE", which the command line overrides.
        num_cpu_devices: how many devices to make of the CPU, None to leave it as it is.

    Returns:
        The names of all macros.
    """
    words = arguments.gin_file, [*defaults, *arguments.gin_bindings], arguments.gin_search_paths
    look(*words)
    or_mistake(lambda: quiet.import_tensorflow(num_cpu_devices))
    return set(gin_files.parse(*words).macros)


def look(files, bindings=(), search_paths="") -> tuple:
    """Refuses gin files and bindings that describe no run, as far as that is seen without TensorFlow.

    Returns:
        (SwitchConfig, Run), each None where only TensorFlow can tell it.

    Raises:
        Refusal: what `gin_files.read` refuses, or a value out of its range.
    """
    if not files:
        raise Refusal(f"A run is described by gin files: give {PARTS}, each with --gin_file.")
    statements = gin_files.read(files, bindings, search_paths)
    if not any(name == _TRAINER for _, name, _ in statements.parameters):
        raise Refusal(f"These gin files describe no run: {', '.join(files)}. Give {PARTS}.")
    _check_names(statements)
    config, _, run, settings = (described(kind, statements) for kind in (SwitchConfig, Layout, Run, StepSettings))
    if run and settings:
        or_mistake(lambda: check_periods(run, settings))
    if run:
        _check_task(run.mixture_or_task_name, statements.modules)
    return config, run


def _check_names(statements):
    """Refuses what the sources of the modules show to be nowhere; what they do not show is left to gin."""
    for name in sorted(statements.named):
        if found := sources.missing(name, statements.modules):
            module, part, names = found
            raise Refusal(f"{module} has no {part!r}.{nearest(part, names)}")
    known = {name.rpartition(".")[2] for name in statements.named}
    for name in statements.unknown:
        # Modules of others may register with gin what is named like nothing in the files.
        is_left_to_gin = name.startswith("gin.") or not sources.are_plain(statements.modules)
        if hint := nearest(name.rpartition(".")[2], known):
            raise Refusal(f"No gin file names {name!r}.{hint}")
        if not is_left_to_gin:
            raise Refusal(f"No gin file names {name!r}. These files name {', '.join(sorted(known))}.")


def _check_task(name, modules):
    """Refuses a task that the modules of the package, where files import no others, do not write out."""
    own = {module for module in modules if module.startswith("switch_tf.tasks.")}
    if any(not module.startswith(("switch_tf", "__gin__")) for module in modules) or not own:
        return
    modules = sources.with_imported(own, "switch_tf.tasks")
    if sources.is_among(name, set().union(*map(sources.texts, modules))):
        return
    known = set().union(*map(sources.task_names, modules))
    raise Refusal(f"No task or mixture of {', '.join(sorted(own))} is called {name!r}.{nearest(name, known)}")


def described(kind: type, statements: Statements):
    """What statements say of a dataclass that needs no TensorFlow; None where that is nothing, or cannot be known yet.

    Raises:
        Refusal: it has no such field, or refuses the value.
    """
    try:
        arguments = statements.arguments_of(kind)
    except Unknown:
        return None
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in arguments or ():
        if name not in fields:
            raise Refusal(f"{kind.__name__} doesn't have a parameter named {name!r}.{nearest(name, fields)}")
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if arguments is None or needed - arguments.keys():
        return None
    return or_mistake(lambda: kind(**arguments))


def or_mistake(action):
    """Does something; a value that it refuses is the user's mistake."""
    try:
        return action()
    except (ValueError, TypeError) as error:
        raise Refusal(first_line(error)) from error


def on_this_machine(is_checked=True) -> GinRun:
    """The run that gin has parsed, on the devices that this process, and those that train with it, have.

    Starts the devices: where there are several processes they have to meet before TensorFlow does anything else.

    Raises:
        Refusal: its layout does not go with the devices or, where `is_checked`, its parts cannot be trained together.
    """
    from switch_tf.partitioning.backends import create_partitioner

    processes.say_who_is_awaited()
    partitioner = or_mistake(gin.get_configurable(create_partitioner))
    return or_mistake(lambda: _parsed(partitioner.layout, partitioner, is_checked))


def on_devices(num_devices: int, kind: str, is_checked=True) -> GinRun:
    """The run that gin has parsed, on so many devices of another machine.

    Raises:
        Refusal: its layout is for other devices or, where `is_checked`, its parts do not go together.
    """
    return or_mistake(lambda: _parsed(gin.get_configurable(Layout)().resolve(num_devices, kind), None, is_checked))


def _parsed(layout, partitioner, is_checked=True):
    run, settings = gin.get_configurable(Run)(), gin.get_configurable(StepSettings)()
    # Not what is bound of SwitchConfig: a file may describe its model in another way.
    config = _trainer_argument("model").config
    if is_checked:
        from switch_tf.training.division import check_division  # imports Keras

        check_periods(run, settings)
        check_division(config, layout, run.batch_size, run.task_feature_lengths, settings.num_microbatches)
    return GinRun(config, layout, partitioner, run, settings, lambda: _trainer_argument("model"),
                  lambda: _trainer_argument("optimizer"), _objective)


def _objective():
    """Returns the Objective that gin binds to the trainer, or the default one."""
    from switch_tf.evaluation.objectives import Objective

    try:
        gin.query_parameter(f"{_TRAINER}.objective")
    except ValueError:  # not bound
        return Objective()
    return _trainer_argument("objective")


def _trainer_argument(name):
    """What gin has for the trainer's argument `name`, made anew."""
    from switch_tf.training.trainer import check_parts

    made = copy.deepcopy(gin.query_parameter(f"{_TRAINER}.{name}"))
    check_parts(**{name: made})
    return made
