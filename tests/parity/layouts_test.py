"""Every layout makes the steps that one device makes: loss, every gradient, every weight; dropout and jitter on."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.backends import create_partitioner
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import verification
from switch_tf.training.run import StepSettings

DATA = (("batch", "data"), ("group", "data"))
EXPERT = (*DATA, ("expert", "data"))
MODEL = (("heads", "model"), ("mlp", "model"), ("expert_mlp", "model"), ("vocab", "model"))
EXCHANGE = ("expert_embed", "model")
LAYOUTS = {
    "data=8": Layout("data=8", DATA),
    "expert over 4": Layout("data=4", EXPERT),
    "expert over 8": Layout("data=8", EXPERT),
    "data=2 x model=4": Layout("data=2,model=4", (*DATA, *MODEL)),
    "expert over 4 x model=2": Layout("data=4,model=2", (*EXPERT, *MODEL, EXCHANGE)),
    "fully sharded over 8": Layout("data=8", EXPERT, at_rest_rules=(("embed", "data"),)),
}
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


def _first(layout):
    """The layout's partitioner on the first of the test process's devices."""
    from tensorflow.experimental import dtensor

    from switch_tf.partitioning.dtensor import DTensorPartitioner
    from switch_tf.partitioning.strategy import StrategyPartitioner

    names = [f"CPU:{index}" for index in range(layout.num_devices)]
    if layout.backend == "mirrored":
        # Collectives have room for one group of devices in a process, and this process has several.
        reduction = tf.distribute.ReductionToOneDevice()
        return StrategyPartitioner(layout, tf.distribute.MirroredStrategy(names, cross_device_ops=reduction))
    return DTensorPartitioner(layout, dtensor.create_mesh(list(layout.mesh.items()), devices=names))


@pytest.fixture(autouse=True, scope="module")
def _no_graph_optimisation():
    """TensorFlow would optimise each graph once for each device, which takes longer than the steps of a test."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


@functools.cache
def _on_one_device(config, optimizer, settings):
    return _train(Partitioner(), config, optimizer, settings)


def _train(partitioner, config, optimizer, settings):
    return verification.train(lambda: SwitchTransformer(config), OPTIMIZERS[optimizer], partitioner, _batches(config),
                              7, settings)


def _assert_same(partitioner, config, optimizer="adafactor", settings=PLAIN):
    one, other = _on_one_device(config, optimizer, settings), _train(partitioner, config, optimizer, settings)
    found = verification.compare(one, other)
    assert found.loss.value <= 1e-6
    assert found.gradient.value <= 1e-5, found.gradient
    assert found.later_loss.value <= 1e-5
    assert found.weight.value <= 1e-5, found.weight
    assert len({one for one, _ in found.losses}) == STEPS  # something was learnt


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_one_device_does(name):
    _assert_same(_first(LAYOUTS[name]), _config())


def test_adam_reads_no_variable_after_its_update():
    config = _config(num_decoder_layers=2, decoder_sparse_step=2)
    _assert_same(_first(LAYOUTS["expert over 4 x model=2"]), config, "adam")


KINDS = [
    {"routing_policy": "top_n", "num_selected_experts": 3, "activation": "geglu", "logits_via_embedding": False},
    {"routing_policy": "expert_choice"}, {"expert_sublayers": "feed_forward_and_attention"}]
MORE_KINDS = [
    {"routing_policy": "top2"}, {"routing_policy": "hash"},
    {"routing_policy": "ntlb", "semantics": "mtf", "extra_mlp": True},
    {"routing_policy": "batch_prioritized", "num_selected_experts": 2, "exploration": "sample"},
    {"routing_policy": "sinkhorn", "semantics": "t5x"}]


@pytest.mark.parametrize("changes", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS)],
                         ids=lambda changes: "-".join(str(value) for value in changes.values()))
def test_every_kind_of_model_can_be_laid_out(changes):
    config = _config(**changes, num_decoder_layers=0)
    _assert_same(_first(LAYOUTS["expert over 4 x model=2"]), config)


def test_microbatches_and_rematerialisation_under_dtensor():
    config = _config(num_decoder_layers=0, remat=True)
    _assert_same(_first(LAYOUTS["expert over 8"]), config, settings=StepSettings(num_microbatches=2))


def test_in_bfloat16_pieces_of_weights_do_not_decide_how_activations_are_laid_out():
    # They would split the bits of dropout, too, and DTensor cannot move unsigned integers between devices.
    config = _config(num_decoder_layers=0, d_model=32)
    one, other = (verification.train(lambda: SwitchTransformer(config, dtype="mixed_bfloat16"),
                                     OPTIMIZERS["adafactor"], partitioner, _batches(config), 7, PLAIN)
                  for partitioner in (Partitioner(), _first(LAYOUTS["fully sharded over 8"])))
    found = verification.compare(one, other)
    assert found.loss.value <= 1e-3
    assert found.gradient.value <= 0.05


@pytest.mark.parametrize("num_replicas, num_microbatches", [
    (2, 1), (4, 2), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_replicas_make_the_step_of_one_device(num_replicas, num_microbatches):
    layout = Layout(f"data={num_replicas}", DATA, backend="mirrored")
    settings = StepSettings(num_microbatches=num_microbatches, clip_norm=0.5)
    _assert_same(_first(layout), _config(num_decoder_layers=0, remat=num_microbatches > 1), "adam", settings)


def test_the_tests_have_their_devices():
    assert create_partitioner(Layout("", DATA)).mesh.size == 8
