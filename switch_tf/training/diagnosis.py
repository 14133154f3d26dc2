"""Finds where a loss or gradient stopped being finite."""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from switch_tf import statuses
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.training.train_step import compute_gradients


class Divergence(Refusal):
    """A training step's loss or gradient was not finite; nothing was updated."""

    exit_status = statuses.DIVERGED


class _Found(BaseException):
    """Carries a layer's path out of the model. Not an Exception, because Keras rewrites their messages."""


def first_bad_tensor(model: keras.Model, features: dict[str, Any], seed: int, step: int, settings: StepSettings,
                     partitioner: Partitioner | None = None, objective: Objective | None = None) -> str:
    """Names the first tensor of a step that is not finite: weights, then activations in order, then gradients.

    Repeats the step without compilation, from the state before it, with the same seed and batch.

    Args:
        model: SwitchTransformer, built.
        features: dict of <int32>[batch, length].
        seed: int, the run's.
        step: int, the step that failed.
        settings: StepSettings.
        partitioner: Partitioner. Defaults to one device. If it splits the model, only weights are checked, because
            activations would have to be gathered one by one.
        objective: Objective, built. Defaults to `Objective()`.

    Returns:
        A phrase such as "the output of encoder/layers_1/mlp/router".
    """
    partitioner = partitioner or Partitioner()
    for variable, is_finite in zip(model.variables, partitioner.are_finite(model.variables), strict=True):
        if not is_finite:
            return f"the weight {_short(variable.path)}"
    if partitioner.layout.is_one_program:
        return ("none of the weights, and the layout has the rest in pieces, so go on from the last checkpoint on one "
                "device (gin/layouts/single.gin) to have the layer named")
    try:
        with _checked_outputs(model):
            gradients, _ = compute_gradients(model, features, seed, tf.constant(step, tf.int64), settings,
                                             objective=objective)
    except _Found as found:
        return f"the output of {found}"
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        if not _is_finite(gradient):
            return f"the gradient of {_short(variable.path)}"
    return "nothing when the step was repeated without compilation, so it lies in how the step is compiled"


@contextlib.contextmanager
def _checked_outputs(model):
    """Makes every layer check its floating-point outputs within this scope."""
    layers = model._flatten_layers(include_self=False)
    originals = [(layer, layer.call) for layer in layers]
    for layer, call in originals:
        object.__setattr__(layer, "call", _checked(layer, call))
    try:
        yield
    finally:
        for layer, _ in originals:
            object.__delattr__(layer, "call")


def _checked(layer, call):
    def checked_call(*args, **kwargs):
        outputs = call(*args, **kwargs)
        is_traced = not tf.executing_eagerly()  # to find the structure of its results; there are no values yet
        if not is_traced and not all(
                _is_finite(tensor) for tensor in tf.nest.flatten(outputs) if tensor is not None):
            raise _Found(_short(layer.path))
        return outputs

    return checked_call


def _is_finite(tensor) -> bool:
    tensor = tf.convert_to_tensor(tensor)
    return not tensor.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(tensor)))


def _short(path: str) -> str:
    """Returns a path without the model's name."""
    return path.partition("/")[2]
