"""Has gin parse the files and bindings of a command line; what is wrong with them is refused in one sentence."""

import argparse
import codecs
import contextlib
import importlib.util
import io
import logging
import os
import pathlib
import pkgutil
import re
import sys
import tokenize
from collections.abc import Sequence

import gin
from gin import config as gin_config

from switch_tf.cli import gin_macros, gin_names
from switch_tf.configs import part_names, shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.configs.gin_calls import or_mistake
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places

_MISTAKES = (OSError, ValueError, TypeError, AttributeError, ImportError, NameError, RuntimeError)


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


def parse(files: Sequence[str], bindings: Sequence[str] = (), search_paths: str = "") -> None:
    """Parses the gin files, then the bindings "NAME=VALUE", of a whole run into gin's global configuration.

    Args:
        files: Names of gin files; the one given last wins.
        bindings: "NAME=VALUE" of the command line.
        search_paths: Folders to look for gin files in before the shipped ones, separated by commas.

    Raises:
        Refusal: What `parse_files`, `parse_bindings` and `gin_macros.check` refuse.
    """
    texts = parse_files(files, search_paths)
    parse_bindings(bindings)
    gin_macros.check([*texts, *bindings])


def read_model(files: Sequence[str], bindings: Sequence[str] = (), search_paths: str = "") -> SwitchConfig:
    """Parses as `parse` does, and returns the configuration of the model.

    Raises:
        Refusal: What `parse` refuses, or the files describe no model or an impossible one.
    """
    parse(files, bindings, search_paths)
    if not any(selector.endswith(".SwitchConfig") for _, selector in gin.config._CONFIG):
        raise Refusal(f"These gin files describe no model: {', '.join(files) or 'none'}. Give a model file, such "
                      "as gin/models/switch_tiny.gin.")
    return or_mistake(gin.get_configurable(SwitchConfig))


def parse_files(files: Sequence[str], search_paths: str | None = None) -> list[str]:
    """Clears gin's configuration and parses gin files.

    Args:
        files: Names of gin files.
        search_paths: As for `parse`; None leaves them as they are.

    Returns:
        The texts of all files that were parsed, included ones too.

    Raises:
        Refusal: A file that is not there or cannot be read, or a name that does not exist.
    """
    if search_paths is not None:
        look_in(search_paths)
    gin.clear_config()
    texts = []
    for file in files:
        _check_file(file)
        with _refusing(file):
            texts += _texts(gin.parse_config_file(file))
    return texts


def parse_bindings(bindings: Sequence[str]) -> None:
    """Parses bindings "NAME=VALUE" on top of the files.

    Raises:
        Refusal: A macro that no file defines, a name that does not exist, or a value that cannot be read.
    """
    defined = gin_macros.values()
    for binding in bindings:
        name, equals, value = (part.strip() for part in binding.partition("="))
        if not equals or not value:
            raise Refusal(f"--gin.{name}{equals}{value} must have the form --gin.NAME=VALUE.")
        if "." not in name and name not in defined:
            raise Refusal(f"No gin file defines {name}.{nearest(name, defined)} These files define "
                          f"{', '.join(sorted(defined)) or 'none'}.")
        with _refusing(f"--gin.{binding}"):
            gin.parse_config(binding)


def look_in(search_paths: str) -> None:
    """Sets the folders, separated by commas, in which gin looks for files before the shipped ones."""
    folders = (os.path.abspath(path) if places.is_local(path) else path  # gin may import `a` for "a/b.gin"
               for path in filter(None, search_paths.split(",")))
    gin_config._LOCATION_PREFIXES[:] = ["", *folders, str(shipped_gin.folder())]


def path_of(file: str) -> str | None:
    """Returns the path of a file as gin finds it; None if it is nowhere."""
    prefixes = gin_config._LOCATION_PREFIXES if places.is_local(file) else [""]
    return next(filter(_is_file, (os.path.join(prefix, file) for prefix in prefixes)), None)


def _is_file(path):
    return places.at(path).is_file()


def _is_file_of_bucket(path):
    """Returns whether gin should read a file as `_open` does."""
    return path.rfind("://") == path.find("://") > 0 and not places.is_local(path) and _is_file(path)


@contextlib.contextmanager
def _open(path):
    yield io.StringIO(places.at(path).read_text())


gin.config.register_file_reader(_open, _is_file_of_bucket)


