"""Parts of a run as gin files name them: functions that import what they make when they are called.

Gin files are parsed, and mistakes in them refused, before TensorFlow and Keras are imported. Each function has the
name, the parameters and the defaults of what it makes, so that gin binds, checks and writes the same values.
"""

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

from switch_tf.configs.run import Run, StepSettings
from switch_tf.configs.switch_config import SwitchConfig

if TYPE_CHECKING:
    import keras


# Modules by the names of the parts that they define. All are on higher floors, so they are named, not imported.
MODULES = {
    "Adafactor": "switch_tf.optim.adafactor",
    "Cooldown": "switch_tf.optim.schedules",
    "Distillation": "switch_tf.surgery.distillation",
    "RsqrtDecay": "switch_tf.optim.schedules",
    "SwitchTransformer": "switch_tf.models.switch_transformer",
    "Trainer": "switch_tf.training.trainer",
    "create_partitioner": "switch_tf.partitioning.backends",
    "dtype_policy": "switch_tf.ops.dtypes",
}


def SwitchTransformer(config: SwitchConfig, dtype: str | None = None,
                      name: str = "switch_transformer") -> "keras.Model":
    """Returns a new model, not built."""
    return _make("SwitchTransformer", locals())


def dtype_policy(activation_dtype: str = "auto") -> str:
    """Returns the name of the Keras dtype policy for a dtype of activations."""
    return _make("dtype_policy", locals())


def Adafactor(learning_rate: "float | keras.optimizers.schedules.LearningRateSchedule" = 1e-3,
              decay_exponent: float = 0.8, epsilon: float = 1e-30, clip_threshold: float = 1.0,
              scales_by_parameter: bool = True, minimum_scale: float = 1e-3, name: str = "adafactor",
              weight_decay: float | None = None, clipnorm: float | None = None, clipvalue: float | None = None,
              global_clipnorm: float | None = None, use_ema: bool = False, ema_momentum: float = 0.99,
              ema_overwrite_frequency: int | None = None, loss_scale_factor: float | None = None,
              gradient_accumulation_steps: int | None = None) -> "keras.optimizers.Optimizer":
    """Returns a new optimizer; the parameters after `name` are those of every Keras optimizer."""
    return _make("Adafactor", locals())


def RsqrtDecay(base: float = 1.0, warmup_steps: int = 10_000) -> "keras.optimizers.schedules.LearningRateSchedule":
    """Returns T5's learning rate schedule."""
    return _make("RsqrtDecay", locals())


def Cooldown(schedule: "float | keras.optimizers.schedules.LearningRateSchedule", last_step: int,
             share: float = 0.3) -> "keras.optimizers.schedules.LearningRateSchedule":
    """Returns a schedule that brings another one down to 0 at the end of a run."""
    return _make("Cooldown", locals())


def Distillation(teacher: str, soft_weight: float = 0.25, temperature: float = 1.0,
                 teacher_capacity_factor: float | None = None, dtype: str | None = None,
                 predictions: str | None = None) -> Any:
    """Returns the objective that learns from a larger model as well."""
    return _make("Distillation", locals())


def create_partitioner(layout: Any) -> Any:
    """Returns the partitioner for a layout on this machine's devices, which it starts."""
    return _make("create_partitioner", locals())


def Trainer(model: "keras.Model", optimizer: "keras.optimizers.Optimizer", run: Run,
            step_settings: StepSettings | None = None, partitioner: Any = None,
            initial_weights: str | pathlib.Path | None = None, activation_dtype: str | None = None,
            objective: Any = None) -> Any:
    """Returns the trainer of a run."""
    return _make("Trainer", locals())


def _make(name, arguments):
    return getattr(importlib.import_module(MODULES[name]), name)(**arguments)
