"""Arguments that are gin files and bindings, and what they describe."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.installation import quiet
from switch_tf.partitioning.layout import BACKENDS
from switch_tf.refusals import Refusal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--gin_file` and `--gin_search_paths`; `--gin.NAME=VALUE` is taken by main."""
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE",
                        help="gin file, repeatable; the one given last wins. Shipped files such as "
                             "gin/models/switch_tiny.gin are found from any folder")
    parser.add_argument("--gin_search_paths", default="", metavar="FOLDERS",
                        help="folders to look for gin files in, separated by commas, before the shipped ones")
    parser.epilog = (f"{parser.epilog} " if parser.epilog else "") + (
        "--gin.NAME=VALUE overrides a macro or a parameter; text needs quotes within quotes: "
        "--gin.MODEL_DIR=\"'runs/x'\".")


def add_device_arguments(parser: argparse.ArgumentParser, num_devices: int | None = None) -> None:
    """Declares `--devices`, with a default, and `--backend`, which main makes a binding."""
    parser.add_argument("--devices", type=int, at_least=1, default=num_devices, metavar="N",
                        help=f"virtual devices to make of this machine's CPU (default {num_devices or 'as it is'})")
    parser.add_argument("--backend", metavar="NAME",
                        help=f"back end that runs the layout: {', '.join(BACKENDS)} (default: Layout.backend of the "
                             "gin files)")


def look(arguments: argparse.Namespace, defaults: Sequence[str] = ()) -> Experiment:
    """Returns the experiment of a command line, with nothing built and without TensorFlow; see `Experiment.from_gin`.

    Args:
        arguments: What `add_arguments` declares.
        defaults: "NAME=VALUE" that the command line overrides.
    """
    return Experiment.from_gin(arguments.gin_file, [*defaults, *arguments.gin_bindings], arguments.gin_search_paths)


def load(arguments: argparse.Namespace, defaults: Sequence[str] = (), num_cpu_devices: int | None = None,
         check: Callable[[Experiment], Any] = lambda described: None) -> Experiment:
    """Returns the experiment of a command line, and imports TensorFlow if nothing is wrong with it.

    Args:
        arguments, defaults: As for `look`.
        num_cpu_devices: Number of devices to make of the CPU, None to leave it as it is.
        check: Function that raises Refusal for an experiment that the command cannot use.
    """
    quiet.expect_tensorflow(num_cpu_devices)  # a gin file of the user's own may import it
    described = look(arguments, defaults)
    described.gin.check_read(arguments.gin_bindings)
    check(described)
    quiet.import_tensorflow(num_cpu_devices)
    return described


def read_model(arguments: argparse.Namespace) -> tuple[SwitchConfig, Any]:
    """Returns the model that gin files describe, and their Layout or None."""
    files = arguments.gin_file
    found = gin_syntax.read(files, arguments.gin_bindings, arguments.gin_search_paths).check()
    bound = {name for _, name in found.bound}
    if parts.CONFIG not in bound:
        raise Refusal(f"These gin files describe no model: {', '.join(files) or 'none'}. Give a model file, such "
                      "as gin/models/switch_tiny.gin.")
    return found.part(parts.CONFIG).make(), found.part(parts.LAYOUT).make() if parts.LAYOUT in bound else None
