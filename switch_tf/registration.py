"""Keras finds the classes of a saved model that is ours, although nobody has imported them.

`keras.models.load_model` looks classes up by name among those that are registered, which happens when their modules are
imported; `import switch_tf` imports none, to stay fast. So names are registered here, and their modules imported when a
saved model asks for them.
"""

import importlib
import importlib.util
import sys

# Every class that is registered with Keras, by the module that does it.
CLASSES = {
    "Adafactor": "optim.adafactor", "Cooldown": "optim.schedules", "Dropout": "layers.dropout",
    "ExpertFeedForward": "layers.experts", "FeedForward": "layers.feed_forward", "LogitsDense": "layers.embedding",
    "MultiHeadAttention": "layers.attention", "RMSNorm": "layers.normalization",
    "RelativePositionBias": "layers.position_bias", "Router": "layers.routing", "RsqrtDecay": "optim.schedules",
    "SwitchFeedForward": "layers.moe", "SwitchSelfAttention": "layers.switch_attention",
    "SwitchTransformer": "models.switch_transformer", "TokenEmbedding": "layers.embedding"}  # fmt: skip


class _NotImportedYet:
    """Stands for a class until a saved model has one; its module then registers the class itself."""

    def __init__(self, name):
        self._name = name

    def from_config(self, config):
        module = importlib.import_module(f"switch_tf.{CLASSES[self._name]}")
        return getattr(module, self._name).from_config(config)


def register() -> None:
    """Registers every class with Keras, now, or as soon as it is imported."""
    if "keras" in sys.modules:
        _register(sys.modules["keras"])
    else:
        sys.meta_path.insert(0, _WhenKerasIsImported())


def _register(keras):
    registered = keras.saving.get_custom_objects()
    for name in CLASSES:
        registered.setdefault(f"switch_tf>{name}", _NotImportedYet(name))


class _WhenKerasIsImported:
    """Finds Keras as Python would, and registers after it has run."""

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
