"""XLA's annotations and DTensor's layouts say the same of every tensor that the model constrains."""

import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer, context
from switch_tf.aot import lower
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning import backends, lowering
from switch_tf.partitioning.backends import dtensor as dtensor_module
from switch_tf.training.train_step import compile_steps

BATCH, LENGTHS = 16, {"inputs": 32, "targets": 16}


def _record(monkeypatch, owner, name, read):
    points = []
    original = getattr(owner, name)

    def call(*args):
        points.append(read(*args))
        return original(*args)

    monkeypatch.setattr(owner, name, call)
    return points


def _trace(partitioner, compute):
    """In place of a step, which DTensor would expand for every device."""

    def one_step(features, index):
        with context.within(annotator=partitioner):
            tf.function(compute, autograph=False).get_concrete_function(features)
        return {}, True

    return one_step


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "expert_model", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("expert", "data_model"))])
def test_both_back_ends_lay_every_constrained_tensor_out_alike(name, monkeypatch, shipped_layout):
    layout = shipped_layout(name, backend="dtensor")
    config = SwitchConfig(vocab_size=512, d_model=32, d_ff=64, num_heads=4, d_kv=8, num_encoder_layers=1,
                          num_decoder_layers=2, encoder_sparse_step=1, num_experts=8, num_groups_multiple=8)
    annotations = _record(monkeypatch, lowering.XlaAnnotator, "_split", lambda self, x, spec: (
        tuple(x.shape), tuple(axes[0] if axes else None for axes in spec)))
    with monkeypatch.context() as patch:
        # A weight that is used as it is stored is annotated for XLA and left alone by DTensor.
        for method in ("gather", "scatter", "replicate"):
            patch.setattr(lowering.XlaAnnotator, method, lambda self, value, axes=None: value)
        lower.lower_step(SwitchTransformer(config), Adafactor(0.01), layout, BATCH, LENGTHS, StepSettings())

    relayouts = _record(monkeypatch, dtensor_module.dtensor, "relayout", lambda x, wanted: (
        tuple(x.shape), tuple(None if spec == "unsharded" else spec for spec in wanted.sharding_specs)))
    partitioner = backends.create_partitioner(layout)
    model, optimizer = SwitchTransformer(config), Adafactor(0.01)
    partitioner.build(model, optimizer)
    with monkeypatch.context() as patch:
        for method in ("gather", "scatter"):
            patch.setattr(dtensor_module.DTensorPartitioner, method, lambda self, value, axes: value)
        patch.setattr(partitioner, "step", lambda compute, apply, use_xla: _trace(partitioner, compute))
        step = compile_steps(model, optimizer, 0, StepSettings(), partitioner)
        features = {feature: tf.ones(spec.shape, tf.int32)
                    for feature, spec in lower.feature_specs(config, BATCH, LENGTHS).items()}
        relayouts.clear()
        step(partitioner.place(features))

    assert len(annotations) > 50
    assert relayouts[:len(annotations)] == annotations
