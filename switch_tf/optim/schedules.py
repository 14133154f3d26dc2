"""Learning rate schedules. For a constant rate, pass a number to the optimizer."""

from typing import Any

import keras
from keras import ops

from switch_tf import checks
from switch_tf.partitioning.tensors import Tensor


@keras.saving.register_keras_serializable("switch_tf")
class RsqrtDecay(keras.optimizers.schedules.LearningRateSchedule):
    """T5's pretraining schedule: base / sqrt(max(step, warmup_steps)), constant until `warmup_steps`.

    Args:
        base: 0 or above. Use 1.0 with Adafactor's relative step sizes.
        warmup_steps: At least 1. T5 uses 10,000.
    """

    def __init__(self, base: float = 1.0, warmup_steps: int = 10_000):
        self.base = checks.number("base", base, "0 or above")
        self.warmup_steps = checks.integer("warmup_steps", warmup_steps, at_least=1)  # from 0 the rate is infinite

    def __call__(self, step: Tensor) -> Tensor:
        return self.base * ops.rsqrt(ops.maximum(ops.cast(step, "float32"), float(self.warmup_steps)))

    def get_config(self) -> dict[str, Any]:
        return dict(vars(self))


@keras.saving.register_keras_serializable("switch_tf")
class Cooldown(keras.optimizers.schedules.LearningRateSchedule):
    """Schedule with a linear decay to 0 at the end of a run (Zhai et al., arXiv 2106.04560, section 3.5).

    Without it, the final weights depend strongly on the last few batches.

    Args:
        schedule: Rate before the decay, 0 or above.
        last_step: Steps of the run, at least 1.
        share: In (0, 1]. Share of the steps with a decaying rate.
    """

    def __init__(self, schedule: float | keras.optimizers.schedules.LearningRateSchedule, last_step: int,
                 share: float = 0.3):
        self.schedule = schedule if callable(schedule) else float(checks.number("schedule", schedule, "0 or above"))
        self.last_step = checks.integer("last_step", last_step, at_least=1)
        self.share = checks.number("share", share, "in (0, 1]")

    def __call__(self, step: Tensor) -> Tensor:
        rate = self.schedule(step) if callable(self.schedule) else self.schedule
        remaining = (self.last_step - ops.cast(step, "float32")) / (self.share * self.last_step)
        return rate * ops.clip(remaining, 0.0, 1.0)

    def get_config(self) -> dict[str, Any]:
        schedule = keras.saving.serialize_keras_object(self.schedule) if callable(self.schedule) else self.schedule
        return {**vars(self), "schedule": schedule}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Cooldown":
        schedule = config["schedule"]
        if isinstance(schedule, dict):
            schedule = keras.saving.deserialize_keras_object(schedule)
        return cls(**{**config, "schedule": schedule})
