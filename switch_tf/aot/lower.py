"""A training step as StableHLO for the devices of a mesh, from shapes alone: no weight is ever in memory.

The step is lowered as its layout trains it: two programs if DTensor computes gradients in one function and applies them
in another (`partitioning/backends/dtensor.py`), else one program with the condition inside. `constrain` and `use` write
XLA's annotations. Variables are in pages that are reserved and never touched.
"""

import contextlib
import functools
import itertools
import math
import mmap
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from switch_tf import context
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.evaluation.objectives import Objective, target_features
from switch_tf.metrics import Mean
from switch_tf.ops import dtypes
from switch_tf.partitioning.axes import axes_of, axes_of_new_variable
from switch_tf.partitioning.gspmd import XlaAnnotator
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.unfolded import UnfoldedVariable, as_stored, as_used, stored, unfolding
from switch_tf.training import trainable
from switch_tf.training.train_step import StepTotals, compile_steps, stateful_routers

_MAP_NORESERVE = 0x4000  # Linux; Python has a name for it since 3.13


class Argument(NamedTuple):
    """An argument of a program, and also a result if the step updates it.

    Attributes:
        name: Path of a variable, or name of a feature.
        kind: "weight", "slot", "feature", or "gradient" in the second of two programs, the gradients' norm included.
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
    """A lowered program.

    Attributes:
        text: StableHLO with annotations for the mesh of `layout`.
        arguments: Arguments of the main function, in order.
        results: Specs of the results that replace no argument; they come first.
        updated: Indices of the arguments that the other results replace, in order.
        layout: Layout with a complete mesh.
    """

    text: str
    arguments: list[Argument]
    results: list[tuple[tuple[str, ...], ...]]
    updated: list[int]
    layout: Layout


class ShapesOnly(Partitioner):
    """Creates variables without memory, and annotates the trace of one device.

    Attributes:
        compute, apply: The annotated functions of the step that `compile_steps` made last.
    """

    def __init__(self, layout: Layout):
        super().__init__(layout)
        self._annotator = XlaAnnotator(layout, tuple(layout.mesh))
        self.compute: Callable[..., Any] | None = None
        self.apply: Callable[..., Any] | None = None

    @contextlib.contextmanager
    def creates_variables(self) -> Iterator[None]:
        with tf.variable_creator_scope(functools.partial(_create_without_memory, self.layout)):
            yield

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
    partitioner.build(model, optimizer, lambda model: trainable.select(model, settings.trainable))
    objective.build(partitioner)
    step = compile_steps(model, optimizer, 0, settings, partitioner, objective)
    variables = [*model.variables, *optimizer.variables, *objective.variables]
    lower = functools.partial(_lower, variables, layout)
    specs = feature_specs(model.config, batch_size, task_feature_lengths, pack)
    features = [Argument(name, "feature", tuple(spec.shape), spec.dtype.name, layout.spec(("batch", "length")))
                for name, spec in specs.items()]
    if not has_two_programs(layout):
        return [lower(features, lambda *tensors: step(
            {name: tensor[None] for name, tensor in zip(specs, tensors, strict=True)}))]
    gradients = [_argument(variable, layout)._replace(name=f"gradient of {variable.path}", kind="gradient")
                 for variable in model.trainable_variables]

    def compute(*tensors):
        found, *others = partitioner.compute(dict(zip(specs, tensors, strict=True)))
        return as_stored(found, model.trainable_variables), *others

    def apply(*tensors):
        norm, *loads = tensors[len(gradients):]
        loads = tuple(Mean(*loads[start:start + 2]) for start in range(0, len(loads), 2))
        partitioner.apply(as_used(tensors[:len(gradients)], model.trainable_variables), StepTotals(norm, loads))

    return [lower(features, compute, gradients), lower([*gradients, *_totals(model)], apply)]


def _totals(model):
    """Returns the Arguments of `StepTotals`, flat."""
    dtype, shape = dtypes.wide_dtype(model.compute_dtype), (model.config.num_experts,)
    totals = [Argument("norm of the gradients", "gradient", (), dtype, ())]
    for name in stateful_routers(model):
        totals += [Argument(f"load of {name}", "gradient", shape, dtype, ((),)),
                   Argument(f"tokens of {name}", "gradient", (), dtype, ())]
    return totals


def has_two_programs(layout: Layout) -> bool:
    """Returns whether the layout trains in two functions on a TPU. DTensor does, tf.distribute does not."""
    return layout.backend in ("auto", "dtensor")


def _lower(variables, layout, inputs, function, first_results=()):
    """Lowers a function of tensors. Its first results are split like `first_results`, the others not at all."""
    specs = [tf.TensorSpec(argument.shape, argument.dtype) for argument in inputs]
    traced = tf.function(lambda *tensors: tf.nest.flatten(function(*tensors)), jit_compile=True, autograph=False)
    concrete = traced.get_concrete_function(*specs)
    with warnings.catch_warnings():
        # TensorFlow calls the argument deprecated, but without it refuses programs with variables.
        warnings.simplefilter("ignore", UserWarning)
        text = traced.experimental_get_compiler_ir(*specs)(stage="stablehlo", device_name="/device:CPU:0")
    arguments = [*inputs, *(_argument(variable, layout) for variable in _captured(concrete, variables))]
    results = [argument.spec for argument in first_results]
    results += [((),) * output.shape.rank for output in concrete.outputs[len(results):]]
    updated = [int(index) for index in re.findall(r"parameter_number = (\d+)", _alias_attribute(text))]
    return Lowered(_with_iota_devices(text, tuple(layout.mesh.values())), arguments, results, updated, layout)


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


def _captured(concrete, variables):
    """Returns the Keras variables in the order of the program's arguments."""
    by_handle = {id(variable.value.handle): variable for variable in variables}
    return [by_handle[id(handle)] for handle in concrete.captured_inputs]


