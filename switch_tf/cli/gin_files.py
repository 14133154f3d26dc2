"""Reads gin files and bindings from the command line and refuses what gin would accept in silence."""

import importlib.util  # noqa: F401  gin 0.5 uses it without importing it
import logging
import os
import re
import tokenize

import gin
from gin import config as gin_config

from switch_tf.cli.gin_statements import Macro, Statements
from switch_tf.configs import shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal

# What to add when a run lacks a macro that a whole kind of file provides.
_PROVIDERS = {"MIXTURE_OR_TASK_NAME": "a task file: --gin_file=gin/tasks/docs_corpus.gin",
              "TASK_FEATURE_LENGTHS": "a task file: --gin_file=gin/tasks/docs_corpus.gin",
              "NUM_EXPERTS": "a model file: --gin_file=gin/models/switch_tiny.gin"}


def add_arguments(parser) -> None:
    """Declares `--gin_file` and `--gin_search_paths`; `--gin.NAME=VALUE` is taken by main."""
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE",
                        help="gin file, repeatable; the one given last wins. Shipped files such as "
                             "gin/models/switch_tiny.gin are found from any folder")
    parser.add_argument("--gin_search_paths", default="", metavar="FOLDERS",
                        help="folders to look for gin files in, separated by commas, before the shipped ones")
    parser.epilog = (f"{parser.epilog} " if parser.epilog else "") + (
        "--gin.NAME=VALUE overrides a macro or a parameter; text needs quotes within quotes: "
        "--gin.MODEL_DIR=\"'runs/x'\".")


def read(files, bindings=(), search_paths="") -> Statements:
    """Reads gin files, then bindings "NAME=VALUE", of a whole run, without importing what they name.

    Raises:
        Refusal: what `collect` refuses, or a macro that nothing uses or nothing defines.
    """
    statements = collect(files, bindings, search_paths)
    _check_macros(statements)
    return statements


def collect(files, bindings=(), search_paths="") -> Statements:
    """Reads gin files, then bindings "NAME=VALUE", which may be those of a part of a run.

    Raises:
        Refusal: a file that is not there, a value that cannot be read, or one that leads back to itself.
    """
    gin_config._LOCATION_PREFIXES[:] = ["", *filter(None, search_paths.split(",")), str(shipped_gin.folder())]
    statements = Statements()
    for file in files:
        _check_exists(file)
        _told(lambda file=file: statements.add_file(file), file)
    for binding in bindings:
        name, _, value = (part.strip() for part in binding.partition("="))
        if not _ or not value:
            raise Refusal(f"--gin.{binding} must have the form --gin.NAME=VALUE.")
        macros = statements.macros
        if "." not in name and name not in macros:
            raise Refusal(f"No gin file defines {name}.{nearest(name, macros)} These files define "
                          f"{', '.join(sorted(macros))}.")
        _told(lambda binding=binding: statements.add_binding(binding), f"--gin.{binding}")
    if endless := statements.endless():
        name, value = endless
        raise Refusal(f"{name} stands for itself: {name} = {value}.")
    return statements


def parse(files, bindings=(), search_paths="") -> Statements:
    """Parses gin files and bindings, once they have been read, into gin's global configuration.

    Raises:
        Refusal: what `read` refuses, or a name that nothing has.
    """
    statements = read(files, bindings, search_paths)
    apply(files, bindings)
    return statements


def apply(files, bindings=()) -> None:
    """Parses gin files and bindings that were read before into gin's global configuration.

    Raises:
        Refusal: a name that nothing has.
    """
    gin.clear_config()
    for file in files:
        _told(lambda file=file: gin.parse_config_file(file), file)
    for binding in bindings:
        _told(lambda binding=binding: gin.parse_config(binding), f"--gin.{binding}")


def _check_exists(file):
    prefixes = gin_config._LOCATION_PREFIXES
    if not any(os.path.isfile(os.path.join(prefix, file)) for prefix in prefixes):
        shipped = [str(path.relative_to(shipped_gin.folder())) for path in shipped_gin.folder().glob("gin/*/*.gin")]
        raise Refusal(f"There is no gin file {file!r} here or among the shipped ones.{nearest(file, shipped)}")


def _told(action, source):
    """Does what gin's parser is needed for; what it refuses is the user's mistake, in one sentence."""
    # gin logs an error for each folder that does not hold an included file, before it looks into the next.
    logging.disable(logging.ERROR)
    try:
        action()
    except SyntaxError as error:
        # gin names the file where the fault is, which may be one that `source` includes; a binding has no file.
        place = f"{error.filename or source}" + f", line {error.lineno}," * (error.filename is not None)
        message = first_line(error.msg).partition("malformed node")[0].rstrip(".") or "this is no value"
        raise Refusal(f"{place} cannot be read: {message}. Values are Python literals, and text needs "
                      "quotes within quotes: --gin.MODEL_DIR=\"'runs/x'\".") from error
    except tokenize.TokenError as error:
        raise Refusal(f"{source}: {error.args[0]}; a bracket or a quote is not closed.") from error
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise Refusal(_explain(first_line(error), source)) from error
    finally:
        logging.disable(logging.NOTSET)


def _explain(message, source):
    """gin's message, with the nearest right name for a wrong one."""
    hint = ""
    if wrong := re.search(r"No configurable matching '([^']+)'", message):
        known = [selector.rpartition(".")[2] for selector in gin_config._REGISTRY._selector_map]
        hint = nearest(wrong[1].rpartition(".")[2], known)
    elif wrong := re.search(r"Configurable '([^']+)' doesn't have a parameter named '([^']+)'", message):
        parameters = gin_config._get_cached_arg_spec(gin_config._REGISTRY.get_match(wrong[1]).wrapped)
        hint = nearest(wrong[2], [*parameters.args, *parameters.kwonlyargs])
    return f"{source}: {message.rstrip('.')}.{hint}"


def _check_macros(statements):
    """Refuses a macro that is used and has no value, and one that has a value and that no file refers to."""
    macros, used = statements.macros, statements.used_macros() - {"gin.REQUIRED"}
    for name in sorted(used - macros.keys()):
        provider = _PROVIDERS.get(name, f"it: --gin.{name}=VALUE")
        raise Refusal(f"{name} has no value; add {provider}.")
    for name in sorted(macros.keys() - statements.referenced):
        raise Refusal(f"{name} is set but nothing uses it.{nearest(name, used)}")
    check_required(statements)


def check_required(statements: Statements) -> None:
    """Refuses a macro that a user has to give a value and did not.

    Raises:
        Refusal: names it.
    """
    for name, value in statements.macros.items():
        if value == Macro("gin.REQUIRED"):
            raise Refusal(f"{name} has no value; set it, for example --gin.{name}=\"'runs/x'\".")
