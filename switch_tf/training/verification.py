"""Whether a layout computes what one device computes: the loss, every gradient, every weight, on the same batches."""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from switch_tf.partitioning import axes_of, with_axes
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training.objective import total_loss
from switch_tf.training.train_step import compile_steps

# Relative differences that the order of float32 sums explains, in the first step and after all of them.
LOSS, GRADIENT, LATER = 1e-6, 1e-5, 1e-4


class Difference(NamedTuple):
    """The largest difference found, and the tensor (a variable's path, a step) it was found in."""

    value: float
    where: str


class Verification(NamedTuple):
    """What was compared.

    `loss`, `later_loss`: relative difference of the loss, of the first step and the largest of all.
    `gradient`: over variables, of the first step, as the optimizer is given it: max |a - b| / max |a|.
    `far_entries`: of that variable's gradient, the share of entries that differ by more than GRADIENT of its largest.
        Where it is tiny, a hidden unit sits at the edge of its ReLU.
    `weight`: over weights after the last step: root mean square of a - b over that of a. Not their largest elements:
        where a hidden unit sits at the edge of its ReLU, the order of a sum decides, and optimizers that divide by a
        gradient's size then move its few weights by whole steps.
    `losses`: the pairs of losses (one device, layout), step by step.
    """

    loss: Difference
    later_loss: Difference
    gradient: Difference
    far_entries: float
    weight: Difference
    losses: list[tuple[float, float]]

    @property
    def is_equal(self) -> bool:
        """Whether the order of float32 sums explains every difference."""
        return (self.loss.value <= LOSS and self.gradient.value <= GRADIENT
                and max(self.later_loss.value, self.weight.value) <= LATER)


class Outcome(NamedTuple):
    """What a few steps came to: the loss of each, the gradients of the first, the weights after the last, and whose."""

    losses: list[float]
    gradients: list[np.ndarray]
    weights: list[np.ndarray]
    paths: list[str]


def verify(make_model, make_optimizer, partitioner, batches, seed, settings, say=lambda text: None) -> Verification:
    """Trains twin models from the same weights, one on one device and one under a partitioner; arguments as `train`."""
    twins = [train(make_model, make_optimizer, side, batches, seed, settings, say)
             for side in (Partitioner(), partitioner)]
    return compare(*twins)


def train(make_model, make_optimizer, partitioner, batches, seed, settings, say=lambda text: None) -> Outcome:
    """Takes a step with each batch.

    Args:
        make_model: function without arguments to a SwitchTransformer that is not built.
        make_optimizer: function without arguments to a Keras optimizer.
        partitioner: Partitioner.
        batches: list of dicts of <int32>[batch, length], one for each step.
        seed: int, of initial weights, dropout and jitter.
        settings: StepSettings with steps_per_call 1.
        say: function of a line of text, told what is being done.
    """
    devices = f"{partitioner.layout.num_devices} device{'s' * (partitioner.layout.num_devices > 1)}"
    say(f"Building the model on {devices} ...")
    twin = _Twin(make_model, make_optimizer, partitioner, seed, settings)
    losses, gradients = [], None
    for index, features in enumerate(batches):
        losses.append(twin.step(features))
        gradients = gradients or twin.gradients()
        say(f"step {index + 1}/{len(batches)} on {devices}: loss {losses[-1]:.7f}")
    return Outcome(losses, gradients, twin.weights(), twin.paths())


def compare(one: Outcome, other: Outcome) -> Verification:
    """The largest differences between one device's outcome and another one's."""
    losses = list(zip(one.losses, other.losses, strict=True))
    by_step = [Difference(abs(mine - theirs) / abs(mine), f"step {step + 1}")
               for step, (mine, theirs) in enumerate(losses)]
    later = max(by_step, key=lambda difference: difference.value)
    gradient = _largest(np.max, one.paths, one.gradients, other.gradients)
    weight = _largest(_root_mean_square, one.paths, one.weights, other.weights)
    place = one.paths.index(gradient.where)
    mine, theirs = one.gradients[place], other.gradients[place]
    far_entries = float(np.mean(np.abs(mine - theirs) > GRADIENT * np.max(np.abs(mine))))
    return Verification(by_step[0], later, gradient, far_entries, weight, losses)


class _Twin:
    def __init__(self, make_model, make_optimizer, partitioner, seed, settings):
        keras.utils.set_random_seed(seed)
        self.model, self.optimizer = make_model(), make_optimizer()
        self.partitioner = partitioner
        partitioner.build(self.model, self.optimizer)
        self._recorded, self._placed = [], None
        self._record_gradients()
        self._step = compile_steps(self.model, self.optimizer, seed, settings, partitioner)
        self._variables = partitioner.compile(partitioner.results(lambda _: [
            [tf.convert_to_tensor(variable.value) for variable in variables]
            for variables in (self.model.trainable_variables, self._recorded)]))

    def _record_gradients(self):
        """Has the optimizer keep the gradients that it is given: computing them apart would compile all of it twice."""
        with self.partitioner.creates_variables():
            for variable in self.model.trainable_variables:
                self._recorded.append(with_axes(
                    axes_of(variable), keras.Variable, np.zeros(variable.shape, "float32"), trainable=False,
                    aggregation="only_first_replica"))
        apply = self.optimizer.apply

        def record_and_apply(gradients, variables):
            for recorded, gradient in zip(self._recorded, gradients, strict=True):
                recorded.assign(gradient)
            apply(gradients, variables)

        object.__setattr__(self.optimizer, "apply", record_and_apply)

    def paths(self):
        return [variable.path.partition("/")[2] for variable in self.model.trainable_variables]

    def gradients(self):
        return [np.asarray(gradient) for gradient in self._variables(self._placed)[1]]

    def weights(self):
        return [np.asarray(weight) for weight in self._variables(self._placed)[0]]

    def step(self, features):
        self._placed = self._place(features)
        measured, bad_step = self._step(self._placed)
        if int(bad_step) >= 0:
            raise ValueError("The loss or a gradient is not finite, so there is nothing to compare; use a lower "
                             "learning rate or other initial weights.")
        return float(total_loss(self.model.config, measured.batch))

    def _place(self, features):
        return self.partitioner.place({name: value[None] for name, value in features.items()})


def _largest(size, paths, ones, others) -> Difference:
    """Over tensors, the largest of size(|a - b|) / size(|a|)."""
    found = []
    for path, one, other in zip(paths, ones, others, strict=True):
        found.append(Difference(float(size(np.abs(one - other)) / (size(np.abs(one)) or 1.0)), path))
    return max(found, key=lambda difference: difference.value)


def _root_mean_square(x):
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))
