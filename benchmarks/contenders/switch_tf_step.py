"""switch_tf's training step as its trainer compiles it, dense or sparse, on one device or under a layout."""

import jax
import keras
import numpy as np
import tensorflow as tf
from layer_problem import LOAD_BALANCING_LOSS_WEIGHT, ROUTER_Z_LOSS_WEIGHT
from step_problem import batch

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.hardware import devices
from switch_tf.ops import dtypes
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning import Layout
from switch_tf.partitioning.backends import create_partitioner
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training.train_step import compile_steps


def step_under_layout(job):
    """Builds the same with "layout", the arguments of `Layout`, on "devices" virtual devices of the CPU."""
    devices.split_cpu(job["devices"])
    layout = {name: tuple(map(tuple, value)) if isinstance(value, list) else value
              for name, value in job["layout"].items()}
    return step(job, create_partitioner(Layout(**layout)))


def step_on_accelerator(job):
    """Builds the same with the pjrt back end, on the first GPU or TPU chip."""
    run, facts = step(job, create_partitioner(Layout(backend="pjrt")))
    return run, {**facts, "device": jax.devices()[0].device_kind}


def step(job, partitioner=None):
    """Builds one step of `compile_steps`; a job without experts is a dense model."""
    run, facts, _, _ = built(job, partitioner)
    return run, facts


def built(job, partitioner=None):
    """Returns the step, its facts, and the model and optimizer that it updates."""
    partitioner = partitioner or Partitioner()
    config = SwitchConfig(
        vocab_size=job["vocab_size"], d_model=job["d_model"], d_ff=job["d_ff"], d_kv=job["d_kv"],
        num_heads=job["heads"], num_encoder_layers=job["layers"], num_decoder_layers=job["layers"], dropout_rate=0.0,
        num_experts=job["experts"], train_capacity_factor=job["capacity_factor"], jitter_noise=0.0,
        load_balancing_loss_weight=LOAD_BALANCING_LOSS_WEIGHT, router_z_loss_weight=ROUTER_Z_LOSS_WEIGHT,
        num_groups_multiple=job.get("num_groups_multiple", 1), dispatch=job["dispatch"])
    keras.utils.set_random_seed(0)
    model = SwitchTransformer(config, dtype=dtypes.dtype_policy(job.get("dtype", "float32")))
    optimizer = {"adamw": keras.optimizers.AdamW, "adafactor": Adafactor}[job["optimizer"]](job["learning_rate"])
    partitioner.build(model, optimizer)
    # No z-loss on the logits, because the others have none.
    settings = StepSettings(z_loss_weight=0.0, use_xla=job.get("xla", False))
    function = compile_steps(model, optimizer, 0, settings, partitioner)
    features = {name: tf.constant(value[None]) for name, value in _features(job).items()}

    def run():
        measured, bad_step = function(partitioner.place(features))
        if int(bad_step) >= 0:
            raise FloatingPointError("The loss or a gradient is not finite.")
        return measured

    first = run().batch.loss_terms["cross_entropy"]
    return run, {"parameters": config.num_parameters, "first_loss": round(float(first.value), 3),
                 "versions": {"tensorflow": tf.__version__, "keras": keras.__version__}}, model, optimizer


def _features(job):
    sources, targets = batch(job)
    return {"encoder_input_tokens": sources, "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
            "decoder_target_tokens": targets, "decoder_loss_weights": np.ones_like(targets)}
