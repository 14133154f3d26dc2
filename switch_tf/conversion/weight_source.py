"""Weights that are read a few rows at a time, from a checkpoint of any format or from a model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning import axes_of
from switch_tf.refusals import Refusal


class Weight(NamedTuple):
    """A weight without its values. It has the attributes by which a checkpoint describes a Keras variable."""

    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str | None, ...]
    value: None = None


class WeightSource(NamedTuple):
    """Weights of a model.

    Args:
        config: Configuration of the model.
        weights: Name of each weight, such as `encoder/layers_0/attention/query`, in the order of reading.
        read: function(name, slice of the first dimension) -> values.
    """

    config: SwitchConfig
    weights: Mapping[str, Weight]
    read: Callable[[str, slice], np.ndarray]


def variables_of(model: SwitchTransformer) -> dict[str, keras.Variable]:
    """Returns the weights of a model by their paths within it, such as `encoder/layers_0/attention/query`."""
    return {variable.path.removeprefix(f"{model.name}/"): variable for variable in model.weights}


def weights_of(config: SwitchConfig) -> dict[str, Weight]:
    """Returns the weights of a configuration's model, without initialising variables."""
    with keras.StatelessScope(initialize_variables=False):
        model = SwitchTransformer(config)
        model.build()
        return _described(model)


def of_model(model: SwitchTransformer) -> WeightSource:
    """Returns the weights of a built model."""
    variables = variables_of(model)
    return WeightSource(model.config, _described(model), lambda name, rows: variables[name].numpy()[rows])


def _described(model):
    return {name: Weight(tuple(variable.shape), variable.dtype, axes_of(variable))
            for name, variable in variables_of(model).items()}


def check_finite(values: np.ndarray, name: str, folder: Any) -> None:
    """Raises Refusal if values are not finite. `name` is that of their tensor in `folder`."""
    if not np.isfinite(values).all():
        raise Refusal(f"{name!r} in {folder} is not finite, and so would be all that the model computes; read a "
                      "checkpoint from before its training went wrong.")
