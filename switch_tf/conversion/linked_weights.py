"""Weights of a model and the tensors of another format that rules link them to, read one tensor at a time."""

import pathlib
from collections.abc import Mapping

from switch_tf.configs import shipped_gin
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion.checkpoint_files import Tensor
from switch_tf.conversion.rules import Link, Rules
from switch_tf.conversion.weight_source import WeightSource, check_finite, variables_of, weights_of
from switch_tf.hardware import host
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress

GIN_FILE = "give the --gin_file of its model, or download it again if it is incomplete"


def links_of(config: SwitchConfig, rules: Rules) -> list[Link]:
    """Links each weight of a configuration's model to its names in the checkpoint, without initialising variables."""
    return rules.link({name: weight.shape for name, weight in weights_of(config).items()})


def open_linked(config: SwitchConfig, rules: Rules, tensors: Mapping[str, Tensor],
                folder: pathlib.Path, way_out: str = GIN_FILE) -> WeightSource:
    """Links a model to `tensors` and compares all names and shapes before any weight is read.

    Args:
        config: SwitchConfig of the model.
        rules: Rules of the format.
        tensors: Name -> tensor of the checkpoint. Weights are read in this order.
        folder: Path of the checkpoint, for messages.
        way_out: The user's choices if checkpoint and configuration differ, for messages.

    Raises:
        Refusal: a tensor is unknown, left over, missing or of another shape; later, a weight is not finite.
    """
    weights = weights_of(config)
    links = rules.link({name: weight.shape for name, weight in weights.items()})
    rules.check(links, {name: tensor.shape for name, tensor in tensors.items()}, way_out)
    places = {name: place for place, name in enumerate(tensors)}
    # In the order of the files, so that an array of scanned layers is read once.
    links = {link.ours: link for link in sorted(links, key=lambda link: places[link.theirs[0]])}

    def read(name, rows):
        link = links[name]
        values = link.to_ours(lambda tensor, index: tensors[tensor].read(index), rows)
        check_finite(values, link.theirs[0], folder)
        return values

    return WeightSource(config, {name: weights[name] for name in links}, read)


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


def read_model(source: WeightSource) -> SwitchTransformer:
    """Builds a model and reads its weights, with a progress bar if that takes more than some seconds.

    Raises:
        Refusal: this machine has too little memory, or a weight cannot be read.
    """
    check_memory(source.config)
    model = SwitchTransformer(source.config)
    model.build()
    variables = variables_of(model)
    with progress.bar(4 * source.config.num_parameters, "reading") as bar:
        for name in source.weights:
            values = source.read(name, slice(None))
            variables[name].assign(values)
            bar.update(4 * values.size)
    return model
