"""Parts of a run by full name, as gin files bind them.

Gin files are read before TensorFlow is imported, so parts that need it are listed with their parameters.
"""

import dataclasses
import functools
import importlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from switch_tf.configs.choices import by_name, nearest
from switch_tf.refusals import Refusal, first_line

CONFIG = "switch_tf.configs.switch_config.SwitchConfig"
RUN, STEP_SETTINGS = "switch_tf.configs.run.Run", "switch_tf.configs.run.StepSettings"
LAYOUT = "switch_tf.partitioning.layout.Layout"
COMPARISON = "switch_tf.comparison.description.Comparison"
MODEL = "switch_tf.models.switch_transformer.SwitchTransformer"
DTYPE_POLICY = "switch_tf.ops.dtypes.dtype_policy"
PARTITIONER = "switch_tf.partitioning.backends.create_partitioner"
TRAINER = "switch_tf.training.trainer.Trainer"
ADAFACTOR, RSQRT_DECAY = "switch_tf.optim.adafactor.Adafactor", "switch_tf.optim.schedules.RsqrtDecay"
TASKS = "switch_tf.tasks"
# Parts without TensorFlow.
DATA = (CONFIG, RUN, STEP_SETTINGS, LAYOUT, COMPARISON, f"{TASKS}.text_files.pretraining",
        f"{TASKS}.text_files.text_to_text")
# Parts with TensorFlow -> parameters.
_MADE = {
    MODEL: "config dtype name",
    DTYPE_POLICY: "activation_dtype",
    ADAFACTOR:
        "learning_rate decay_exponent epsilon clip_threshold scales_by_parameter minimum_scale name weight_decay "
        "clipnorm clipvalue global_clipnorm use_ema ema_momentum ema_overwrite_frequency loss_scale_factor "
        "gradient_accumulation_steps",
    RSQRT_DECAY: "base warmup_steps",
    "switch_tf.optim.schedules.Cooldown": "schedule last_step share",
    "switch_tf.surgery.distillation.Distillation":
        "teacher soft_weight temperature teacher_capacity_factor dtype predictions",
    PARTITIONER: "layout",
    TRAINER: "model optimizer run step_settings partitioner initial_weights activation_dtype objective",
}
PARTS = (*DATA, *_MADE)
# Modules in gin files of earlier versions.
_EARLIER = {
    "switch_tf.config": (CONFIG,), "switch_tf.training.run": (RUN, STEP_SETTINGS),
    "switch_tf.partitioning.dtypes": (DTYPE_POLICY,), "switch_tf.partitioning": (DTYPE_POLICY,),
    "switch_tf.configs.factories": tuple(_MADE),
}


NAMES = {f"{module}.{part.rpartition('.')[2]}": part for module, parts in _EARLIER.items() for part in parts}
for _part in PARTS:  # a package that contains the module also names a part, except tasks
    _module, _, _last = _part.rpartition(".")
    while _module and _module != TASKS:
        NAMES[f"{_module}.{_last}"] = _part
        _module = _module.rpartition(".")[0] if not _module.startswith(TASKS) else ""
MODULES = {name.rpartition(".")[0] for name in NAMES}

_KERAS = {
    "keras.optimizers": "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Muon Nadam RMSprop SGD "
                        "ScheduleFreeAdamW",
    "keras.optimizers.schedules": "CosineDecay CosineDecayRestarts ExponentialDecay InverseTimeDecay "
                                  "PiecewiseConstantDecay PolynomialDecay"}
