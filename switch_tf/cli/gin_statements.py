"""What gin files say, read without importing what they name: that takes seconds, and mistakes can be told before."""

import dataclasses
import io
import os
from typing import Any, NamedTuple

from gin import config as gin_config
from gin import config_parser


class Reference(NamedTuple):
    """`@name`, or `@name()` if it `is_made`: something that has to be imported; `name` may begin with "scope/"."""

    name: str
    is_made: bool = True

    def __repr__(self):
        return f"@{self.name}{'()' * self.is_made}"


class Macro(NamedTuple):
    """`%NAME`."""

    name: str

    def __repr__(self):
        return f"%{self.name}"


class Unknown(Exception):
    """A value that only the things that gin files name can tell."""


class _Values(config_parser.ParserDelegate):
    def __init__(self, whole):
        self._whole = whole

    def configurable_reference(self, scoped_configurable_name, evaluate):
        scope, slash, name = scoped_configurable_name.rpartition("/")
        return Reference(f"{scope}{slash}{self._whole(name)}", evaluate)

    def macro(self, macro_name):
        return Macro(macro_name)


@dataclasses.dataclass
class Statements:
    """What remains of all statements, the last of each name.

    `macros`: name -> value; `parameters`: (scope, name of what it belongs to, its own name) -> value; `named`: whatever
    files name, by module where they import it; `modules`: what they import; `unknown`: what the command line names and
    no file does. Values are Python's, References and Macros.
    """

    macros: dict[str, Any] = dataclasses.field(default_factory=dict)
    parameters: dict[tuple[str, str, str], Any] = dataclasses.field(default_factory=dict)
    named: set[str] = dataclasses.field(default_factory=set)
    modules: set[str] = dataclasses.field(default_factory=set)
    unknown: list[str] = dataclasses.field(default_factory=list)
    referenced: set[str] = dataclasses.field(default_factory=set)  # macros, also by statements that others replaced
    _open: list[str] = dataclasses.field(default_factory=list)  # files that include the one that is read

    def add_file(self, file: str) -> None:
        """Adds a file, found as gin finds it, and those that it includes.

        Raises:
            SyntaxError: what cannot be read.
            ValueError: an included file that is not there, or that includes itself.
        """
        if file in self._open:
            raise ValueError(f"{' includes '.join([*self._open, file])}, without an end")
        paths = [os.path.join(prefix, file) for prefix in gin_config._LOCATION_PREFIXES]
        found = next(filter(os.path.isfile, paths), None)
        if found is None:
            raise ValueError(f"it includes {file!r}, which is neither here nor among the shipped files")
        self._open.append(file)
        with open(found) as source:
            self.named |= self._add(source)
        self._open.pop()

    def add_binding(self, binding: str) -> None:
        """Adds "NAME=VALUE" of the command line, where the end of a name is enough."""
        named = self._add(io.StringIO(binding))
        self.unknown += sorted(name for name in named if name not in self.named)

    def _add(self, source):
        """Adds what a file or a binding says; returns what it names."""
        modules, named = {}, set()

        def whole(name):
            return self._whole(_with_module(name, modules))

        for statement in config_parser.ConfigParser(source, _Values(whole)):
            match statement:
                case config_parser.IncludeStatement():
                    self.add_file(statement.filename)
                case config_parser.ImportStatement():
                    is_whole = statement.is_from or statement.alias
                    modules[statement.bound_name()] = statement.module if is_whole else statement.bound_name()
                    self.modules |= {statement.module, modules[statement.bound_name()]}
                case config_parser.BlockDeclaration():
                    named.add(_with_module(statement.selector, modules))
                case config_parser.BindingStatement(arg_name=None | ""):
                    self.macros["/".join(filter(None, (statement.scope, statement.selector)))] = statement.value
                case config_parser.BindingStatement():
                    name = whole(statement.selector)
                    named.add(name)
                    self.parameters[statement.scope or "", name, statement.arg_name] = statement.value
            for reference in _found(Reference, getattr(statement, "value", None)):
                named.add(reference.name.rpartition("/")[2])
            self.referenced |= {macro.name for macro in _found(Macro, getattr(statement, "value", None))}
        return named

    def _whole(self, name):
        """The name that was given before and ends with this one."""
        return next((known for known in self.named if known.endswith(f".{name}")), name)

    def used_macros(self) -> set[str]:
        """Macros that some value refers to."""
        values = (*self.macros.values(), *self.parameters.values())
        return {macro.name for value in values for macro in _found(Macro, value)}

    def endless(self) -> tuple[str, Any] | None:
        """A statement that its own value leads back to: what it binds, and the value; None where there is none."""
        done = set()
        starts = [(("", name), value) for name, value in self.macros.items()]
        starts += [((key[0], _bound(key)), value) for key, value in self.parameters.items()]
        return next(filter(None, (self._back(place, value, (place,), done) for place, value in starts)), None)

    def _back(self, place, value, path, done):
        """From (scope, what is bound) along what the value is filled in with; what is `done` leads nowhere back."""
        for used in _found((Macro, Reference), value):
            for following, inner in self._filled_in(used, place[0]):
                if following in path:
                    return place[1], value
                if following not in done and (found := self._back(following, inner, (*path, following), done)):
                    return found
        done.add(place)
        return None

    def _filled_in(self, used, scope):
        """Statements, each in the scope in which gin reads it, that make up a macro or what a reference makes."""
        if isinstance(used, Macro):
            return [((scope, used.name), self.macros[used.name])] if used.name in self.macros else []
        within, _, name = used.name.rpartition("/")
        scope = within or scope
        inmost = {}
        for key in sorted(self.parameters, key=lambda key: len(key[0])):
            if used.is_made and key[1] == name and (not key[0] or f"{scope}/".startswith(f"{key[0]}/")):
                inmost[key[2]] = key
        return [((scope, _bound(key)), self.parameters[key]) for key in inmost.values()]

    def arguments_of(self, described: type) -> dict | None:
        """What is bound of a class of this package, None where nothing is.

        Raises:
            Unknown: a value has to be computed by something that is not imported.
        """
        found = {parameter: self.value(value) for (scope, name, parameter), value in self.parameters.items()
                 if not scope and name.startswith("switch_tf.") and name.endswith(f".{described.__name__}")}
        return found or None

    def value(self, value):
        """A value with its macros filled in; raises Unknown."""
        match value:
            case Macro():
                if value.name not in self.macros:
                    raise Unknown
                return self.value(self.macros[value.name])
            case Reference():
                raise Unknown
            case dict():
                return {self.value(key): self.value(entry) for key, entry in value.items()}
            case list() | tuple():
                return type(value)(self.value(entry) for entry in value)
        return value


def _bound(key):
    """A key of `parameters` as a statement writes it."""
    scope, name, parameter = key
    return f"{scope}/{name}.{parameter}" if scope else f"{name}.{parameter}"


def _with_module(selector, modules):
    first, dot, rest = selector.partition(".")
    return f"{modules.get(first, first)}{dot}{rest}"


def _found(kind, value):
    """What a value holds of a kind, or of several: Macros, References."""
    match value:
        case Macro() | Reference():
            if isinstance(value, kind):
                yield value
        case dict():
            for entry in (*value.keys(), *value.values()):
                yield from _found(kind, entry)
        case list() | tuple():
            for entry in value:
                yield from _found(kind, entry)
