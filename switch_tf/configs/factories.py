"""Parts of a run as gin files name them: functions that import what they make when they are called.

Gin files are parsed, and mistakes in them refused, before TensorFlow and Keras are imported. Each function has the
name, the parameters and the defaults of what it makes, so that gin binds, checks and writes the same values.
"""

import importlib

# Modules by the names of the parts that they define. All are on higher floors, so they are named, not imported.
MODULES = {
    "Adafactor": "switch_tf.optim.adafactor",
    "Cooldown": "switch_tf.optim.schedules",
    "RsqrtDecay": "switch_tf.optim.schedules",
    "SwitchTransformer": "switch_tf.models.switch_transformer",
    "Trainer": "switch_tf.training.trainer",
    "create_partitioner": "switch_tf.partitioning.backends",
    "dtype_policy": "switch_tf.ops.dtypes",
}


def SwitchTransformer(config, dtype=None, name="switch_transformer"):
    """Returns a new model, not built."""
    return _make("SwitchTransformer", locals())


def dtype_policy(activation_dtype="auto"):
    """Returns the name of the Keras dtype policy for a dtype of activations."""
    return _make("dtype_policy", locals())


def Adafactor(learning_rate=1e-3, decay_exponent=0.8, epsilon=1e-30, clip_threshold=1.0, scales_by_parameter=True,
              minimum_scale=1e-3, name="adafactor", weight_decay=None, clipnorm=None, clipvalue=None,
              global_clipnorm=None, use_ema=False, ema_momentum=0.99, ema_overwrite_frequency=None,
              loss_scale_factor=None, gradient_accumulation_steps=None):
    """Returns a new optimizer; the parameters after `name` are those of every Keras optimizer."""
    return _make("Adafactor", locals())


def RsqrtDecay(base=1.0, warmup_steps=10_000):
    """Returns T5's learning rate schedule."""
    return _make("RsqrtDecay", locals())


def Cooldown(schedule, last_step, share=0.3):
    """Returns a schedule that brings another one down to 0 at the end of a run."""
    return _make("Cooldown", locals())


def create_partitioner(layout):
    """Returns the partitioner for a layout on this machine's devices, which it starts."""
    return _make("create_partitioner", locals())


def Trainer(model, optimizer, run, step_settings=None, partitioner=None, initial_weights=None, activation_dtype=None,
            objective=None):
    """Returns the trainer of a run."""
    return _make("Trainer", locals())


def _make(name, arguments):
    return getattr(importlib.import_module(MODULES[name]), name)(**arguments)