# Names that a stranger's gin file may refer to.
ALLOWED = {*PARTS, *(f"{module}.{name}" for name, module in by_name(_KERAS).items())}
# Functions of t5 that read gin's configuration. They may be bound, not referenced.
LIBRARIES = {
    "t5.data.preprocessors":
        "concatenate_and_split_to_fixed_length denoise drop_noise_tokens drop_nonnoise_tokens filter_by_string_length "
        "iid_noise_mask noise_span_to_sentinel noise_span_to_unique_sentinel noise_token_to_gathered_token "
        "noise_token_to_random_token noise_token_to_random_token_or_sentinel noise_token_to_sentinel "
        "nonnoise_span_to_sentinel nonnoise_span_to_unique_sentinel permute_noise_tokens random_prefix_noise_mask "
        "random_spans_helper random_spans_noise_mask random_spans_targets_length random_spans_tokens_length record "
        "reduce_concat_tokens regular_noise_mask select_random_chunk sentinel_id split_tokens "
        "split_tokens_to_inputs_length split_tokens_to_random_length split_tokens_to_targets_length unsupervised",
    "t5.data.utils": "rate_num_examples rate_unsupervised",
}
IN_LIBRARIES = {f"{module}.{name}" for name, module in by_name(LIBRARIES).items()}
BOUND = ALLOWED | IN_LIBRARIES

_DEEPEST = 20  # nesting of brackets


@dataclasses.dataclass(frozen=True)
class Part:
    """A function or class by full name, with arguments that may contain parts.

    Without `is_made` it stays a function.
    """

    name: str
    arguments: dict[str, Any]
    is_made: bool = True

    def make(self) -> Any:
        """Imports the function or class and calls it. Errors of other libraries become Refusals."""
        target, arguments = find(self.name), made(self.arguments)
        if not self.is_made:
            return functools.partial(target, **arguments) if arguments else target
        last, parameters = self.name.rpartition(".")[2], parameters_of(target) or {}
        if missing := [name for name, parameter in parameters.items()
                       if parameter.default is parameter.empty and name not in arguments]:
            raise Refusal(f"{last} lacks {', '.join(missing)}; bind {'it' if len(missing) == 1 else 'them'} in a gin "
                          f"file, as in {last}.{missing[0]} = VALUE.")
        try:
            return target(**arguments)
        except (RuntimeError, ValueError, TypeError) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            raised_in = frame.f_globals.get("__name__", "").partition(".")[0]
            if isinstance(error, Refusal) or raised_in == __name__.partition(".")[0]:
                raise
            raise Refusal(first_line(error)) from error


def made(value: Any) -> Any:
    """Makes all parts in a value."""
    return mapped(value, lambda leaf: leaf.make() if isinstance(leaf, Part) else leaf)


def mapped(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """Applies a function to the leaves and keys of nested containers.

    Raises:
        RecursionError: The value is nested too deeply.
    """
    if depth > _DEEPEST:
        raise RecursionError
    match value:
        case dict():
            return {mapped(key, change, depth + 1): mapped(entry, change, depth + 1) for key, entry in value.items()}
        case list() | tuple():
            return type(value)(mapped(entry, change, depth + 1) for entry in value)
    return change(value)


def leaves(value: Any) -> list:
    """Returns the leaves and keys of nested lists, tuples and dictionaries."""
    entries = []
    mapped(value, entries.append)
    return entries


def find(name: str) -> Any:
    """Imports and returns the object with a full name."""
    module, _, last = name.rpartition(".")
    if not module:
        raise Refusal(f"There is no module {last!r}.{nearest(last, sorted(MODULES))}")
    try:
        above = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        above = find(module)
    if hasattr(above, last):
        return getattr(above, last)
    raise Refusal(f"{module} has no {last!r}.{nearest(last, dir(above))}")


def parameters_of(target: Any) -> dict[str, inspect.Parameter] | None:
    """Returns the parameters of a function or class, or None if it takes any."""
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # written in C
        return None
    kinds = [parameter.kind for parameter in parameters.values()]
    return None if inspect.Parameter.VAR_KEYWORD in kinds else {
        name: parameter for name, parameter in parameters.items() if parameter.kind != parameter.VAR_POSITIONAL}


@functools.cache
def parameters(part: str) -> list[str]:
    """Returns the parameter names of one of PARTS."""
    return _MADE[part].split() if part in _MADE else list(parameters_of(find(part)))
