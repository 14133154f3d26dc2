"""Registers this package's classes with Keras without importing their modules.

`keras.models.load_model` looks classes up by registered name. Placeholders import a class's module when a saved model
contains it.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Module of each registered class.
CLASSES = {
    "Adafactor": "optim.adafactor", "Cooldown": "optim.schedules", "Dropout": "layers.basic",
    "ExpertFeedForward": "layers.feed_forward", "FeedForward": "layers.feed_forward", "LogitsDense": "layers.basic",
    "MultiHeadAttention": "layers.attention", "RMSNorm": "layers.basic",
    "RelativePositionBias": "layers.attention", "Router": "layers.routing", "RsqrtDecay": "optim.schedules",
    "SwitchFeedForward": "layers.moe", "SwitchSelfAttention": "layers.attention",
    "SwitchTransformer": "models.switch_transformer", "TokenEmbedding": "layers.basic"}  # fmt: skip


class _Placeholder:
    def __init__(self, name):
        self._name = name

    def from_config(self, config):
        module = importlib.import_module(f"switch_tf.{CLASSES[self._name]}")
        return getattr(module, self._name).from_config(config)


class ImportHook:
    """Import hook that lets a function execute a module.

    Args:
        name: Name of a module, not imported yet.
        execute: Gets the module and its usual execution function.
    """

    def __init__(self, name: str, execute: Callable[[ModuleType, Callable], None]):
        self.name, self._execute = name, execute
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds the module as Python does."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # a caller may only check that it exists
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_otherwise(module):
                sys.meta_path.remove(self)
                self._execute(module, execute)

            spec.loader.exec_module = execute_otherwise  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Registers all classes with Keras, now or when Keras is imported."""
    if "keras" in sys.modules:
        _register(sys.modules["keras"])
    else:
        ImportHook("keras", _register)


def _register(keras, execute=None):
    if execute is not None:
        execute(keras)
    registered = keras.saving.get_custom_objects()
    for name in CLASSES:
        registered.setdefault(f"switch_tf>{name}", _Placeholder(name))
