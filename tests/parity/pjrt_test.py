"""The pjrt back end makes the steps of TensorFlow on one device, in float64: loss, every gradient, every weight."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.configs import shipped_gin
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import verification

# A mesh of at most eight devices for each file of gin/layouts.
MESHES = {
    "single": "data=1", "data": "data=8", "expert": "data=4", "data_expert": "data=2,expert=4",
    "data_model": "data=2,model=4", "expert_model": "data=4,model=2", "fully_sharded": "data=4",
    "fully_sharded_model": "data=4,model=2", "fully_sharded_experts": "fsdp=2,data=2,expert=2",
    "pod_256": "data=2,model=2", "pod_256_experts": "expert_outer=2,data=2,expert=2,fsdp=1",
    "pod_512": "data=4,model=2", "pod_512_experts": "data=8",
    "pod_512_fully_sharded": "expert=2,expert_x=1,expert_y=1,fsdp_y=1,data_y=2,fsdp=2,data=1"}
QUICK = ("fully_sharded_experts",)
OPTIMIZERS = {"adafactor": lambda: Adafactor(0.01), "adam": lambda: keras.optimizers.Adam(0.001)}
STEPS = 3
PLAIN = StepSettings()


def _config(**changes):
    sizes = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_heads": 4, "d_kv": 8, "num_encoder_layers": 1,
             "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 0}
    routing = {"num_experts": 8, "num_groups_multiple": 16, "min_expert_capacity": 1, "jitter_noise": 0.1}
    return SwitchConfig(**{**sizes, **routing, "dropout_rate": 0.1, "expert_dropout_rate": 0.1, **changes})


def _batches(config):
    """Sequences of different lengths, so that padding is spread unevenly over devices."""
    random = np.random.RandomState(0)
    batches = []
    for _ in range(STEPS):
        inputs, targets = (random.randint(1, config.vocab_size, (16, length)) for length in (16, 8))
        inputs[np.arange(16) > random.randint(4, 17, (16, 1))] = 0
        targets[:, 6:] *= random.randint(0, 2, (16, 2))
        if config.is_encoder_only:
            targets = inputs
        stack = "encoder" if config.is_encoder_only else "decoder"
        batches.append({name: tf.constant(value, tf.int32) for name, value in {
            "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1], "encoder_input_tokens": inputs,
            f"{stack}_target_tokens": targets, f"{stack}_loss_weights": targets > 0}.items()})
    return batches


@functools.cache
def _on_one_device(config, optimizer, settings):
    return _train(Partitioner(), config, optimizer, settings)


def _train(partitioner, config, optimizer, settings):
    return verification.train(lambda: SwitchTransformer(config, dtype="float64"), OPTIMIZERS[optimizer], partitioner,
                              _batches(config), 7, settings)


def _assert_same(partitioner, config, optimizer="adafactor", settings=PLAIN):
    one, other = _on_one_device(config, optimizer, settings), _train(partitioner, config, optimizer, settings)
    found = verification.compare(one, other)
    assert found.loss.value <= 1e-14
    assert found.gradient.value <= 1e-12, found.gradient
    assert found.later_loss.value <= 1e-12
    assert found.weight.value <= 1e-12, found.weight
    assert len({one for one, _ in found.losses}) == STEPS  # something was learnt


def test_every_shipped_layout_has_a_mesh_here():
    assert set(MESHES) == {file.stem for file in shipped_gin.path("gin/layouts").glob("*.gin")}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MESHES])
def test_a_layout_computes_what_one_device_does(name, make_partitioner):
    _assert_same(make_partitioner(name, MESHES[name], backend="pjrt"), _config())


KINDS = [
    ({"routing_policy": "top_n", "num_selected_experts": 3, "activation": "geglu", "logits_via_embedding": False},
     "adam"),
    ({"routing_policy": "expert_choice"}, "adafactor"),
    ({"expert_sublayers": "feed_forward_and_attention"}, "adafactor"), ({"routing_policy": "top2"}, "adafactor"),
    ({"routing_policy": "hash"}, "adafactor"),
    ({"routing_policy": "ntlb", "semantics": "mtf", "extra_mlp": True}, "adafactor"),
    ({"routing_policy": "batch_prioritized", "num_selected_experts": 2, "exploration": "sample"}, "adafactor"),
    ({"routing_policy": "sinkhorn", "semantics": "t5x"}, "adafactor")]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.exhaustive), "expert_model"])
@pytest.mark.parametrize("changes, optimizer", KINDS,
                         ids=lambda of: of if isinstance(of, str) else "-".join(str(value) for value in of.values()))
def test_every_kind_of_model_can_be_laid_out(changes, optimizer, layout, make_partitioner):
    _assert_same(make_partitioner(layout, MESHES[layout], backend="pjrt"), _config(**changes, num_decoder_layers=0),
                 optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "fully_sharded_experts"])
def test_microbatches_rematerialisation_clipping_and_frozen_weights(layout, make_partitioner):
    config = _config(remat=True, expert_sublayers="attention")
    settings = StepSettings(num_microbatches=2, clip_norm=0.1, trainable="experts")
    _assert_same(make_partitioner(layout, MESHES[layout], backend="pjrt"), config, settings=settings)
