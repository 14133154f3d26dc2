"""A training step as one StableHLO program for every device of a mesh, from shapes alone: no weight is ever in memory.

The step is the one that a TPU traces: `compile_steps` of one device, its condition inside, with `constrain` and `use`
backed by XLA's annotations. Variables lie in pages that are reserved and never touched.
"""

import contextlib
import itertools
import math
import mmap
import re
import warnings
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from switch_tf.partitioning.axes import annotated_by, axes_of, axes_of_new_variable
from switch_tf.partitioning.gspmd import XlaAnnotator
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training.objective import target_features
from switch_tf.training.train_step import compile_steps

_MAP_NORESERVE = 0x4000  # of Linux; Python names it since 3.13


class Argument(NamedTuple):
    """An argument of the program, which is also a result where the step updates it.

    `name`: a variable's path, or a feature's name; `kind`: "weight", "slot" or "feature"; `spec`: the mesh axis that
    splits each dimension at rest, or None.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | None, ...]


class Lowered(NamedTuple):
    """`text`: StableHLO with annotations for the mesh of `layout`; `arguments`: of its main function, in order;
    `num_metrics`: results before those that replace arguments; `updated`: the arguments that those replace, in order.
    """

    text: str
    arguments: list[Argument]
    num_metrics: int
    updated: list[int]
    layout: Layout


class ShapesOnly(Partitioner):
    """Creates variables without memory, and annotates what one device would trace."""

    def __init__(self, layout):
        super().__init__(layout)
        self._annotator = XlaAnnotator(layout, tuple(layout.mesh))

    @contextlib.contextmanager
    def creates_variables(self):
        with tf.variable_creator_scope(_create_without_memory):
            yield

    def step(self, compute, apply, use_xla=False):
        annotated = annotated_by(self._annotator)
        return super().step(annotated(compute), annotated(apply))

    def compile(self, function, use_xla=False):
        return function  # traced, once, by `lower_step`


def lower_step(model, optimizer, layout, batch_size, task_feature_lengths, settings) -> Lowered:
    """Lowers one training step.

    Args:
        model: SwitchTransformer that is not built.
        optimizer: Keras optimizer that is not built.
        layout: Layout with its mesh complete.
        batch_size: int, sequences of the whole batch.
        task_feature_lengths: dict, "inputs" and "targets" in tokens.
        settings: StepSettings.
    """
    partitioner = ShapesOnly(layout)
    partitioner.build(model, optimizer)
    step = compile_steps(model, optimizer, 0, settings, partitioner)
    features = feature_specs(model.config, batch_size, task_feature_lengths)

    def flat(*tensors):
        placed = {name: tensor[None] for name, tensor in zip(features, tensors, strict=True)}
        return tf.nest.flatten(step(placed))

    traced = tf.function(flat, jit_compile=True, autograph=False)
    concrete = traced.get_concrete_function(*features.values())
    with warnings.catch_warnings():
        # TensorFlow calls the argument deprecated, but without it refuses programs with variables.
        warnings.simplefilter("ignore", UserWarning)
        text = traced.experimental_get_compiler_ir(*features.values())(stage="stablehlo", device_name="/device:CPU:0")
    arguments = [Argument(name, "feature", tuple(spec.shape), spec.dtype.name, layout.spec(("batch", "length")))
                 for name, spec in features.items()]
    arguments += [_argument(variable, layout) for variable in _captured(concrete, model, optimizer)]
    num_metrics = len(concrete.outputs)
    updated = [int(index) for index in re.findall(r"parameter_number = (\d+)", _alias_attribute(text))]
    return Lowered(_with_iota_devices(text, tuple(layout.mesh.values())), arguments, num_metrics, updated, layout)


def feature_specs(config, batch_size, task_feature_lengths) -> dict[str, tf.TensorSpec]:
    """What seqio's feature converter makes of a task without packing, as shapes."""
    lengths = {"encoder_input_tokens": "inputs"}
    if not config.is_encoder_only:
        lengths["decoder_input_tokens"] = "targets"
    lengths |= dict.fromkeys(target_features(config), "targets")
    return {name: tf.TensorSpec((batch_size, task_feature_lengths[length]), tf.int32, name=name)
            for name, length in lengths.items()}


def _captured(concrete, model, optimizer):
    """Keras variables in the order in which the program takes them."""
    by_handle = {id(variable.value.handle): variable for variable in [*model.variables, *optimizer.variables]}
    return [by_handle[id(handle)] for handle in concrete.captured_inputs]


def _argument(variable, layout):
    kind = "weight" if variable.trainable else "slot"
    spec = layout.spec(axes_of(variable), at_rest=True)
    return Argument(variable.path, kind, tuple(variable.shape), variable.dtype, spec)


def _create_without_memory(next_creator, **kwargs):
    value = kwargs["initial_value"]
    with tf.Graph().as_default():  # to know its shape and dtype
        symbolic = tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))
    if not any(axes_of_new_variable(symbolic.shape.rank)):
        return next_creator(**kwargs)  # a small one
    return next_creator(**{**kwargs, "initial_value": _reserved(symbolic.shape.as_list(), symbolic.dtype)})


def _reserved(shape, dtype):
    """A tensor of zeros in pages that stay untouched, so that it costs address space alone."""
    size = math.prod(shape) * dtype.size
    pages = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    array = np.frombuffer(pages, dtype.as_numpy_dtype, count=math.prod(shape)).reshape(shape)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _alias_attribute(text):
    found = re.search(r"mhlo\.input_output_alias = \[(.*?)\]\s*[,}]", text, re.DOTALL)
    return found[1] if found else ""


def iota(mesh_shape, order) -> str:
    """XLA's text for the devices of a mesh in a transposed order; it does not read a transposition that is none."""
    sizes = f"<=[{','.join(map(str, mesh_shape))}]"
    if list(order) == sorted(order):
        return f"<=[{math.prod(mesh_shape)}]"
    return f"{sizes}T({','.join(map(str, order))})"


def _with_iota_devices(text, mesh_shape):
    """Writes lists of all devices as transposed ranges, so that an annotation does not grow with the mesh."""
    devices = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    ranges = {}
    for order in itertools.permutations(range(len(mesh_shape))):
        listed = ",".join(map(str, devices.transpose(order).reshape(-1)))
        ranges.setdefault(listed, iota(mesh_shape, order))
    return re.sub(r"(devices=\[[\d,]+\])(\d+(?:,\d+)*)", lambda found: found[1] + ranges[found[2]], text)
