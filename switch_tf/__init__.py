"""Switch Transformers in TensorFlow and Keras 3.

`import switch_tf` loads no TensorFlow, Keras, seqio, t5 or matplotlib: `switch-tf --help` answers at once, and any
machine can read a configuration.
"""

import importlib
import pathlib
import sys

from switch_tf import environment
from switch_tf.installation import keras_registration

__version__ = "0.1.0"

# Public name -> module. Users register their own policies in "policies".
_MODULES = {"Experiment": "configs.experiment", "SwitchConfig": "configs.switch_config",
            "SwitchTransformer": "models.switch_transformer", "policies": "configs.policies"}

__all__ = [
    "Experiment",
    "SwitchConfig",
    "SwitchTransformer",
    "callbacks",
    "checkpoints",
    "configs",
    "conversion",
    "data",
    "environment",
    "evaluation",
    "inference",
    "layers",
    "losses",
    "metrics",
    "models",
    "ops",
    "optim",
    "partitioning",
    "policies",
    "reporting",
    "training",
]

try:
    environment.check_single_distributions()
except ImportError as error:
    if pathlib.Path(sys.argv[0]).name != "switch-tf":
        raise
    sys.exit(f"switch-tf: {error}")

keras_registration.register()


def __getattr__(name: str):
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
        return getattr(module, name) if name[0].isupper() else module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
