"""Checks of macros that gin leaves to its caller: without a value, used by nothing, or standing for themselves."""

import copy
import re
from collections.abc import Sequence
from typing import Any

from gin import config as gin_config

from switch_tf.configs import part_names
from switch_tf.configs.choices import nearest
from switch_tf.refusals import Refusal

_MACRO, _CONSTANT = "gin.macro", "gin.constant"
# What to add when a run lacks a macro that a whole kind of file provides.
_PROVIDERS = {"MIXTURE_OR_TASK_NAME": "a task file: --gin_file=gin/tasks/docs_corpus.gin",
              "TASK_FEATURE_LENGTHS": "a task file: --gin_file=gin/tasks/docs_corpus.gin",
              "NUM_EXPERTS": "a model file: --gin_file=gin/models/switch_tiny.gin"}
# Parts that nothing but a reference or one of the two at the end calls. A user's function may be called by any code.
_CALLED_BY_GIN = {*part_names.PARTS.values(), "switch_tf.tasks.text_files.pretraining",
                  "switch_tf.tasks.text_files.text_to_text"}
_STARTS = {part_names.TRAINER, part_names.PARTS["switch_tf.partitioning.create_partitioner"]}


def values() -> dict:
    """Returns the values of all macros that gin has parsed, references as they are."""
    return {name: parameters["value"] for (name, selector), parameters in gin_config._CONFIG.items()
            if selector == _MACRO and "value" in parameters}


def made(name: str) -> Any:
    """Returns the value of a macro, with what it refers to made; None for a macro without a value."""
    return copy.deepcopy(values().get(name))


def required() -> list[str]:
    """Returns the names of the macros that a user has to give a value and did not."""
    return [name for name, value in values().items()
            if isinstance(value, gin_config.ConfigurableReference) and value.config_key[1] == _CONSTANT
            and value.config_key[0].endswith("REQUIRED")]


def check(texts: list[str]) -> None:
    """Refuses macros of a whole run that have no value, that nothing uses, or that stand for themselves.

    Args:
        texts: The gin files and bindings, in which a macro counts as used even if a later statement replaces the use.

    Raises:
        Refusal: It names the macro and the nearest that is used.
    """
    defined = values()
    used = {reference.config_key[0] for _, reference in _references() if reference.config_key[1] == _MACRO}
    for name in sorted(used - defined.keys()):
        provider = _PROVIDERS.get(name, f"it: --gin.{name}=VALUE")
        raise Refusal(f"{name} has no value; add {provider}.")
    mentioned = used.union(*(re.findall(r"%([\w/.]+)", text) for text in texts))
    for name in sorted(defined.keys() - mentioned):
        raise Refusal(f"{name} is set but nothing uses it.{nearest(name, used)}")
    check_required()
    check_endless()


def check_required() -> None:
    """Refuses a macro that a user has to give a value and did not."""
    for name in required():
        raise Refusal(f"{name} has no value; set it, for example --gin.{name}=\"'runs/x'\".")


def check_endless() -> None:
    """Refuses a macro that leads back to itself."""
    defined = values()

    def follow(name, path):
        if name in path:
            raise Refusal(f"{name} stands for itself: {name} = {defined[name]}.")
        for reference in _flat(defined.get(name)):
            if reference.config_key[1] == _MACRO:
                follow(reference.config_key[0], (*path, name))

    for name in defined:
        follow(name, ())


def check_read(bindings: Sequence[str]) -> None:
    """Refuses a macro of the command line that no part of the run reads.

    A part of this package is read if the trainer leads to it, any other function if a parameter of it is bound: gin
    does not see who calls a user's metric.

    Args:
        bindings: "NAME=VALUE" of the command line.

    Raises:
        Refusal: It names the macro.
    """
    uses = {}
    for key, reference in _references():
        uses.setdefault(_node(key), []).append(_node(reference.config_key))
    waiting, read = [node for node in uses if node in _STARTS or node not in _CALLED_BY_GIN and node[0] != "%"], set()
    while waiting:
        node = waiting.pop()
        if node not in read:
            read.add(node)
            waiting += uses.get(node, ())
    for name in (binding.partition("=")[0].strip() for binding in bindings):
        if "." not in name and f"%{name}" not in read:
            raise Refusal(f"{name} is set, but no part of this run reads it; leave it out, or refer to %{name} in a "
                          "gin file, as in: keras.optimizers.AdamW.learning_rate = %LEARNING_RATE.")


def _node(key):
    """A macro by its name, anything else by its selector, whatever its scope."""
    scope, selector = key
    return f"%{scope}" if selector == _MACRO else selector


def _references():
    """Yields (key of what is bound, reference) for all references in all values."""
    for key, parameters in gin_config._CONFIG.items():
        for reference in _flat(list(parameters.values())):
            yield key, reference


def _flat(value):
    match value:
        case gin_config.ConfigurableReference():
            yield value
        case dict():
            yield from _flat([*value.keys(), *value.values()])
        case list() | tuple():
            for entry in value:
                yield from _flat(entry)
