"""Resolves the names of the parts of a run in gin files to the places in `configs.part_names`.

Shipped gin files name `configs.factories`. Users' files and the configurations of older runs name the classes
themselves, by the modules that define them or once did. Both lead to the same place, so a parameter has one value
however it is named, and parsing imports neither TensorFlow nor Keras.
"""

import importlib
from typing import Any

from gin import config as gin_config
from gin import config_parser

from switch_tf.configs.choices import nearest
from switch_tf.configs.part_names import PARTS, PLACES


def _holds_parts(module):
    return any(name.startswith(f"{module}.") for name in PARTS)


class Module:
    """A module or package as gin files see it: it has the parts of PARTS; anything else is imported when asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        name = f"{self._name}.{attribute}"
        if name in PARTS:
            module, _, attribute = PARTS[name].rpartition(".")
            return getattr(importlib.import_module(module), attribute)
        if _holds_parts(name):
            return Module(name)
        if nearest(attribute, dir(self)):  # a typo, for which nothing has to be imported
            raise AttributeError(attribute)
        try:
            return getattr(importlib.import_module(self._name), attribute)
        except ModuleNotFoundError:  # a module of an earlier version
            raise AttributeError(attribute) from None

    def __dir__(self) -> list[str]:
        return [name.rpartition(".")[2] for name in PARTS if name.rpartition(".")[0] == self._name]

    def __repr__(self) -> str:
        return f"<module {self._name!r}>"


class _ParseContext(gin_config.ParseContext):
    """gin's context of one file, in which the modules of PARTS are not imported."""

    def process_import(self, statement: config_parser.ImportStatement) -> None:
        name = statement.bound_name()
        module = statement.module if statement.is_from or statement.alias else name
        if name == "gin" or not _holds_parts(module):
            super().process_import(statement)
            return
        if not _holds_parts(statement.module):  # such as `import switch_tf.tasks`
            importlib.import_module(statement.module)
        if self._dynamic_registration:
            self._symbol_table[name] = Module(module)
            self._symbol_source[name] = statement
        self._imports.append(statement)

    def _register(self, attr_names, attr_values):
        part = attr_values[-1]
        if f"{getattr(part, '__module__', '')}.{getattr(part, '__qualname__', '')}" not in PLACES:
            return super()._register(attr_names, attr_values)
        # By its place, whatever a file names it, and so it is written into the configuration of the run.
        location = config_parser.Location(None, 0, None, "")
        statement = config_parser.ImportStatement(part.__module__, is_from=True, alias=None, location=location)
        gin_config._make_configurable(part, part.__name__, part.__module__, avoid_class_mutation=True,
                                      import_source=(statement, part.__name__))
        return gin_config._INVERSE_REGISTRY[part]

    def get_configurable(self, selector: str):
        """Returns what a selector names; the command line may give the end of any name."""
        found = super().get_configurable(selector)
        if found is None and not self._dynamic_registration:
            places = {place for name, place in PARTS.items() if name.endswith(f".{selector}")}
            found = gin_config._REGISTRY.get_match(places.pop()) if len(places) == 1 else None
        return found


gin_config.ParseContext = _ParseContext  # gin makes one for each file that it parses
