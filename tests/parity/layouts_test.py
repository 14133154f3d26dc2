"""Every layout makes the steps that one device makes: loss, every gradient, every weight; dropout and jitter on."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.backends import create_partitioner
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import verification

OVER_SEVERAL = (
    ("vocab", ("data", "x", "y")), ("mlp", ("y", "x", "data")), ("kv", ("x", "y")), ("expert_mlp", ("x", "y")))
# A file of gin/layouts, on all eight devices or on those of a mesh.
LAYOUTS = {
    "data": ("data",), "expert over 4": ("expert", "data=4"), "expert over 8": ("expert",),
    "data=2 x model=4": ("data_model", "data=2,model=4"), "expert over 4 x model=2": ("expert_model",),
    "fully sharded over 8": ("fully_sharded",), "fully sharded over 4 x model=2": ("fully_sharded_model",),
    "weights over several axes": ("fully_sharded", "data=2,x=2,y=2"),
}
# Both axes; weights in pieces are in checkpoints/layouts_test.py, too.
QUICK = ("expert over 4 x model=2",)
ONE_AXIS = ("expert over 8", "expert over 4", "fully sharded over 8")  # what a slow test has beside another axis
OPTIMIZERS = {"adafactor": lambda: Adafactor(0.01), "adam": lambda: keras.optimizers.Adam(0.001)}
STEPS = 4
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
    return verification.train(lambda: SwitchTransformer(config), OPTIMIZERS[optimizer], partitioner, _batches(config),
                              7, settings)


def _partitioner(name, make_partitioner):
    changes = {"at_rest_rules": OVER_SEVERAL} if name == "weights over several axes" else {}
    return make_partitioner(*LAYOUTS[name], **changes)


def _assert_same(partitioner, config, optimizer="adafactor", settings=PLAIN):
    one, other = _on_one_device(config, optimizer, settings), _train(partitioner, config, optimizer, settings)
    found = verification.compare(one, other)
    assert found.loss.value <= 1e-6
    assert found.gradient.value <= 1e-5, found.gradient
    assert found.later_loss.value <= 1e-5
    assert found.weight.value <= 1e-5, found.weight
    assert len({one for one, _ in found.losses}) == STEPS  # something was learnt


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive if name in ONE_AXIS else pytest.mark.slow)
    for name in LAYOUTS])
def test_a_layout_computes_what_one_device_does(name, make_partitioner):
    _assert_same(_partitioner(name, make_partitioner), _config())


# Adam reads its slots after it has updated them, which DTensor once let it do too early.
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
@pytest.mark.parametrize("changes, optimizer", KINDS,
    ids=lambda of: of if isinstance(of, str) else "-".join(str(value) for value in of.values()))
def test_every_kind_of_model_can_be_laid_out(changes, optimizer, make_partitioner):
    _assert_same(make_partitioner("expert_model"), _config(**changes, num_decoder_layers=0), optimizer)


@pytest.mark.slow
def test_adam_reads_no_variable_after_its_update_in_a_model_of_two_stacks(make_partitioner):
    config = _config(num_decoder_layers=2, decoder_sparse_step=2)
    _assert_same(make_partitioner("expert_model"), config, "adam")


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "expert over 8", pytest.param("weights over several axes", marks=pytest.mark.exhaustive)])
def test_microbatches_and_rematerialisation_under_dtensor_with_experts_in_attention(name, make_partitioner):
    config = _config(num_decoder_layers=0, remat=True, expert_sublayers="attention")
    _assert_same(_partitioner(name, make_partitioner), config, settings=StepSettings(num_microbatches=2))


@pytest.mark.slow
def test_in_bfloat16_pieces_of_weights_do_not_decide_how_activations_are_laid_out(make_partitioner):
    # They would split the bits of dropout, too, and DTensor cannot move unsigned integers between devices. GEGLU, as a
    # rounding of bfloat16 brings hidden units over the edge of a ReLU.
    config = _config(num_decoder_layers=0, d_model=32, activation="geglu")
    one, other = (verification.train(lambda: SwitchTransformer(config, dtype="mixed_bfloat16"),
                                     OPTIMIZERS["adafactor"], partitioner, _batches(config), 8, PLAIN)
                  for partitioner in (Partitioner(), make_partitioner("fully_sharded")))
    found = verification.compare(one, other)
    assert found.loss.value <= 1e-3
    assert found.gradient.value <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas, num_microbatches", [
    (2, 1), pytest.param(2, 2, marks=pytest.mark.exhaustive), pytest.param(4, 1, marks=pytest.mark.exhaustive), (4, 2)])
def test_replicas_make_the_step_of_one_device(num_replicas, num_microbatches, make_partitioner):
    partitioner = make_partitioner("data", f"data={num_replicas}", backend="mirrored")
    settings = StepSettings(num_microbatches=num_microbatches, clip_norm=0.5)
    _assert_same(partitioner, _config(num_decoder_layers=0, remat=num_microbatches > 1), "adam", settings)


def test_the_tests_have_their_devices(shipped_layout):
    assert create_partitioner(shipped_layout("data")).mesh.size == 8
