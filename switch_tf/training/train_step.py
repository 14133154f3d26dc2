"""The training step: gradients of the whole batch's loss, then the update, compiled by `compile_steps`."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from switch_tf import context, metrics, partitioning, statuses
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.evaluation.objectives import Objective
from switch_tf.layers import Router, grouping
from switch_tf.metrics import Mean, StepMeasurements
from switch_tf.ops import dtypes, random
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import FLAGS, Partitioner, select_step
from switch_tf.partitioning.tensors import Tensor
from switch_tf.partitioning.variables import fold_gradients
from switch_tf.refusals import Refusal

# Choice -> whether it trains the weight of a path.
_PARTS = {
    "experts": lambda path: "/experts/" in path,
    "all_but_experts": lambda path: "/experts/" not in path,
    "router": lambda path: "/router/" in path,
    "decoder": lambda path: path.startswith(("decoder/", "logits_dense/")),
}


def compute_gradients(model: keras.Model, features: dict[str, Any], seed: int, step: Any, settings: StepSettings,
                      partitioner: Partitioner | None = None,
                      objective: Objective | None = None) -> tuple[list[Tensor], Any]:
    """Computes the gradients of the loss over the whole batch, accumulated over microbatches and devices.

    Args:
        features: <int32>[batch, length] by name, this device's part of the batch.
        partitioner: Defaults to one device.

    Returns:
        `(gradients, measured)`: a dense tensor for each trainable variable, and StepMeasurements.
    """
    partitioner, objective = partitioner or Partitioner(), objective or Objective()
    # Divides losses by the whole batch's tokens, so that parts add up.
    dtype = dtypes.wide_dtype(model.compute_dtype)
    weights = partitioner.sum_over_parts(objective.weights(model.config, features, dtype))
    variables = [variable.value for variable in model.trainable_variables]
    count = settings.num_microbatches
    num_parts, part_index = partitioner.current_part()

    @contextlib.contextmanager
    def in_part(index):
        with (partitioning.part_of_batch(count * num_parts, index + count * part_index),
              random.random_seed(random.step_seed(seed, step))):
            yield {name: _rows(value, index, count) for name, value in features.items()}

    def part(index):
        with in_part(index) as rows, tf.GradientTape() as tape:
            measured = objective.measure(model.config, rows, *model.forward(rows, training=True), settings)
            loss = objective.total(model.config, weights.apply_to(measured))
            # In these scopes, because rematerialised layers run again here.
            gradients = tape.gradient(loss, variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        gradients = fold_gradients(gradients, model.trainable_variables)
        return gradients, (measured, loss)

    if count == 1:
        sums = part(0)
    else:
        with in_part(0) as rows:
            zeros = _zeros_measured(model, rows, settings, objective), tf.zeros([], dtype)
        # Holds the activations of one part at a time.
        _, *sums = tf.while_loop(
            lambda index, *_: index < count,
            lambda index, *sums: (index + 1, *metrics.merge(sums, part(index))),
            (tf.constant(0), [tf.zeros_like(variable) for variable in variables], zeros), parallel_iterations=1)
    gradients, (measured, loss) = partitioner.sum_over_parts(sums)
    norm = tf.linalg.global_norm([tf.cast(gradient, dtype) for gradient in gradients])
    return gradients, StepMeasurements(measured, *(Mean(total, tf.ones([], dtype))
                                                   for total in (weights.tokens, norm, loss)))


def _zeros_measured(model, features, settings, objective):
    """Returns zeros with the structure of `measure`'s traced results."""
    # Never runs, so it may read variables of any back end.
    traced = tf.function(context.within(is_lowered=True)(
        lambda: objective.measure(model.config, features, *model.forward(features), settings)), autograph=False)
    shapes = traced.get_concrete_function().structured_outputs
    return tf.nest.map_structure(lambda result: tf.zeros(result.shape, result.dtype), shapes)


def stateful_routers(model: keras.Model) -> dict[str, Router]:
    """Returns the routers of policies with a state, by name in `RouterStats`."""
    return {name: router for name, router in zip(model.config.sparse_layer_names, model.router_layers, strict=True)
            if router.has_state}


