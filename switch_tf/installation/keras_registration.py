"""Registers this package's classes with Keras without importing their modules.

`keras.models.load_model` looks classes up by registered name. Registration normally happens when a module is imported,
but `import switch_tf` imports no layers, to stay fast. Placeholders are registered here instead, and import a class's
module when a saved model contains the class.
"""

import importlib
import importlib.util
import sys

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


def register() -> None:
    """Registers all classes with Keras, or arranges that importing Keras does."""
    if "keras" in sys.modules:
        _register(sys.modules["keras"])
    else:
        sys.meta_path.insert(0, _KerasFinder())


def _register(keras):
    registered = keras.saving.get_custom_objects()
    for name in CLASSES:
        registered.setdefault(f"switch_tf>{name}", _Placeholder(name))


class _KerasFinder:
    """Import hook that registers the classes after Keras has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register
        return spec