def _check_file(file):
    path = path_of(file)
    if path is None:
        shipped = [str(path.relative_to(shipped_gin.folder())) for path in shipped_gin.folder().glob("gin/*/*.gin")]
        raise Refusal(f"There is no gin file {file!r} here or among the shipped ones.{nearest(file, shipped)}")


def _texts(parsed):
    """Returns the texts of a parsed file and of the files that it includes."""
    text = places.at(path_of(parsed.filename)).read_text()
    return [text, *(text for included in parsed.includes for text in _texts(included))]


@contextlib.contextmanager
def _refusing(source):
    """Within this scope an error of gin's is refused as the user's mistake."""
    # gin logs an error for each folder that does not hold an included file, before it looks into the next.
    logging.disable(logging.ERROR)
    try:
        yield
    except SyntaxError as error:
        raise Refusal(_explain_syntax(error, source)) from error
    except tokenize.TokenError as error:
        raise Refusal(f"{source}: {error.args[0]}; a bracket or a quote is not closed.") from error
    except RecursionError as error:
        raise Refusal(f"{source} cannot be read: it includes itself, or its brackets are nested too deeply.") from error
    except _MISTAKES as error:
        raise Refusal(_explain(first_line(error), source)) from error
    finally:
        logging.disable(logging.NOTSET)


def _explain_syntax(error, source):
    # gin names the file where the fault is, which may be one that `source` includes; a binding has no file.
    file = pathlib.Path(error.filename or "")
    if file.is_file() and file.read_bytes().startswith(codecs.BOM_UTF8):
        return f"{error.filename} starts with a byte order mark; save it as UTF-8 without one."
    place = f"{error.filename}, line {error.lineno}," if error.filename else source
    message = first_line(error.msg).partition("malformed node")[0].rstrip(".") or "this is no value"
    return (f"{place} cannot be read: {message}. Values are Python literals, and text needs quotes within quotes: "
            "--gin.MODEL_DIR=\"'runs/x'\".")


def _explain(message, source):
    """Returns gin's message as a sentence, with the nearest right name for a wrong one."""
    parsed = [selector for _, selector in gin_config._CONFIG]
    if wrong := re.search(r"No configurable matching (?:reference )?'@?([\w./]+)", message):
        known = sorted({selector.rpartition(".")[2] for selector in parsed if not selector.startswith("gin.")})
        hint = nearest(wrong[1].rpartition(".")[2], known) or f" These files name {', '.join(known) or 'none'}."
        return f"{source}: No configurable matching {wrong[1]!r}.{hint}"
    if wrong := re.search(r"Configurable '([^']+)' doesn't have a parameter named '([^']+)'", message):
        configurable = gin_config._REGISTRY.get_match(wrong[1].rpartition(".")[2])
        wrapped = configurable and gin_config._get_cached_arg_spec(configurable.wrapped)
        hint = nearest(wrong[2], [*wrapped.args, *wrapped.kwonlyargs]) if wrapped else ""
        return f"{source}: {wrong[1].rpartition('.')[2]} doesn't have a parameter named {wrong[2]!r}.{hint}"
    if wrong := re.search(r"<module '([\w.]+)'.*> has no attribute (\w+)", message):
        return f"{source}: {wrong[1]} has no {wrong[2]!r}.{nearest(wrong[2], _names_in(wrong[1]))}"
    if wrong := re.search(r"'(\w+)' was not provided by an import statement", message):
        modules = {name.split(".")[-2]: name.rpartition(".")[0] for name in part_names.PARTS}
        hint = (f" Add: from {' import '.join(modules[wrong[1]].rsplit('.', 1))}." if "." in modules.get(wrong[1], "")
                else nearest(wrong[1], modules))
        return f"{source}: {wrong[1]!r} is not imported in this file.{hint}"
    if wrong := re.search(r"No module named '([\w.]+)'", message):
        above, _, last = wrong[1].rpartition(".")
        return f"{source}: There is no module {wrong[1]!r}.{nearest(last, _modules_in(above))}"
    if wrong := re.search(r"Unable to open file: (.*?)\. Searched config paths", message):
        return f"{source} includes {wrong[1]!r}, which is neither here nor among the shipped files."
    return f"{source}: {message.rstrip('.')}."


def _names_in(module):
    if any(name.startswith(f"{module}.") for name in part_names.PARTS):
        return dir(gin_names.Module(module))
    return dir(sys.modules[module]) if module in sys.modules else []


def _modules_in(package):
    try:
        spec = package and importlib.util.find_spec(package)
    except ImportError:
        return []
    return [found.name for found in pkgutil.iter_modules(spec.submodule_search_locations or [])] if spec else []