def apply_gradients(model: keras.Model, optimizer: keras.optimizers.Optimizer, gradients: list, norm: Any,
                    expert_loads: tuple[Mean, ...], settings: StepSettings) -> None:
    """Clips by `settings.clip_norm`, if set, and updates every variable and every router's state once.

    Args:
        gradients: For each trainable variable, of the whole batch.
        norm: Their global norm.
        expert_loads: `RouterStats.expert_load` of each of `stateful_routers`.
    """
    if settings.clip_norm is not None:
        scale = settings.clip_norm / tf.maximum(norm, settings.clip_norm)
        gradients = [gradient * scale for gradient in gradients]
    optimizer.apply(gradients, model.trainable_variables)
    for router, load in zip(stateful_routers(model).values(), expert_loads, strict=True):
        router.update_state(load)


def compile_steps(model: keras.Model, optimizer: keras.optimizers.Optimizer, seed: int, settings: StepSettings,
                  partitioner: Partitioner | None = None, objective: Objective | None = None) -> "Steps":
    """Returns `steps_per_call` training steps as one function. `optimizer` is built; its `iterations` is the step."""
    partitioner, objective = partitioner or Partitioner(), objective or Objective()
    dtype = dtypes.wide_dtype(model.compute_dtype)

    def compute(features):
        gradients, measured = compute_gradients(model, features, seed, optimizer.iterations.value, settings,
                                                partitioner, objective)
        norm = measured.gradient_norm.total
        is_finite = tf.math.is_finite(norm) & tf.math.is_finite(measured.loss.total)
        loads = tuple(measured.batch.routers[name].expert_load for name in stateful_routers(model))
        return gradients, (norm, loads), measured, is_finite

    def apply(gradients, totals):
        apply_gradients(model, optimizer, gradients, *totals, settings)

    one_step = partitioner.step(compute, apply, settings.use_xla)

    def run(features):
        if settings.steps_per_call == 1:
            measured, is_finite = one_step(features, 0)
            return measured, tf.where(is_finite, -1, 0)

        def is_good(index, sums, bad_step):
            return (index < settings.steps_per_call) & (bad_step < 0)

        def next_step(index, sums, bad_step):
            measured, is_finite = one_step(features, index)
            return index + 1, metrics.merge(sums, measured), tf.where(is_finite, -1, index)

        zero = Mean(*[tf.zeros([], dtype)] * 2)
        measured = _zeros_measured(model, select_step(features, 0), settings, objective)
        zeros = StepMeasurements(measured, zero, zero, zero)
        _, sums, bad_step = tf.while_loop(is_good, next_step, (tf.constant(0), zeros, tf.constant(-1)))
        return sums, bad_step

    results = metrics.Vector()

    def call(features):
        flags = tf.reduce_max(features[FLAGS], 0) if FLAGS in features else ()
        measured, bad_step = run({name: value for name, value in features.items() if name != FLAGS})
        return results.join((bad_step, optimizer.learning_rate, measured, flags))

    return Steps(partitioner.compile(call, settings.use_xla), results, partitioner)


class StepResults(NamedTuple):
    """Results of a call of `Steps`, on the host.

    Attributes:
        measured: Merged over the steps of the call.
        bad_step: Index of the first step with a loss or gradient that is not finite, or -1. Steps from there on make no
            change.
        learning_rate: Of the next step.
        flags: Whether each flag was given in any process.
    """

    measured: StepMeasurements
    bad_step: int
    learning_rate: float
    flags: tuple[bool, ...]


class Steps:
    """Compiled training steps, made by `compile_steps`.

    Attributes:
        function: The function that the partitioner compiled, from placed features to one vector of all results.
    """

    def __init__(self, function: Callable, results: metrics.Vector, partitioner: Partitioner):
        self.function, self._results, self._partitioner = function, results, partitioner

    def trace(self, specs: dict[str, tf.TensorSpec], num_flags: int = 0) -> None:
        """Traces or compiles the function ahead of its first call."""
        self._partitioner.trace(self.function, specs | self._partitioner.flag_specs(num_flags))

    def start(self, features: dict[str, Any], flags: Sequence[bool] = ()) -> Callable[[], StepResults]:
        """Starts the steps. Returns a function that waits for them and fetches their results.

        Args:
            features: <int32>[steps_per_call, batch, length] by name, placed.
            flags: Each process gives as many.
        """
        placed = self._partitioner.place_flags(flags)
        vector = self.function(features | placed)

        def results():
            bad_step, rate, measured, raised = self._results.split(vector)
            agreed = raised if placed else map(self._partitioner.any_process, flags)
            return StepResults(measured, int(bad_step), float(rate), tuple(map(bool, agreed)))

        return results

    def __call__(self, features: dict[str, Any]) -> tuple[StepMeasurements, int]:
        """Runs the steps. Returns `measured` and `bad_step`."""
        return self.start(features)()[:2]


