"""Checks what the gin file of a run names, because a run folder may come from a stranger.

A gin file names modules to import and functions to call. Reading it does neither, so it is checked between.
"""

from switch_tf.checks import shown
from switch_tf.configs import parts
from switch_tf.configs.gin_syntax import Gin, Macro, Reference
from switch_tf.refusals import Refusal

_OF_KERAS_OBJECTS = {"class_name", "module", "registered_name"}  # Keras imports what such a dictionary names
_MODULES = {"keras", parts.TASKS, *parts.LIBRARIES, *(name.rpartition(".")[0] for name in parts.ALLOWED)}


def check(found: Gin, file: str) -> None:
    """Refuses what a gin file names that the package does not ship.

    Args:
        found: What the file says, unchecked, so nothing was imported.
        file: Path of the file, for the sentence.

    Raises:
        Refusal: The sentence has the module or the name, and the way out.
    """
    for module in found.imports:
        if module not in _MODULES and module.rpartition(".")[0] != parts.TASKS:
            _refuse(file, f"imports {module!r}")
    for _, reference in found.references():
        if isinstance(reference, Reference) and reference.name not in parts.ALLOWED:
            _refuse(file, f"refers to {repr(reference)!r}")
    for _, name in found.bound:
        if name not in parts.BOUND:
            _refuse(file, f"binds parameters of {name!r}")
    for value in (found.macros, *found.bound.values()):
        _check_keys(list(value.values()), file)


def _check_keys(value, file):
    match value:
        case dict():
            for key, entry in value.items():
                if isinstance(key, Macro) or not isinstance(key, str | int | float | None) or key in _OF_KERAS_OBJECTS:
                    _refuse(file, f"describes an object by the key {shown(key)}")
                _check_keys(entry, file)
        case list() | tuple():
            for entry in value:
                _check_keys(entry, file)


def _refuse(file, what):
    raise Refusal(f"{file} {what}, which switch_tf does not ship. A gin file is a program, so this one is not run: "
                  "read it, and add --trust if you trust whoever wrote it.")
