"""Weights of a model and the tensors of another format that rules link them to, read one tensor at a time."""

import pathlib
import sys
from collections.abc import Callable, Mapping

import keras
import numpy as np
from tqdm import tqdm

from switch_tf.configs import shipped_gin
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion.checkpoint_files import Tensor
from switch_tf.conversion.rules import Link, Rules
from switch_tf.hardware import host
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal

_QUIET_SECONDS = 5  # before a progress bar appears
_REFRESH_SECONDS, _LINE_SECONDS = 0.5, 20  # between its updates, on a terminal and in a file


def variables_of(model: SwitchTransformer) -> dict[str, keras.Variable]:
    """Returns the weights of a model by their paths within it, such as `encoder/layers_0/attention/query`."""
    return {variable.path.removeprefix(f"{model.name}/"): variable for variable in model.weights}


def links_of(config: SwitchConfig, rules: Rules) -> list[Link]:
    """Links each weight of a configuration's model to its names in the checkpoint, without initialising variables."""
    with keras.StatelessScope(initialize_variables=False):
        model = SwitchTransformer(config)
        model.build()
        shapes = {name: tuple(variable.shape) for name, variable in variables_of(model).items()}
    return rules.link(shapes)


def checked_links(config: SwitchConfig, rules: Rules, tensors: Mapping[str, Tensor]) -> list[Link]:
    """Links a model to `tensors` and compares all names and shapes before the model takes any memory.

    Raises:
        Refusal: a tensor is unknown, left over, missing or of another shape, or this machine has too little memory.
    """
    links = links_of(config, rules)
    rules.check(links, {name: tensor.shape for name, tensor in tensors.items()})
    check_memory(config)
    return links


def without_config(kind: str, folder: pathlib.Path, tensors: Mapping[str, Tensor]) -> Refusal:
    """Returns the Refusal to read a checkpoint without a configuration, with the presets of its size.

    Args:
        kind: Name of the software that wrote it.
        folder: Path of the checkpoint.
        tensors: Its weights.
    """
    num_parameters = sum(tensor.size for tensor in tensors.values())
    alike = [name for name in shipped_gin.preset_names()
             if SwitchConfig.from_preset(name).num_parameters == num_parameters]
    verb = "has" if len(alike) == 1 else "have"
    hint = f"; {' and '.join(f'gin/models/{name}.gin' for name in alike)} {verb} as many parameters" if alike else ""
    return Refusal(f"A {kind} checkpoint does not describe its model, so {folder} of {num_parameters:,} parameters "
                   f"needs a configuration: give --gin_file=gin/models/NAME.gin, or a SwitchConfig in Python{hint}.")


def check_memory(config: SwitchConfig) -> None:
    """Raises Refusal if this machine has too little memory for the float32 weights of a model."""
    num_bytes = 4 * config.num_parameters
    memory = host.memory("MemTotal") + host.memory("SwapTotal")
    if num_bytes > memory:
        raise Refusal(f"This model needs {num_bytes / 1e9:,.1f} GB for its float32 weights, and this machine has "
                      f"{memory / 1e9:,.1f} GB of memory; read it on a larger one.")


def progress_of_reading(num_bytes: int) -> tqdm:
    """Returns a progress bar for so many bytes, which appears after some seconds."""
    return tqdm(total=num_bytes, desc="reading", unit="B", unit_scale=True, file=sys.stderr, delay=_QUIET_SECONDS,
                dynamic_ncols=True, mininterval=_REFRESH_SECONDS if sys.stderr.isatty() else _LINE_SECONDS)


def read_model(config: SwitchConfig, links: list[Link], read: Callable[[str], np.ndarray],
               folder: pathlib.Path) -> SwitchTransformer:
    """Builds a model and reads its weights, with a progress bar if that takes more than some seconds.

    Args:
        config: SwitchConfig.
        links: Link of each weight, in the order of reading.
        read: function(name of a tensor) -> <float32> values.
        folder: Path of the checkpoint, for messages.

    Raises:
        Refusal: a weight is not finite.
    """
    model = SwitchTransformer(config)
    model.build()
    variables = variables_of(model)
    with progress_of_reading(4 * config.num_parameters) as progress:
        for link in links:
            weight = link.to_ours(read)
            if not np.isfinite(weight).all():
                raise Refusal(f"{link.theirs[0]!r} in {folder} is not finite, and so would be all that the model "
                              "computes; read a checkpoint from before its training went wrong.")
            variables[link.ours].assign(weight)
            progress.update(4 * weight.size)
    return model
