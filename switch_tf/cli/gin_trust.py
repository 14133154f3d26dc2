"""Checks the gin file of a run folder before it is parsed: it may name only what this package ships.

A gin file is a program: it imports modules and calls what it finds in them, and a run folder may come from a stranger.
Only full names in a list are allowed, so a path through attributes (`text_source.os.system`) is refused. The statements
come from gin's own parser, so gin reads the same ones afterwards.
"""

import io
import pathlib
import tokenize
from typing import NamedTuple

from gin import config_parser

from switch_tf.checks import shown
from switch_tf.cli import gin_files
from switch_tf.configs.part_names import ALLOWED, BOUND, LIBRARIES, MODULES, TASKS
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places

_LARGEST_FILE = 2**20  # bytes; a resolved configuration has some thousand
_DEEPEST = 20  # brackets within brackets
_DYNAMIC = "__gin__.dynamic_registration"

_OF_KERAS_OBJECTS = {"class_name", "module", "registered_name"}  # Keras imports what such a dictionary names


class _Reference(NamedTuple):
    """`@name`, or `@name()` if it `is_made`; `name` may begin with "scope/"."""

    name: str
    is_made: bool

    def __repr__(self):
        return f"@{self.name}{'()' * self.is_made}"


class _Macro(NamedTuple):
    """`%NAME`."""

    name: str

    def __repr__(self):
        return f"%{self.name}"


def check(file: str | pathlib.Path, search_paths: str = "") -> None:
    """Refuses the gin file of a run, and what it includes, if it names anything that the package does not ship.

    Nothing is imported or executed.

    Args:
        file: Path of the file.
        search_paths: Folders of included files, as for `--gin_search_paths`.

    Raises:
        Refusal: The sentence has the import or the selector, and the way out; or the file cannot be read.
    """
    gin_files.look_in(search_paths)
    _check_file(str(file), (), str(file))


def _check_file(file, included_from, run_file):
    found = gin_files.path_of(file)
    if found is None:
        raise Refusal(f"{run_file} includes {shown(file)}, which is neither here nor among the shipped files; "
                      "name its folder with --gin_search_paths.")
    if file in included_from:
        raise Refusal(f"{run_file} includes {shown(file)}, which leads back to itself.")
    checked = _Names(run_file)
    for statement in _statements(found):
        match statement:
            case config_parser.IncludeStatement():
                _check_file(statement.filename, (*included_from, file), run_file)
            case config_parser.ImportStatement():
                checked.add_import(statement)
            case config_parser.BlockDeclaration():
                checked.check_bound(statement.selector)
            case config_parser.BindingStatement():
                if statement.arg_name:  # else a macro
                    checked.check_bound(statement.selector)
                checked.check_value(statement.value)


def _statements(path):
    """All statements of a file, before any of them is looked at."""
    if places.size(path) > _LARGEST_FILE:
        raise Refusal(f"{path} is larger than {_LARGEST_FILE} bytes, so it is no configuration of a run.")
    try:
        return list(config_parser.ConfigParser(io.StringIO(places.at(path).read_text()), _Values()))
    except (RecursionError, MemoryError):
        raise Refusal(f"{path} cannot be read: its brackets are nested too deeply.") from None
    except SyntaxError as error:
        raise Refusal(f"{path} cannot be read: {_reason(error.msg)}.") from None
    except (tokenize.TokenError, ValueError, TypeError, OSError) as error:
        raise Refusal(f"{path} cannot be read: {_reason(error)}.") from None


def _reason(error):
    return first_line(error).partition("malformed node")[0].rstrip(".") or "it holds what is no value"


class _Values(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name, evaluate):
        return _Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name):
        return _Macro(macro_name)


class _Names:
    """The names that one gin file uses, resolved through its imports as gin resolves them."""

    def __init__(self, run_file):
        self._run_file = run_file
        self._is_dynamic = False
        self._modules = {}  # name in the file -> full name

    def add_import(self, statement):
        if statement.module == _DYNAMIC and statement.is_from:
            self._is_dynamic = True
            return
        module = statement.module
        is_task = module.rpartition(".")[0] == TASKS
        if not is_task and module not in MODULES and module not in LIBRARIES:
            _refuse(self._run_file, f"imports {module!r}")
        is_whole = statement.is_from or statement.alias
        self._modules[statement.bound_name()] = module if is_whole else statement.bound_name()

    def check_bound(self, selector):
        """Refuses a selector whose parameters are bound, unless the package or t5 ships it."""
        if not self._is_known(selector, BOUND):
            _refuse(self._run_file, f"binds parameters of {selector!r}")

    def check_value(self, value, depth=0):
        """Refuses what a value refers to, at any depth, unless the package ships it."""
        if depth > _DEEPEST:
            raise Refusal(f"{self._run_file} cannot be read: its brackets are nested too deeply.")
        match value:
            case _Reference():
                if not self._is_known(value.name.rpartition("/")[2], ALLOWED):
                    _refuse(self._run_file, f"refers to {repr(value)!r}")
            case dict():
                for key, entry in value.items():
                    if not isinstance(key, str | int | float | None) or key in _OF_KERAS_OBJECTS:
                        _refuse(self._run_file, f"describes an object by the key {shown(key)}")
                    self.check_value(entry, depth + 1)
            case list() | tuple() if not isinstance(value, _Macro):
                for entry in value:
                    self.check_value(entry, depth + 1)

    def _is_known(self, selector, names):
        if not self._is_dynamic:  # gin looks among what shipped files have registered, by the end of the name
            return any(name == selector or name.endswith(f".{selector}") for name in names)
        first, dot, rest = selector.partition(".")
        return f"{self._modules.get(first, '')}{dot}{rest}" in names


def _refuse(run_file, what):
    raise Refusal(f"{run_file} {what}, which switch_tf does not ship. A gin file is a program, so this one is not run: "
                  "read it, and add --trust if you trust whoever wrote it.")
