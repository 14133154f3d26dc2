"""Learning rate schedules. For a constant rate, as T5 fine-tunes, give the optimizer a number."""

import keras
from keras import ops

from switch_tf import checks


@keras.saving.register_keras_serializable("switch_tf")
class RsqrtDecay(keras.optimizers.schedules.LearningRateSchedule):
    """T5's pretraining schedule: base / sqrt(max(step, warmup_steps)), constant until `warmup_steps`.

    Args:
        base: float, 0 or above. 1.0 with Adafactor's relative step sizes.
        warmup_steps: int, at least 1. 10,000 in T5.
    """

    def __init__(self, base=1.0, warmup_steps=10_000):
        self.base = checks.number("base", base, "0 or above")
        self.warmup_steps = checks.integer("warmup_steps", warmup_steps, at_least=1)  # from 0 the rate is infinite

    def __call__(self, step):
        return self.base * ops.rsqrt(ops.maximum(ops.cast(step, "float32"), float(self.warmup_steps)))

    def get_config(self):
        return {"base": self.base, "warmup_steps": self.warmup_steps}
