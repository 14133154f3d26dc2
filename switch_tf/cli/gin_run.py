"""From gin files to a checked experiment, for every command that takes one.

In two steps, because importing TensorFlow takes seconds: `look` and `load` refuse what is wrong with single values,
`on_this_machine` and `on_devices` what is wrong with the parts together.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import gin
from etils import epy
from gin import config as gin_config

from switch_tf.cli import gin_files, gin_macros
from switch_tf.configs import factories, names
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.gin_calls import or_mistake
from switch_tf.configs.part_names import TRAINER
from switch_tf.configs.run import Run, StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.installation import quiet
from switch_tf.partitioning.backend_table import BACKENDS
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal
from switch_tf.training import processes

with epy.lazy_imports():  # which import TensorFlow, so `look` comes first
    from switch_tf.evaluation import objectives
    from switch_tf.training import division, trainer

PARTS = ("a model (gin/models/switch_tiny.gin), a task (gin/tasks/docs_corpus.gin) and a run "
         "(gin/runs/pretrain.gin)")


def add_device_arguments(parser: argparse.ArgumentParser, num_devices: int | None = None) -> None:
    """Declares `--devices`, with a default, and `--backend`, which main makes a binding."""
    parser.add_argument("--devices", type=int, default=num_devices, metavar="N",
                        help=f"virtual devices to make of this machine's CPU (default {num_devices or 'as it is'})")
    parser.add_argument("--backend", metavar="NAME",
                        help=f"back end that runs the layout: {', '.join(BACKENDS)} (default: Layout.backend of the "
                             "gin files)")


def load(arguments: argparse.Namespace, defaults: Sequence[str] = (), num_cpu_devices: int | None = None,
         check: Callable[..., Any] | None = None) -> set[str]:
    """Parses a command's gin files and bindings, and imports TensorFlow if nothing is wrong with them.

    Args:
        arguments: What `gin_files.add_arguments` declares.
        defaults: "NAME=VALUE" that the command line overrides.
        num_cpu_devices: Number of devices to make of the CPU, None to leave it as it is.
        check: Function that raises Refusal for an Experiment that the command cannot use, or None.

    Returns:
        The names of all macros.

    Raises:
        Refusal: What `look` refuses, or a macro of the command line that no part of the run reads.
    """
    quiet.expect_tensorflow(num_cpu_devices)  # a gin file of the user's own may import it
    described = look(arguments.gin_file, [*defaults, *arguments.gin_bindings], arguments.gin_search_paths)
    gin_macros.check_read(arguments.gin_bindings)
    if check is not None:
        check(described)
    quiet.import_tensorflow(num_cpu_devices)
    return set(gin_macros.values())


def look(files: Sequence[str], bindings: Sequence[str] = (), search_paths: str = "") -> Experiment:
    """Parses gin files and bindings, and refuses what is wrong with them before TensorFlow is imported.

    Returns:
        The experiment that they describe, with nothing built.

    Raises:
        Refusal: What `gin_files.parse` refuses, a value out of its range, or a task that does not exist.
    """
    if not files:
        raise Refusal(f"A run is described by gin files: give {PARTS}, each with --gin_file.")
    texts = gin_files.parse_files(files, search_paths)
    if ("", TRAINER) not in gin_config._CONFIG:
        raise Refusal(f"These gin files describe no run: {', '.join(files)}. Give {PARTS}.")
    gin_files.parse_bindings(bindings)
    gin_macros.check([*texts, *bindings])
    described = or_mistake(experiment)
    described.check()
    names.check_task(described.run.mixture_or_task_name)
    return described


def experiment() -> Experiment:
    """Returns the experiment that gin has parsed; neither a model nor a partitioner is made.

    Raises:
        Refusal: A value out of its range.
    """
    make = gin.get_configurable
    return Experiment(_config(), make(Layout)(), make(Run)(), make(StepSettings)(),
                      lambda: _trainer_argument("model"), lambda: _trainer_argument("optimizer"), _objective)


def on_this_machine(is_checked: bool = True) -> Experiment:
    """Returns the experiment that gin has parsed, on the devices of all processes that train together.

    Starts the devices: if there are several processes, they have to meet before TensorFlow does anything else.

    Raises:
        Refusal: The layout does not suit the devices or, if `is_checked`, the parts cannot be trained together.
    """
    processes.say_who_is_awaited()
    partitioner = or_mistake(gin.get_configurable(factories.create_partitioner))
    return _on(partitioner.layout, partitioner, is_checked)


def on_devices(num_devices: int, kind: str, is_checked: bool = True) -> Experiment:
    """Returns the experiment that gin has parsed on a number of devices of another machine.

    Raises:
        Refusal: The layout is for other devices or, if `is_checked`, the parts do not go together.
    """
    return _on(or_mistake(gin.get_configurable(Layout)).resolve(num_devices, kind), None, is_checked)


def _on(layout, partitioner, is_checked):
    described = or_mistake(experiment)._replace(layout=layout, partitioner=partitioner)
    if described.config is None:
        described = described._replace(config=described.make_model().config)
    if is_checked:
        described.check()
        division.check_division(described.config, layout, described.run.batch_size, described.run.task_feature_lengths,
                                described.settings.num_microbatches)
    return described


def _config():
    """Returns the configuration of the model; None if the model is none of the package's, so only it knows."""
    reference, scopes = gin_config._CONFIG.get(("", TRAINER), {}).get("model"), []
    while isinstance(reference, gin_config.ConfigurableReference):
        scopes += reference.scopes  # that of a macro, its name, holds for all that it refers to
        if reference.configurable.wrapped is factories.SwitchTransformer:
            with gin.config_scope("/".join(scopes) or None):
                bound = gin.get_bindings(factories.SwitchTransformer, resolve_references=False)
                config = copy.deepcopy(bound.get("config"))
            return config if isinstance(config, SwitchConfig) else None
        reference = gin_config._CONFIG.get(reference.config_key, {}).get("value")
    return None


def _objective():
    if gin_config._CONFIG[("", TRAINER)].get("objective") is not None:  # a run records the default, None, too
        return _trainer_argument("objective")
    return objectives.Objective()


def _trainer_argument(name):
    """Makes anew what gin has for the trainer's argument `name`."""
    made = or_mistake(lambda: copy.deepcopy(gin.query_parameter(f"{TRAINER}.{name}")))
    trainer.check_parts(**{name: made})
    return made
