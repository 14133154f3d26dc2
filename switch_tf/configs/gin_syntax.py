"""Reads gin files as data, by full names, without importing or calling anything.

Only functions of other packages need gin's global configuration (`bind_others`).
"""

import codecs
import dataclasses
import graphlib
import importlib
import io
import itertools
import os
import pkgutil
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gin
from gin import config_parser

from switch_tf.configs import parts, shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.configs.parts import Part
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places
from switch_tf.storage.whole_file import reading

_DYNAMIC = "__gin__.dynamic_registration"
_REQUIRED = "gin.REQUIRED"
_LARGEST_FILE = 2**20  # bytes
_LONGEST_CHAIN = 20  # of macros that refer to macros
_MOST_USES = 10_000
_MOST_TOKENS = 50_000
_MOST_STRINGS = 100  # in a row; gin's parser evaluates the row for each
_PROVIDERS = {"MIXTURE_OR_TASK_NAME": "a task file: --gin_file=gin/tasks/docs_corpus.gin",
              "TASK_FEATURE_LENGTHS": "a task file: --gin_file=gin/tasks/docs_corpus.gin",
              "NUM_EXPERTS": "a model file: --gin_file=gin/models/switch_tiny.gin"}
# Read without a reference.
_STARTS = {parts.TRAINER, parts.PARTITIONER, parts.COMPARISON}
_SIGNS = "@%[({'\""  # with which a value of gin syntax begins, unless it is a number or True, False or None
_MISTAKES = (OSError, ValueError, TypeError, AttributeError, ImportError, NameError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/name`, or `@scope/name()`."""

    name: str
    scope: str
    is_made: bool

    def __repr__(self):
        return f"@{self.scope}{'/' * bool(self.scope)}{self.name}{'()' * self.is_made}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%NAME`."""

    name: str

    def __repr__(self):
        return f"%{self.name}"


class _Values(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name, evaluate):
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(name, scope, evaluate)

    def macro(self, macro_name):
        return Macro(macro_name)


class Gin:
    """The macros, bindings and imports of gin files. Names in values are full.

    Attributes:
        macros: Name -> value.
        bound: (scope, full name) -> {parameter: value}.
        imports: Module -> source that imports it.
    """

    def __init__(self):
        self.macros = {}
        self.bound = {}
        self.imports = {}
        self._mentioned = set()  # macros in all values, also replaced ones
        self._sources = {}  # name of another package -> first source
        self._wrong = []  # messages for `check`
        self._left = _MOST_USES

    def names(self) -> set[str]:
        """Returns the full names of bound or referenced parts."""
        return {name for _, name in self.bound} | {
            reference.name for _, reference in self.references() if isinstance(reference, Reference)}

    def references(self) -> Iterator[tuple[str, Reference | Macro]]:
        """Yields (full name or "%MACRO", Reference or Macro in its value)."""
        for name, value in self.macros.items():
            yield from ((f"%{name}", reference) for reference in _flat(value))
        for (_, name), parameters in self.bound.items():
            yield from ((name, reference) for reference in _flat(list(parameters.values())))

    def required(self) -> list[str]:
        """Returns the macros that need a value from the user."""
        return [name for name, value in self.macros.items() if value == Macro(_REQUIRED)]

    def set(self, name: str, parameter: str, value: Any) -> None:
        """Sets a parameter of a part, or the macro bound to it."""
        bound = self.bound.setdefault(("", name), {})
        if isinstance(bound.get(parameter), Macro):
            self.macros[bound[parameter].name] = value
        else:
            bound[parameter] = value

    def forget(self, values: Iterable[Any]) -> None:
        """Removes the bindings of all parts in `values`."""
        for leaf in parts.leaves(list(values)):
            if isinstance(leaf, Part):
                self.bound = {key: bound for key, bound in self.bound.items() if key[1] != leaf.name}
                self.forget(leaf.arguments.values())

    def refer(self, value: Any) -> Any:
        """Binds the arguments of all parts in a value, and returns it with References.

        Raises:
            Refusal: A part would inherit an argument from another part of the same name.
        """
        def bind(leaf):
            if not isinstance(leaf, Part):
                return leaf
            arguments, scope, last = self.refer(leaf.arguments), "", leaf.name.rpartition(".")[2]
            if inherited := sorted(self.bound.get(("", leaf.name), {}).keys() - arguments.keys()):
                raise Refusal(f"One {last} has {inherited[0]} and another does not, and gin would give it to both; "
                              f"give {inherited[0]} to each.")
            while self.bound.setdefault((scope, leaf.name), arguments) != arguments:
                scope = f"{last}_{len(self.bound)}"
            return Reference(leaf.name, scope, leaf.is_made)

        return parts.mapped(value, bind)

    def part(self, name: str) -> Part:
        """Returns one of `parts.PARTS` with its bound arguments."""
        self._left = _MOST_USES
        return self._part(name, (), True, ())

    def macro(self, name: str) -> Any:
        """Returns the value of a macro with its parts made, or None."""
        self._left = _MOST_USES
        return parts.made(self._value(Macro(name), (), ())) if name in self.macros else None

    def _part(self, name, scopes, is_made, path):
        if (name, scopes) in path:
            raise Refusal("These gin files lead back to themselves: a parameter is set to something that the parameter "
                          "is part of.")
        bound = {}
        for count in range(len(scopes) + 1):
            bound |= self.bound.get(("/".join(scopes[:count]), name), {})
        path = (*path, (name, scopes))
        return Part(name, {parameter: self._value(value, scopes, path) for parameter, value in bound.items()}, is_made)

    def _value(self, value, scopes, path):
        """Resolves macros and references. A macro's name is the scope of its value."""
        def follow(leaf):
            self._left -= isinstance(leaf, Macro | Reference)
            if self._left < 0:
                raise Refusal(f"These gin files put macros into macros to more than {_MOST_USES:,} values.")
            match leaf:
                case Macro():
                    return self._value(self._meaning(leaf.name), (leaf.name,), path)
                case Reference():
                    return self._part(leaf.name, tuple(leaf.scope.split("/")) if leaf.scope else scopes, leaf.is_made,
                                      path)
            return leaf

        return parts.mapped(value, follow)

    def _meaning(self, name):
        if name not in self.macros:
            provider = _PROVIDERS.get(name, f"it: --gin.{name}=VALUE")
            raise Refusal(f"{name} has no value; add {provider}.")
        return self.macros[name]

    def text(self) -> str:
        """Returns one gin file, with the defaults of parts that need no TensorFlow."""
        bound = {key: dict(parameters) for key, parameters in self.bound.items()}
        names = self.names()
        for name in filter(names.__contains__, (parts.CONFIG, parts.RUN, parts.STEP_SETTINGS, parts.LAYOUT)):
            defaults = {field.name: field.default for field in dataclasses.fields(parts.find(name))
                        if field.default is not dataclasses.MISSING}
            bound["", name] = defaults | bound.get(("", name), {})
        modules = {*self.imports, *(name.rpartition(".")[0] for name in names)} - {""}
        ends = [module.rpartition(".")[2] for module in modules]
        whole = {module for module in modules if "." not in module or module in self.imports
                 or ends.count(module.rpartition(".")[2]) > 1}  # their ends are ambiguous

        def shown(value):
            return repr(_renamed(value, short))

        def short(name):
            module, _, last = name.rpartition(".")
            return name if module in whole or not module else f"{module.rpartition('.')[2]}.{last}"

        lines = [f"from {' import '.join(module.rsplit('.', 1))}" for module in (_DYNAMIC, *sorted(modules - whole))]
        lines += [*(f"import {module}" for module in sorted(whole)), ""]
        used = {reference.name for _, reference in self.references()}
        lines += [f"{name} = {shown(value)}" for name, value in sorted(self.macros.items()) if name in used]
        for (scope, name), parameters in sorted(bound.items()):
            lines += [""] * bool(parameters)
            lines += [f"{scope}{'/' * bool(scope)}{short(name)}.{parameter} = {shown(value)}"
                      for parameter, value in sorted(parameters.items())]
        return "\n".join(lines) + "\n"

    def read_file(self, file: str, folders: Sequence[str], included_from: tuple[str, ...] = ()) -> None:
        """Adds a file and its includes, each from the first folder that has it."""
        paths = [os.path.join(folder, file) for folder in (folders if places.is_local(file) else [""])]
        path = next((path for path in paths if "\0" not in path and places.at(path).is_file()), None)
        if path is None and included_from:
            raise Refusal(f"{included_from[-1]} includes {file!r}, which is neither here nor among the shipped files. "
                          "Name its folder with --gin_search_paths.")
        if path is None:
            raise Refusal(f"There is no gin file {file!r} here or among the shipped ones."
                          f"{nearest(file, shipped_gin.names())}")
        if path in included_from:
            raise Refusal(f"{path} cannot be read: it includes itself.")
        self._add(_statements(_content(path), path), path,
                  lambda included: self.read_file(included, folders, (*included_from, path)))

    def bind(self, bindings: Sequence[str]) -> "Gin":
        """Adds "NAME=VALUE" bindings of the command line. 1e6 is an integer, and what is not gin syntax is text."""
        for binding in bindings:
            name, equals, value = (part.strip() for part in binding.partition("="))
            if not equals or not value:
                raise Refusal(f"--gin.{name}{equals}{value} must have the form --gin.NAME=VALUE.")
            if "." not in name and name not in self.macros:
                raise Refusal(f"No gin file defines {name}.{shipped_gin.hint(name, self.macros)} These files define "
                              f"{', '.join(sorted(self.macros)) or 'none'}.")
            source = f"--gin.{binding}"
            if re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", value) and float(value).is_integer():  # TRAIN_STEPS=1e6
                binding = f"{name}={int(float(value))}"
            try:
                statements = _statements(binding, source)
            except Refusal:
                if value[0] in _SIGNS:
                    raise
                if hint := nearest(value.capitalize(), ("True", "False", "None"), 0.8):
                    raise Refusal(f"{source} is no gin value.{hint} Text like it needs quotes within quotes: "
                                  f"--gin.{name}=\"'{value}'\".") from None
                statements = _statements(f"{name}={value!r}", source)
            if not all(isinstance(statement, config_parser.BindingStatement) for statement in statements):
                raise Refusal(f"{source} must have the form --gin.NAME=VALUE.")
            self._add(statements, source)
        return self

    def _add(self, statements, source, include=None):
        """Resolves names as gin does."""
        is_dynamic, modules = False, {}  # name in the file -> full name

        def full(selector):
            """Returns a selector's full name. Records an invalid one for `check`."""
            if not is_dynamic:
                # Without dynamic registration, gin accepts the end of a known name.
                ends = {parts.NAMES.get(name, name) for name in {*parts.NAMES, *parts.IN_LIBRARIES, *self.names()}
                        if f".{name}".endswith(f".{selector}")}
                if len(ends) == 1:
                    return ends.pop()
                self._sources.setdefault(selector, source)
                if not self.imports or "." in selector:  # otherwise an imported module may register it
                    self._wrong.append(self._unmatched(selector))
                return selector
            first, _, rest = selector.partition(".")
            if first not in modules:
                known = {name.split(".")[-2]: name.rpartition(".")[0] for name in parts.PARTS}
                hint = (f" Add: from {' import '.join(known[first].rsplit('.', 1))}." if first in known else
                        nearest(first, known))
                self._wrong.append(f"{source}: {first!r} is not imported in this file.{hint}")
                return selector
            name = f"{modules[first]}.{rest}" if rest else modules[first]
            if name in parts.NAMES:
                return parts.NAMES[name]
            module, _, last = name.rpartition(".")
            ends = [end for above, _, end in (known.rpartition(".") for known in parts.NAMES) if above == module]
            if hint := nearest(last, ends):
                self._wrong.append(f"{source}: {module} has no {last!r}.{hint}")
            self._sources.setdefault(name, source)
            return name

        for statement in statements:
            if isinstance(statement, config_parser.IncludeStatement):
                include(statement.filename)
            elif isinstance(statement, config_parser.BindingStatement):
                try:
                    (value,) = _renamed([statement.value], full)
                except RecursionError:
                    raise Refusal(f"{source} cannot be read: its brackets are nested too deeply.") from None
                self._mentioned |= {leaf.name for leaf in _flat(value) if isinstance(leaf, Macro)}
                if not (parameter := statement.arg_name):
                    self.macros[f"{statement.scope}{'/' * bool(statement.scope)}{statement.selector}"] = value
                    continue
                name = full(statement.selector)
                if name in parts.PARTS and parameter not in parts.parameters(name):
                    self._wrong.append(f"{source}: {name.rpartition('.')[2]} doesn't have a parameter named "
                                       f"{parameter!r}.{nearest(parameter, parts.parameters(name))}")
                self.bound.setdefault((statement.scope, name), {})[parameter] = value
            elif isinstance(statement, config_parser.ImportStatement):
                module, is_whole = statement.module, statement.is_from or statement.alias
                if module == _DYNAMIC and statement.is_from:
                    is_dynamic = True
                    continue
                modules[statement.bound_name()] = module if is_whole else statement.bound_name()
                is_task = f"{module}.".startswith(f"{parts.TASKS}.")  # declares its names when imported
                if is_task or module not in parts.MODULES and module != "gin":
                    self.imports.setdefault(module, source)

    def _unmatched(self, name):
        known = sorted({full.rpartition(".")[2] for full in self.names() - {name}})
        hint = shipped_gin.hint(name.rpartition(".")[2], known) or f" These files name {', '.join(known) or 'none'}."
        return f"{self._sources.get(name, 'a gin file')}: No configurable matching {name!r}.{hint}"

    def check(self, is_whole: bool = True) -> "Gin":
        """Imports the modules of other packages and checks all names and macros.

        Args:
            is_whole: Whether the files describe a complete run: each macro needs a value and a use.
        """
        self.check_names()
        if is_whole:
            used = {reference.name for _, reference in self.references() if isinstance(reference, Macro)} - {_REQUIRED}
            for name in sorted(used):
                self._meaning(name)
            for name in sorted(self.macros.keys() - self._mentioned):
                raise Refusal(f"{name} is set but nothing uses it.{nearest(name, used)}")
        for name in self.required():
            raise Refusal(f"{name} has no value; set it, for example --gin.{name}=runs/x.")
        uses = {name: [reference.name for reference in _flat(value) if isinstance(reference, Macro)]
                for name, value in self.macros.items()}
        try:
            graphlib.TopologicalSorter(uses).prepare()
        except graphlib.CycleError as error:
            name = error.args[1][0]
            raise Refusal(f"{name} stands for itself: {name} = {self.macros[name]}.") from None
        return self

    def check_read(self, bindings: Sequence[str]) -> None:
        """Refuses a macro in the command line's `bindings` that the run does not read.

        A part of this package is read if the trainer leads to it, any other function if a parameter of it is bound.
        """
        uses = {}
        for name, reference in self.references():
            uses.setdefault(name, set()).add(f"%{reference.name}" if isinstance(reference, Macro) else reference.name)
        read, new = set(), {name for name in uses if name in _STARTS or name not in parts.PARTS and name[0] != "%"}
        while new:
            read |= new
            new = set().union(*(uses.get(name, ()) for name in new)) - read
        for name in (binding.partition("=")[0].strip() for binding in bindings):
            if "." not in name and f"%{name}" not in read:
                raise Refusal(f"{name} is set, but no part of this run reads it; leave it out, or refer to %{name} in "
                              "a gin file, as in: keras.optimizers.AdamW.learning_rate = %LEARNING_RATE.")

    def check_names(self) -> "Gin":
        """Imports the modules of other packages and checks all names."""
        if self._wrong:
            raise Refusal(self._wrong[0])
        for module, source in self.imports.items():
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                above, _, last = (error.name or "").rpartition(".")
                beside = pkgutil.iter_modules(getattr(sys.modules.get(above), "__path__", []))
                raise Refusal(f"{source}: There is no module {error.name!r}."
                              f"{nearest(last, [module.name for module in beside])}") from error
            except _MISTAKES as error:
                raise Refusal(f"{source}: {first_line(error).rstrip('.')}.") from error
        registered = {}  # name -> full name
        for name in self.names():
            if "." not in name:
                try:
                    configurable = gin.get_configurable(name)
                except ValueError:
                    raise Refusal(self._unmatched(name)) from None
                registered[name] = f"{configurable.__module__}.{configurable.__qualname__}"

        def rename(name):
            return registered.get(name, name)

        self.macros = _renamed(self.macros, rename)
        self.bound = {(scope, rename(name)): _renamed(parameters, rename)
                      for (scope, name), parameters in self.bound.items()}
        for name in sorted(self.names() - set(parts.PARTS)):
            source = self._sources.get(name, "a gin file")
            try:
                known = parts.parameters_of(parts.find(name))
            except Refusal as error:
                raise Refusal(f"{source}: {error}") from error
            for (_, bound), parameters in self.bound.items():
                for parameter in parameters if bound == name and known is not None else ():
                    if parameter not in known:
                        raise Refusal(f"{source}: {name.rpartition('.')[2]} doesn't have a parameter named "
                                      f"{parameter!r}.{nearest(parameter, known)}")
        return self

    def bind_others(self) -> None:
        """Sets gin's global configuration for functions that read it, such as t5's."""
        if any(name not in parts.PARTS for _, name in self.bound):
            gin.clear_config()
            gin.parse_config(self.text())


def read(files: Sequence[str], bindings: Sequence[str] = (), search_paths: str = "") -> Gin:
    """Returns the contents of gin files with "NAME=VALUE" bindings, unchecked. Later files win.

    Comma-separated `search_paths` come before the shipped files.
    """
    contents, folders = Gin(), ["", *filter(None, search_paths.split(",")), str(shipped_gin.folder())]
    for file in files:
        contents.read_file(file, folders)
    return contents.bind(bindings)


def assignments(path: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns another package's assignments, {"scope/name.parameter": value}, and the names of its includes.

    Its own macros are replaced by their values.
    """
    values, macros, includes = {}, {}, []
    for statement in _statements(_content(path), path):
        if isinstance(statement, config_parser.IncludeStatement):
            includes.append(statement.filename)
        elif isinstance(statement, config_parser.BindingStatement):
            name = f"{statement.scope}{'/' * bool(statement.scope)}{statement.selector}"
            if statement.arg_name:
                values[f"{name}.{statement.arg_name}"] = statement.value
            else:
                macros[name] = statement.value

    uses = itertools.count()

    def follow(leaf, depth=0):
        if not isinstance(leaf, Macro) or leaf.name not in macros or depth == _LONGEST_CHAIN or next(uses) > _MOST_USES:
            return leaf
        return parts.mapped(macros[leaf.name], lambda inner: follow(inner, depth + 1))

    try:
        return {name: parts.mapped(value, follow) for name, value in values.items()}, includes
    except RecursionError:
        raise Refusal(f"{path} cannot be read: its brackets are nested too deeply.") from None


def _content(path):
    with reading(path):
        try:
            return places.content(places.at(path), _LARGEST_FILE)
        except ValueError as error:
            raise Refusal(f"{path} cannot be read as a gin file ({error}).") from None


def _statements(text, source):
    if isinstance(text, bytes) and text.startswith(codecs.BOM_UTF8):
        raise Refusal(f"{source} starts with a byte order mark; save it as UTF-8 without one.")
    try:
        text = text.decode() if isinstance(text, bytes) else text
        kinds = (token.type for token in tokenize.generate_tokens(io.StringIO(text).readline))
        kinds = itertools.takewhile(lambda kind: kind != tokenize.ERRORTOKEN, kinds)  # parsing would take hours
        kinds = list(itertools.islice(kinds, _MOST_TOKENS))
        if len(kinds) == _MOST_TOKENS:
            raise ValueError(f"it has more than {_MOST_TOKENS:,} words and signs")
        if any(kind == tokenize.STRING and len(list(run)) > _MOST_STRINGS for kind, run in itertools.groupby(kinds)):
            raise ValueError(f"it has more than {_MOST_STRINGS} strings in a row")
        return list(config_parser.ConfigParser(io.StringIO(text), _Values()))
    except SyntaxError as error:
        where = source if str(source).startswith("--gin.") else f"{source}, line {error.lineno},"
        reason = first_line(error.msg).partition("malformed node")[0].rstrip(".") or "this is no value"
        raise Refusal(f"{where} cannot be read: {reason}. Values are Python literals.") from error
    except tokenize.TokenError as error:
        raise Refusal(f"{source} cannot be read: {error.args[0]}; a bracket or a quote is not closed.") from error
    except (RecursionError, MemoryError):
        raise Refusal(f"{source} cannot be read: its brackets are nested too deeply.") from None
    except (ValueError, TypeError) as error:
        raise Refusal(f"{source} cannot be read: {first_line(error).rstrip('.')}.") from error


def _flat(value):
    return [leaf for leaf in parts.leaves(value) if isinstance(leaf, Reference | Macro)]


def _renamed(value, rename):
    return parts.mapped(value, lambda leaf: dataclasses.replace(leaf, name=rename(leaf.name))
                        if isinstance(leaf, Reference) else leaf)
