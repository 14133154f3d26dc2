"""Learning rate schedules. For a constant rate, as T5 fine-tunes, give the optimizer a number."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("switch_tf")
class RsqrtDecay(keras.optimizers.schedules.LearningRateSchedule):
    """T5's pretraining schedule: base / sqrt(max(step, warmup_steps)), constant until `warmup_steps`.

    Args:
        base: float. 1.0 with Adafactor's relative step sizes.
        warmup_steps: int, at least 1. 10,000 in T5.
    """

    def __init__(self, base=1.0, warmup_steps=10_000):
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps must be at least 1, not {warmup_steps!r}: the rate at step 0 would be "
                             "infinite.")
        self.base = base
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        return self.base * ops.rsqrt(ops.maximum(ops.cast(step, "float32"), float(self.warmup_steps)))

    def get_config(self):
        return {"base": self.base, "warmup_steps": self.warmup_steps}
