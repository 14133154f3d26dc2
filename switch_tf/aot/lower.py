"""Lowers a training step to StableHLO for a mesh, from shapes only: variables are in reserved, untouched pages.

It is the program that the pjrt back end trains.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.evaluation.objectives import Objective, target_features
from switch_tf.partitioning import lowering
from switch_tf.partitioning.axes import axes_of, axes_of_new_variable
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner, initial_value
from switch_tf.training.train_step import compile_steps, freeze


class Argument(NamedTuple):
    """An argument of a program, and also a result if the step updates it.

    Attributes:
        name: A variable's path or a feature's name.
        kind: "weight", "slot" or "feature".
        spec: Mesh axes that split each dimension at rest.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]


class Lowered(NamedTuple):
    """A lowered step with its arguments, in order. The layout's mesh is complete."""

    program: lowering.Program
    arguments: list[Argument]
    layout: Layout

    @property
    def text(self) -> str:
        """StableHLO, annotated for `layout`'s mesh."""
        return lowering.text(self.program.module)


class ShapesOnly(Partitioner):
    """The pjrt back end's step, with variables without memory."""

    is_asynchronous = True

    def _create(self, next_creator, **kwargs):
        initial = initial_value(kwargs)
        if not any(axes_of_new_variable(len(initial.shape))):
            return next_creator(**kwargs)  # too small to matter
        return next_creator(**{**kwargs, "initial_value": lowering.reserved(initial.shape, initial.dtype)})

    def compile(self, function: Callable[..., Any], use_xla: bool = False) -> Callable[..., Any]:
        return function  # `lower_step` traces it once


def lower_step(model: keras.Model, optimizer: keras.optimizers.Optimizer, layout: Layout, batch_size: int,
               task_feature_lengths: dict[str, int], settings: StepSettings, pack: bool = False,
               objective: Objective | None = None) -> Lowered:
    """Lowers one training step. Model, optimizer and objective are not built. The layout's mesh is complete.

    Args:
        batch_size: Sequences of the whole batch.
        task_feature_lengths: "inputs" and "targets", in tokens.
        pack: Whether sequences hold several examples, masked by segments.
    """
    partitioner, objective = ShapesOnly(layout), objective or Objective()
    partitioner.build(model, optimizer, lambda model: freeze(model, settings.trainable))
    objective.build(partitioner)
    step = compile_steps(model, optimizer, 0, settings, partitioner, objective)
    specs = feature_specs(model.config, batch_size, task_feature_lengths, pack)
    specs |= added.specs(1, batch_size) if (added := objective.added_features()) else {}
    features = [Argument(name, "feature", tuple(spec.shape), spec.dtype.name, layout.spec((None, "batch", "length")))
                for name, spec in specs.items()]
    variables = {id(variable.value): variable
                 for variable in (*model.variables, *optimizer.variables, *objective.variables, partitioner.has_failed)}
    program = lowering.lower_call(step.function, specs, [variable.value for variable in variables.values()], layout)
    state = [variables[id(symbol)] for symbol in program.captured]
    return Lowered(program, features + [
        Argument(variable.path, "weight" if variable.trainable else "slot", tuple(variable.shape), variable.dtype,
                 layout.spec(axes_of(variable), at_rest=True)) for variable in state], layout)


def feature_specs(config: SwitchConfig, batch_size: int, task_feature_lengths: dict[str, int],
                  pack: bool = False) -> dict[str, tf.TensorSpec]:
    """Returns the shapes of a step's seqio features, <int32>[1, batch, length]. Packed examples have no positions."""
    stacks = {"encoder": "inputs"} if config.is_encoder_only else {"encoder": "inputs", "decoder": "targets"}
    lengths = {f"{stack}_input_tokens": length for stack, length in stacks.items()}
    lengths |= dict.fromkeys(target_features(config), "targets")
    if pack:
        lengths |= {f"{stack}_segment_ids": length for stack, length in stacks.items()}
    return {name: tf.TensorSpec((1, batch_size, task_feature_lengths[length]), tf.int32)
            for name, length in lengths.items()}
