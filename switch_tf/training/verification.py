"""Compares a layout with one device on the same batches: the loss, every gradient and every weight.

In float64 the order of a sum changes only the sixteenth digit, so no token changes its expert, unlike in float32.
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from switch_tf import data
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.partitioning import axes_of, collectives, with_axes
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.training import train_step

# Largest relative difference that float64 rounding explains; 140 correct steps reached 1e-14.
LIMIT = 1e-9
# In other dtypes, the order of a sum can decide where a token goes.
JUDGED_DTYPE = "float64"


class Difference(NamedTuple):
    """The largest difference, with its variable's path or step."""

    value: float
    where: str


class Verification(NamedTuple):
    """Differences between one device and a layout.

    `loss`, `later_loss`: Relative difference of the loss in the first step, and the largest in all steps.
    `gradient`: Largest max |a - b| / max |a| over variables, in the first step.
    `weight`: Largest rms(a - b) / rms(a) over weights, after the last step. Root mean square, because
        rounding may flip single steps of an optimizer that divides by the gradient's size.
    `losses`: Pairs (one device, layout), step by step.
    `program`: See `Partitioner.program_text`.
    """

    loss: Difference
    later_loss: Difference
    gradient: Difference
    weight: Difference
    losses: list[tuple[float, float]]
    program: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the order of float64 sums explains every difference."""
        return all(row.value <= LIMIT for row in (self.loss, self.later_loss, self.gradient, self.weight))


class Outcome(NamedTuple):
    """Results of a few steps: losses, gradients of the first step, final weights, and their paths."""

    losses: list[float]
    gradients: list[np.ndarray]
    weights: list[np.ndarray]
    paths: list[str]
    program: str = ""


def compare(expected: Outcome, actual: Outcome) -> Verification:
    """Returns the largest differences from the outcome on one device."""
    losses = list(zip(expected.losses, actual.losses, strict=True))
    by_step = [Difference(abs(a - b) / abs(a), f"step {step + 1}") for step, (a, b) in enumerate(losses)]
    later = max(by_step, key=lambda difference: difference.value)
    gradient = _largest(np.max, expected.paths, expected.gradients, actual.gradients)
    weight = _largest(lambda x: np.sqrt(np.mean(np.square(x, dtype=np.float64))), expected.paths, expected.weights,
                      actual.weights)
    return Verification(by_step[0], later, gradient, weight, losses, actual.program)


class Twin:
    """A model and its optimizer under a partitioner, with their compiled step.

    Args:
        make_model, make_optimizer, make_objective: Return objects that are not built.
        seed: For initial weights, dropout and jitter.
        settings: With steps_per_call 1.
    """

    def __init__(self, make_model: Callable[[], keras.Model], make_optimizer: Callable[[], keras.optimizers.Optimizer],
                 partitioner: Partitioner, seed: int, settings: StepSettings,
                 make_objective: Callable[[], Objective] = Objective):
        keras.utils.set_random_seed(seed)
        self.model, self.optimizer = make_model(), make_optimizer()
        self.partitioner = partitioner
        partitioner.build(self.model, self.optimizer, lambda model: train_step.freeze(model, settings.trainable))
        objective = make_objective()
        objective.build(partitioner)
        objective.restore()
        # The optimizer stores its gradients, to compile them once.
        with partitioner.creates_variables():
            stored = [with_axes(axes_of(variable), keras.Variable, np.zeros(variable.shape, variable.dtype),
                                trainable=False, dtype=variable.dtype, aggregation="only_first_replica")
                      for variable in self.model.trainable_variables]
        apply = self.optimizer.apply

        def store_and_apply(gradients, variables):
            for variable, gradient in zip(stored, gradients, strict=True):
                variable.assign(gradient)
            apply(gradients, variables)

        object.__setattr__(self.optimizer, "apply", store_and_apply)
        self._step = train_step.compile_steps(self.model, self.optimizer, seed, settings, partitioner, objective)
        self._variables = partitioner.compile(partitioner.results(lambda _: [
            [tf.convert_to_tensor(variable.value) for variable in variables]
            for variables in (self.model.trainable_variables, stored)]))

    def train(self, batches: list[dict], on_step: Callable[[int, float], None] = lambda step, loss: None) -> Outcome:
        """Takes a step with each batch of <int32>[batch, length]. Calls `on_step` with its number and loss."""
        losses, gradients = [], None
        for features in batches:
            placed = self.partitioner.place({name: value[None] for name, value in features.items()})
            measured, bad_step = self._step(placed)
            if bad_step >= 0:
                raise Refusal("The loss or a gradient is not finite, so there is nothing to compare; use a lower "
                              "learning rate or other initial weights.")
            losses.append(float(measured.loss.total))
            if len(losses) in (1, len(batches)):
                weights, stored = tf.nest.map_structure(np.asarray, self._variables(placed))
                gradients = gradients or stored
            on_step(len(losses), losses[-1])
        paths = [variable.path.partition("/")[2] for variable in self.model.trainable_variables]
        return Outcome(losses, gradients, weights, paths, self.partitioner.program_text(self._step.function))


def _largest(size, paths, expected, actual) -> Difference:
    differences = []
    for path, a, b in zip(paths, expected, actual, strict=True):
        value = float(size(np.abs(a - b)) / (size(np.abs(a)) or 1.0))
        differences.append(Difference(np.inf if np.isnan(value) else value, path))
    return max(differences, key=lambda difference: difference.value)


def verify(described: Experiment, num_steps: int, dumps: str | pathlib.Path) -> tuple[dict, str]:
    """Compares training steps of a run under its layout with the same steps on one device.

    Args:
        dumps: Folder of `collectives.dump_partitioned_programs`.

    Returns:
        (JSON object, text for people).
    """
    # Grappler's optimisation would take longer than the few steps.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    run, settings = described.run, described.settings
    if settings.steps_per_call != 1:
        raise Refusal(f"Steps are compared one by one, so steps_per_call must be 1, not {settings.steps_per_call}.")
    description = data.description_of_data(run, described.config, "train", run.seed)
    data.check_examples(description)
    with data.refusing_bad_rows(description):
        batches = list(data.get_dataset(description).take(num_steps))
    if added := described.make_objective().added_features():
        batches = [added.added_to(batch) for batch in batches]
    say = functools.partial(print, file=sys.stderr, flush=True)
    outcomes = []
    for partitioner in (Partitioner(), described.partitioner):
        devices = f"{partitioner.layout.num_devices} device{'s' * (partitioner.layout.num_devices > 1)}"
        say(f"Building the model on {devices} ...")

        def show(step, loss, devices=devices):
            say(f"step {step}/{len(batches)} on {devices}: loss {loss:.7f}")

        # Frees the first model before the second is built.
        outcomes.append(Twin(described.make_model, described.make_optimizer, partitioner, run.seed, settings,
                             described.make_objective).train(batches, show))
    differences = compare(*outcomes)
    sent = [
        *(collective for function in ("computed", "applied") for collective in collectives.read(dumps, function)),
        *collectives.read_xla(differences.program)]
    dtype, mesh = described.make_model().compute_dtype, described.layout.mesh
    num_unsafe = sum(collective.is_unsafe for collective in sent)
    result = {
        "loss_relative_difference": differences.loss.value,
        "gradient_relative_difference": differences.gradient.value,
        "weight_difference": differences.weight.value,
        "later_loss_relative_difference": differences.later_loss.value,
        "losses": differences.losses,
        "mesh": mesh,
        "collectives": collectives.summarize(sent),
        "unsafe_all_to_alls": num_unsafe,
        "exit_status": int(num_unsafe > 0 or (dtype == JUDGED_DTYPE and not differences.is_equal)),
    }
    steps = len(differences.losses)
    rows = {"loss, first step": differences.loss, "gradients, first step": differences.gradient,
            f"loss, {steps} steps": differences.later_loss, f"weights after {steps} steps": differences.weight}
    lines = [f"Mesh {', '.join(f'{axis}={size}' for axis, size in mesh.items())} against one device, {dtype}.",
             f"Largest relative differences, where rounding explains {LIMIT:.0e}:"]
    lines += [f"  {name:<24} {row.value:.1e}  {row.where}" for name, row in rows.items()]
    if sent:
        combined = "as XLA combined them" if differences.program else "before TensorFlow combines any"
        lines.append(f"Collectives of a step, {combined}, and their bytes on each device:")
        lines += [f"  {kind:<16} {entry['count']:>5} {entry['bytes']:>14,}"
                  for kind, entry in sorted(result["collectives"].items())]
    else:
        lines.append("No collectives were seen." if differences.program else
                     "No collectives were seen: tf.distribute sums gradients outside of the program.")
    if num_unsafe:
        lines.append(f"{num_unsafe} all-to-alls between two dimensions that are both not the first: "
                     "TensorFlow permutes their data.")
    if result["exit_status"]:
        lines.append("This layout computes something else.")
    elif dtype == JUDGED_DTYPE:
        lines.append("The same numbers.")
    else:
        lines.append(f"Not judged in {dtype}, where the order of a sum can decide where a token goes: leave "
                     "ACTIVATION_DTYPE out.")
    return result, "\n".join(lines)
