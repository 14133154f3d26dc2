"""The origin of a run's configuration: the command, the time and the versions."""

import datetime
import shlex
from collections.abc import Sequence

import keras
import tensorflow as tf

import switch_tf
from switch_tf.configs.switch_config import SwitchConfig


def comments(words: Sequence[str], config: SwitchConfig) -> str:
    """Returns the comments at the head of a run's configuration.

    Args:
        words: Arguments of `switch-tf`.
        config: Configuration of the model.
    """
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return (f"# {shlex.join(['switch-tf', *words])}\n"
            f"# {now}, switch_tf {switch_tf.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
            f"# {config.num_parameters:,} parameters\n\n")
