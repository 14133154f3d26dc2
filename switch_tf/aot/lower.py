"""A training step as StableHLO for the devices of a mesh, from shapes alone: no weight is ever in memory.

The step is lowered as its layout trains it: two programs if DTensor computes gradients in one function and applies them
in another (`partitioning/backends/dtensor.py`), else one program with the condition inside, which for the pjrt back end
is the very program that it trains. `constrain` and `use` write XLA's annotations. Variables are in pages that are
reserved and never touched.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from switch_tf import context
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.evaluation.objectives import Objective, target_features
from switch_tf.partitioning import lowering
from switch_tf.partitioning.axes import axes_of, axes_of_new_variable
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import UnfoldedVariable, Unfolding, as_stored, as_used, stored, unfolding
from switch_tf.training.train_step import compile_steps, freeze


class Argument(NamedTuple):
    """An argument of a program, and also a result if the step updates it.

    Attributes:
        name: Path of a variable, or name of a feature.
        kind: "weight", "slot", "feature", or "gradient" for what the second of two programs takes from the first:
            gradients and totals.
        shape: Shape as stored, unfolded if the weight is.
        dtype: Name of the dtype.
        spec: Mesh axes that split each dimension at rest.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]


class Lowered(NamedTuple):
    """A lowered program with its arguments.

    Attributes:
        program: Lowered function.
        arguments: Arguments of the main function, in order.
        results: Specs of the results that replace no argument; they come first.
        layout: Layout with a complete mesh.
    """

    program: lowering.Program
    arguments: list[Argument]
    results: list[tuple[tuple[str, ...], ...]]
    layout: Layout

    @property
    def text(self) -> str:
        """StableHLO with annotations for the mesh of `layout`."""
        return lowering.text(self.program.module)


class ShapesOnly(Partitioner):
    """Creates variables without memory, and annotates the trace of one device.

    Attributes:
        compute, apply: The annotated functions of the step that `compile_steps` made last.
    """

    def __init__(self, layout: Layout):
        super().__init__(layout)
        self._annotator = lowering.XlaAnnotator(layout) if layout.num_devices > 1 else None
        self.compute: Callable[..., Any] | None = None
        self.apply: Callable[..., Any] | None = None

    def creates_variables(self) -> AbstractContextManager:
        return tf.variable_creator_scope(self._create)

    def _create(self, next_creator, **kwargs):
        value = kwargs["initial_value"]
        with tf.Graph().as_default():  # only for the shape and dtype
            symbolic = tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))
        axes, shape = axes_of_new_variable(symbolic.shape.rank), tuple(symbolic.shape)
        if not any(axes):
            return next_creator(**kwargs)  # too small to matter
        how = Unfolding(shape)
        if has_two_programs(self.layout):  # DTensor splits a dimension over one mesh axis only
            how, _ = unfolding(shape, self.layout.spec(axes, at_rest=True), self.layout.mesh)
        variable = next_creator(**{**kwargs, "initial_value": lowering.reserved(how.stored_shape, symbolic.dtype)})
        return UnfoldedVariable(variable, how) if how.first else variable

    def step(self, compute: Callable[..., Any], apply: Callable[..., Any], use_xla: bool = False) -> Callable[..., Any]:
        annotated = context.within(annotator=self._annotator)
        self.compute, self.apply = annotated(compute), annotated(apply)
        return super().step(self.compute, self.apply)

    def compile(self, function: Callable[..., Any], use_xla: bool = False) -> Callable[..., Any]:
        return function  # traced, once, by `lower_step`


