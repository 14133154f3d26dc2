"""Finds where a loss or gradient stopped being finite."""

import contextlib

import tensorflow as tf

from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.training.train_step import compute_gradients


class Divergence(Refusal):
    """A training step's loss or gradient was not finite; nothing was updated."""


class _Found(BaseException):
    """Carries a layer's path out of the model. Not an Exception: Keras rewrites the message of those."""


def first_bad_tensor(model, features, seed, step, settings, partitioner=None) -> str:
    """Names the first tensor of a step that is not finite: weights, then activations in order, then gradients.

    Runs the step again without compilation, on the state before it: same seed, same batch.

    Args:
        features: dict of <int32>[batch, length].
        step: int, the step that failed.
        partitioner: Partitioner, by default of one device. Where the model lies in pieces only its weights are looked
            at: activations would have to be gathered one by one.

    Returns:
        A phrase such as "the output of encoder/layers_1/mlp/router".
    """
    partitioner = partitioner or Partitioner()
    for variable in model.variables:
        if not partitioner.is_finite(variable):
            return f"the weight {_short(variable.path)}"
    if partitioner.layout.is_one_program:
        return ("none of the weights, and the layout has the rest in pieces, so go on from the last checkpoint on one "
                "device (gin/layouts/single.gin) to have the layer named")
    try:
        with _checked_outputs(model):
            gradients, _ = compute_gradients(model, features, seed, tf.constant(step, tf.int64), settings)
    except _Found as found:
        return f"the output of {found}"
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        if not _is_finite(gradient):
            return f"the gradient of {_short(variable.path)}"
    return "nothing when the step was repeated without compilation, so it lies in how the step is compiled"


@contextlib.contextmanager
def _checked_outputs(model):
    """Within this scope every layer checks its floating point outputs."""
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
        is_traced = not tf.executing_eagerly()  # for the form of its results: there are no numbers to look at
        if not is_traced and not all(
                _is_finite(tensor) for tensor in tf.nest.flatten(outputs) if tensor is not None):
            raise _Found(_short(layer.path))
        return outputs

    return checked_call


def _is_finite(tensor) -> bool:
    tensor = tf.convert_to_tensor(tensor)
    return not tensor.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(tensor)))


def _short(path: str) -> str:
    """A path without the model's name."""
    return path.partition("/")[2]