def _rows(value, index, count):
    """<int32>[batch, length] -> <int32>[batch / count, length]."""
    if count == 1:
        return value
    parts = tf.reshape(partitioning.constrain(value, (None, "length")), (count, -1, *value.shape[1:]))
    return partitioning.constrain(parts[index], ("batch", "length"))


def check_trainable(trainable: str, config: SwitchConfig) -> None:
    """Raises Refusal for a choice, see `freeze`, without weights to train."""
    is_missing = (trainable == "decoder" and config.is_encoder_only) or (
        trainable in ("experts", "router") and not config.sparse_layer_names) or (
        trainable == "router" and config.routing_policy == config.decoder_policy == "hash")
    if is_missing:
        raise Refusal(f"TRAINABLE is {trainable!r}, but this model has no such weights, so nothing would train; use "
                      "'all'.")


def freeze(model: keras.Model, trainable: str) -> None:
    """Freezes the weights that a run does not train. Called before the optimizer is built.

    Args:
        trainable: "all", "all_but_experts", "experts", "router" or "decoder". The decoder includes its own logits, but
            not an embedding shared with the encoder.
    """
    for variable in model.trainable_variables if trainable != "all" else ():
        variable.trainable = _PARTS[trainable](variable.path.partition("/")[2])


def check_division(config: SwitchConfig, layout: Layout, batch_size: int, task_feature_lengths: dict,
                   num_microbatches: int) -> None:
    """Raises Refusal unless groups, microbatches and the layout's pieces divide the batch.

    Args:
        layout: With a complete mesh.
        task_feature_lengths: "inputs" and "targets", in tokens.
    """
    if layout.is_one_program and config.dispatch in ("index", "ragged"):
        raise Refusal(f"dispatch={config.dispatch!r} moves rows by their place in one device's memory, and this "
                      "layout splits them over several; use dispatch='einsum' or 'auto'.")
    layout.check_sizes(config.axis_sizes)
    num_pieces = layout.num_pieces("batch")
    if batch_size % (num_microbatches * num_pieces):
        raise Refusal(
            f"BATCH_SIZE must be a multiple of {num_microbatches * num_pieces} ({num_microbatches} microbatch"
            f"{'es' * (num_microbatches > 1)} times {num_pieces} device{'s' * (num_pieces > 1)}), not {batch_size}.")
    if config.rules.groups_are_sequences:
        return
    num_parts = num_microbatches * layout.num_pieces("group")
    for feature, sparse_layers in (("inputs", config.encoder_sparse_layers), ("targets", config.decoder_sparse_layers)):
        if sparse_layers:
            grouping.check_batch(batch_size, task_feature_lengths[feature], config.grouping, num_parts)


class Divergence(Refusal):
    """A training step's loss or gradient was not finite, so it made no update."""

    exit_status = statuses.DIVERGED


class _Found(BaseException):
    """Carries a layer's path out of the model. Not an Exception, because Keras rewrites their messages."""


def first_bad_tensor(model: keras.Model, features: dict[str, Any], seed: int, step: int, settings: StepSettings,
                     partitioner: Partitioner | None = None, objective: Objective | None = None) -> str:
    """Names the first tensor of a step that is not finite: weights, then activations in order, then gradients.

    Repeats the step without compilation.

    Args:
        features: <int32>[batch, length] by name.
        step: The step that failed.
        partitioner: Defaults to one device. If it splits the model, only weights are checked, to gather no activations.

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
    except _Found as error:
        return f"the output of {error}"
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        if not _is_finite(gradient):
            return f"the gradient of {_short(variable.path)}"
    return "nothing when the step was repeated without compilation, so it lies in how the step is compiled"


@contextlib.contextmanager
def _checked_outputs(model):
    def call_and_check(layer, call, *args, **kwargs):
        outputs = call(*args, **kwargs)
        is_traced = not tf.executing_eagerly()  # traced for the structure of its results, without values
        if not is_traced and not all(
                _is_finite(tensor) for tensor in tf.nest.flatten(outputs) if tensor is not None):
            raise _Found(_short(layer.path))
        return outputs

    layers = list(model._flatten_layers(include_self=False))
    for layer in layers:
        object.__setattr__(layer, "call", functools.partial(call_and_check, layer, layer.call))
    try:
        yield
    finally:
        for layer in layers:
            object.__delattr__(layer, "call")


def _is_finite(tensor) -> bool:
    tensor = tf.convert_to_tensor(tensor)
    return not tensor.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(tensor)))


def _short(path: str) -> str:
    return path.partition("/")[2]