def _argument(variable, layout):
    kind = "weight" if variable.trainable else "slot"
    spec = layout.spec(axes_of(variable), at_rest=True)
    if isinstance(variable.value, UnfoldedVariable):
        spec = tuple((axis,) if axis else () for axis in unfolding(variable.shape, spec, layout.mesh)[1])
    return Argument(variable.path, kind, tuple(stored(variable).shape), variable.dtype, spec)


def _create_without_memory(layout, next_creator, **kwargs):
    value = kwargs["initial_value"]
    with tf.Graph().as_default():  # only for the shape and dtype
        symbolic = tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))
    axes, shape = axes_of_new_variable(symbolic.shape.rank), tuple(symbolic.shape)
    if not any(axes):
        return next_creator(**kwargs)  # too small to matter
    how, _ = unfolding(shape, layout.spec(axes, at_rest=True), layout.mesh)
    variable = next_creator(**{**kwargs, "initial_value": _reserved(how.stored_shape, symbolic.dtype)})
    return UnfoldedVariable(variable, how) if how.first else variable


def _reserved(shape, dtype):
    """Returns a tensor of zeros in untouched pages, which costs only address space."""
    size = math.prod(shape) * dtype.size
    pages = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    array = np.frombuffer(pages, dtype.as_numpy_dtype, count=math.prod(shape)).reshape(shape)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _alias_attribute(text):
    match = re.search(r"mhlo\.input_output_alias = \[(.*?)\]\s*[,}]", text, re.DOTALL)
    return match[1] if match else ""


def iota(mesh_shape: Sequence[int], order: Sequence[int]) -> str:
    """Returns XLA's text for the devices of a mesh in a transposed order. XLA rejects an identity transposition."""
    sizes = f"<=[{','.join(map(str, mesh_shape))}]"
    if list(order) == sorted(order):
        return f"<=[{math.prod(mesh_shape)}]"
    return f"{sizes}T({','.join(map(str, order))})"


def _with_iota_devices(text, mesh_shape):
    """Replaces lists of all devices by transposed ranges, so that annotations do not grow with the mesh."""
    devices = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    ranges = {}
    for order in itertools.permutations(range(len(mesh_shape))):
        listed = ",".join(map(str, devices.transpose(order).reshape(-1)))
        ranges.setdefault(listed, iota(mesh_shape, order))
    return re.sub(r"(devices=\[[\d,]+\])(\d+(?:,\d+)*)", lambda found: found[1] + ranges[found[2]], text)
