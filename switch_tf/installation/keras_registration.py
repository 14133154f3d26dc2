"""Registers this package's classes with Keras without importing their modules.

`keras.models.load_model` looks classes up by registered name. Registration normally happens when a module is imported,
but `import switch_tf` imports no layers, to stay fast. Placeholders are registered here instead, and import a class's
module when a saved model contains the class.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Module of every class registered with Keras.
CLASSES = {
    "Adafactor": "optim.adafactor", "Cooldown": "optim.schedules", "Dropout": "layers.basic",
    "ExpertFeedForward": "layers.feed_forward", "FeedForward": "layers.feed_forward", "LogitsDense": "layers.basic",
    "MultiHeadAttention": "layers.attention", "RMSNorm": "layers.basic",
    "RelativePositionBias": "layers.attention", "Router": "layers.routing", "RsqrtDecay": "optim.schedules",
    "SwitchFeedForward": "layers.moe", "SwitchSelfAttention": "layers.attention",
    "SwitchTransformer": "models.switch_transformer", "TokenEmbedding": "layers.basic"}  # fmt: skip


class _Placeholder:
    """Stands for a class until a saved model contains it. Importing its module then registers the class."""

    def __init__(self, name):
        self._name = name

    def from_config(self, config):
        module = importlib.import_module(f"switch_tf.{CLASSES[self._name]}")
        return getattr(module, self._name).from_config(config)


class ImportHook:
    """Import hook that has a function execute a module.

    Args:
        name: Name of the module. It is not imported yet.
        execute: Function of the module and of the function that executes it.
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
            sys.meta_path.insert(0, self)  # a caller may only look whether it is there
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_otherwise(module):
                sys.meta_path.remove(self)
                self._execute(module, execute)

            spec.loader.exec_module = execute_otherwise  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Registers all classes with Keras, or arranges that importing Keras does."""
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
