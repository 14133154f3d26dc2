"""Whether a layout computes what one device computes: the loss, every gradient, every weight, on the same batches.

Models of float64 tell: there the order of a sum moves a number by its sixteenth digit, so that no hidden unit comes
over the edge of its ReLU and no token to another expert, as both do in float32; whatever is wrong is far above that.
"""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from switch_tf.evaluation.objectives import Objective
from switch_tf.partitioning import axes_of, with_axes
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.training import trainable
from switch_tf.training.train_step import compile_steps

# Relative differences up to this one may be the order of float64 sums; 140 healthy steps came to 1e-14 at most.
LIMIT = 1e-9


class Difference(NamedTuple):
    """The largest difference found, and the tensor (a variable's path, a step) it was found in."""

    value: float
    where: str


class Verification(NamedTuple):
    """What was compared.

    `loss`, `later_loss`: relative difference of the loss that the step itself returns, of the first step and the
        largest of all.
    `gradient`: over variables, of the first step, as the optimizer is given it: max |a - b| / max |a|.
    `weight`: over weights after the last step: root mean square of a - b over that of a. Not their largest elements:
        optimizers that divide by a gradient's size move a weight by a whole step where rounding decides its sign.
    `losses`: the pairs of losses (one device, layout), step by step.
    """

    loss: Difference
    later_loss: Difference
    gradient: Difference
    weight: Difference
    losses: list[tuple[float, float]]

    @property
    def is_equal(self) -> bool:
        """Whether the order of float64 sums explains every difference."""
        return all(row.value <= LIMIT for row in (self.loss, self.later_loss, self.gradient, self.weight))


class Outcome(NamedTuple):
    """What a few steps came to: the loss of each, the gradients of the first, the weights after the last, and whose."""

    losses: list[float]
    gradients: list[np.ndarray]
    weights: list[np.ndarray]
    paths: list[str]


def verify(make_model, make_optimizer, partitioner, batches, seed, settings, say=lambda text: None,
           make_objective=Objective) -> Verification:
    """Trains twin models from the same weights, one on one device and one under a partitioner; arguments as `train`."""
    twins = [train(make_model, make_optimizer, side, batches, seed, settings, say, make_objective)
             for side in (Partitioner(), partitioner)]
    return compare(*twins)


def train(make_model, make_optimizer, partitioner, batches, seed, settings, say=lambda text: None,
          make_objective=Objective) -> Outcome:
    """Takes a step with each batch.

    Args:
        make_model: function without arguments to a SwitchTransformer that is not built.
        make_optimizer: function without arguments to a Keras optimizer.
        partitioner: Partitioner.
        batches: list of dicts of <int32>[batch, length], one for each step.
        seed: int, of initial weights, dropout and jitter.
        settings: StepSettings with steps_per_call 1.
        say: function that is called with each line of progress.
        make_objective: function without arguments that returns an Objective that is not built.
    """
    devices = f"{partitioner.layout.num_devices} device{'s' * (partitioner.layout.num_devices > 1)}"
    say(f"Building the model on {devices} ...")
    return Twin(make_model, make_optimizer, partitioner, seed, settings, make_objective).train(
        batches, lambda step, loss: say(f"step {step}/{len(batches)} on {devices}: loss {loss:.7f}"))


def compare(one: Outcome, other: Outcome) -> Verification:
    """The largest differences between one device's outcome and another one's."""
    losses = list(zip(one.losses, other.losses, strict=True))
    by_step = [Difference(abs(mine - theirs) / abs(mine), f"step {step + 1}")
               for step, (mine, theirs) in enumerate(losses)]
    later = max(by_step, key=lambda difference: difference.value)
    gradient = _largest(np.max, one.paths, one.gradients, other.gradients)
    weight = _largest(_root_mean_square, one.paths, one.weights, other.weights)
    return Verification(by_step[0], later, gradient, weight, losses)


class Twin:
    """A model and its optimizer under a partitioner, with the compiled step that trains them; arguments as `train`."""

    def __init__(self, make_model, make_optimizer, partitioner, seed, settings, make_objective=Objective):
        keras.utils.set_random_seed(seed)
        self.model, self.optimizer = make_model(), make_optimizer()
        self.partitioner = partitioner
        partitioner.build(self.model, self.optimizer, lambda model: trainable.select(model, settings.trainable))
        objective = make_objective()
        objective.build(partitioner)
        objective.restore()
        self._recorded = []
        self._record_gradients()
        self._step = compile_steps(self.model, self.optimizer, seed, settings, partitioner, objective)
        self._variables = partitioner.compile(partitioner.results(lambda _: [
            [tf.convert_to_tensor(variable.value) for variable in variables]
            for variables in (self.model.trainable_variables, self._recorded)]))

    def _record_gradients(self):
        """Has the optimizer keep the gradients that it is given: computing them apart would compile all of it twice."""
        with self.partitioner.creates_variables():
            for variable in self.model.trainable_variables:
                self._recorded.append(with_axes(
                    axes_of(variable), keras.Variable, np.zeros(variable.shape, variable.dtype), trainable=False,
                    dtype=variable.dtype, aggregation="only_first_replica"))
        apply = self.optimizer.apply

        def record_and_apply(gradients, variables):
            for recorded, gradient in zip(self._recorded, gradients, strict=True):
                recorded.assign(gradient)
            apply(gradients, variables)

        object.__setattr__(self.optimizer, "apply", record_and_apply)

    def train(self, batches, tell=lambda step, loss: None) -> Outcome:
        """Takes a step with each batch, from where the variables stand; `tell` is told each step's number and loss."""
        losses, gradients = [], None
        for features in batches:
            placed = self.partitioner.place({name: value[None] for name, value in features.items()})
            losses.append(self._take_step(placed))
            if gradients is None:
                gradients = self._read(placed)[1]
            tell(len(losses), losses[-1])
        paths = [variable.path.partition("/")[2] for variable in self.model.trainable_variables]
        return Outcome(losses, gradients, self._read(placed)[0], paths)

    def _take_step(self, placed):
        measured, bad_step = self._step(placed)
        if int(bad_step) >= 0:
            raise Refusal("The loss or a gradient is not finite, so there is nothing to compare; use a lower "
                          "learning rate or other initial weights.")
        return float(measured.loss.total)

    def _read(self, placed):
        return tf.nest.map_structure(np.asarray, self._variables(placed))


def _largest(size, paths, ones, others) -> Difference:
    """Over tensors, the largest of size(|a - b|) / size(|a|)."""
    found = []
    for path, one, other in zip(paths, ones, others, strict=True):
        value = float(size(np.abs(one - other)) / (size(np.abs(one)) or 1.0))
        found.append(Difference(np.inf if np.isnan(value) else value, path))
    return max(found, key=lambda difference: difference.value)


def _root_mean_square(x):
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))