def lower_step(model: keras.Model, optimizer: keras.optimizers.Optimizer, layout: Layout, batch_size: int,
               task_feature_lengths: dict[str, int], settings: StepSettings, pack: bool = False,
               objective: Objective | None = None) -> list[Lowered]:
    """Lowers one training step to programs that run one after the other.

    Args:
        model: SwitchTransformer that is not built.
        optimizer: Keras optimizer that is not built.
        layout: Layout with a complete mesh.
        batch_size: Sequences of the whole batch.
        task_feature_lengths: "inputs" and "targets", in tokens.
        settings: Settings of the step.
        pack: Whether sequences hold several examples, masked by segments.
        objective: Objective that is not built. Defaults to `Objective()`.
    """
    partitioner, objective = ShapesOnly(layout), objective or Objective()
    partitioner.build(model, optimizer, lambda model: freeze(model, settings.trainable))
    objective.build(partitioner)
    step = compile_steps(model, optimizer, 0, settings, partitioner, objective)
    variables = {id(stored(variable)): variable
                 for variable in (*model.variables, *optimizer.variables, *objective.variables)}

    def lower(inputs, function, first_results=()):
        """Lowers a function of tensors. Its first results are split like `first_results`, the others not at all."""
        specs = [tf.TensorSpec(argument.shape, argument.dtype) for argument in inputs]
        program = lowering.lower(function, specs, [*map(stored, variables.values())])
        state = [_argument(variables[id(symbol)], layout) for symbol in program.captured]
        results = [argument.spec for argument in first_results]
        results += [((),) * len(shape) for shape, _ in program.results[len(results):]]
        return Lowered(program, [*inputs, *state], results, layout)

    specs = feature_specs(model.config, batch_size, task_feature_lengths, pack)
    specs |= added.specs(batch_size) if (added := objective.added_features()) else {}
    steps, axes = ((), ()) if has_two_programs(layout) else ((1,), (None,))
    features = [Argument(name, "feature", (*steps, *spec.shape), spec.dtype.name,
                         layout.spec((*axes, "batch", "length"))) for name, spec in specs.items()]
    if not has_two_programs(layout):
        return [lower(features, lambda *tensors: step(dict(zip(specs, tensors, strict=True))))]
    weights = model.trainable_variables
    gradients = [_argument(variable, layout)._replace(name=f"gradient of {variable.path}", kind="gradient")
                 for variable in weights]

    def compute(*tensors):
        found, *others = partitioner.compute(dict(zip(specs, tensors, strict=True)))
        return as_stored(found, weights), *others

    def apply(*tensors):
        totals = tf.nest.pack_sequence_as(structure, tensors[len(gradients):])
        partitioner.apply(as_used(tensors[:len(gradients)], weights), totals)

    computed = lower(features, compute, gradients)
    _, structure, *_ = computed.program.structure
    results = computed.program.results[len(gradients):][:len(tf.nest.flatten(structure))]
    totals = [Argument(f"total {place}", "gradient", shape, np.dtype(dtype).name, ((),) * len(shape))
              for place, (shape, dtype) in enumerate(results)]
    return [computed, lower([*gradients, *totals], apply)]


def has_two_programs(layout: Layout) -> bool:
    """Returns whether the layout trains in two functions on a TPU. Only DTensor does."""
    return layout.backend == "dtensor"


def feature_specs(config: SwitchConfig, batch_size: int, task_feature_lengths: dict[str, int],
                  pack: bool = False) -> dict[str, tf.TensorSpec]:
    """Returns the shapes of the seqio features that a step reads. Packed examples have segments and no positions."""
    stacks = {"encoder": "inputs"} if config.is_encoder_only else {"encoder": "inputs", "decoder": "targets"}
    lengths = {f"{stack}_input_tokens": length for stack, length in stacks.items()}
    lengths |= dict.fromkeys(target_features(config), "targets")
    if pack:
        lengths |= {f"{stack}_segment_ids": length for stack, length in stacks.items()}
    return {name: tf.TensorSpec((batch_size, task_feature_lengths[length]), tf.int32, name=name)
            for name, length in lengths.items()}


def _argument(variable, layout):
    kind = "weight" if variable.trainable else "slot"
    spec = layout.spec(axes_of(variable), at_rest=True)
    if isinstance(variable.value, UnfoldedVariable):
        spec = tuple((axis,) if axis else () for axis in unfolding(variable.shape, spec, layout.mesh)[1])
    return Argument(variable.path, kind, tuple(stored(variable).shape), variable.dtype, spec)
