"""Every layout makes the steps that one device makes: loss, every gradient, every weight; dropout and jitter on."""

import functools

import pytest

from switch_tf import SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.partitioning.backends import create_partitioner
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import verification
from tests.parity.steps import KINDS, OPTIMIZERS, PLAIN, Precision, assert_same, batches, small_config

OVER_SEVERAL = (
    ("vocab", ("data", "x", "y")), ("mlp", ("y", "x", "data")), ("kv", ("x", "y")), ("expert_mlp", ("x", "y")))
# A file of gin/layouts, on all eight devices or on those of a mesh.
LAYOUTS = {
    "data": ("data",), "expert over 4": ("expert", "data=4"), "expert over 8": ("expert",),
    "data=2 x model=4": ("data_model", "data=2,model=4"), "expert over 4 x model=2": ("expert_model",),
    "fully sharded over 8": ("fully_sharded",), "fully sharded over 4 x model=2": ("fully_sharded_model",),
    "weights over several axes": ("fully_sharded", "data=2,x=2,y=2"),
}
WITH_DECODER = ("expert over 4 x model=2", "weights over several axes")
ONE_AXIS = ("expert over 8", "expert over 4", "fully sharded over 8")  # what a slow test has beside another axis
_assert_same = functools.partial(assert_same, Precision("float32", steps=4, loss=1e-6, rest=1e-5))


def _partitioner(name, make_partitioner):
    changes = {"at_rest_rules": OVER_SEVERAL} if name == "weights over several axes" else {}
    return make_partitioner(*LAYOUTS[name], **changes)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.exhaustive if name in ONE_AXIS else pytest.mark.slow)
    for name in LAYOUTS])
def test_a_layout_computes_what_one_device_does(name, make_partitioner):
    _assert_same(_partitioner(name, make_partitioner), small_config(num_decoder_layers=int(name in WITH_DECODER)))


@pytest.mark.slow
@pytest.mark.parametrize("changes, optimizer", [  # pjrt_test.py lays out every kind
    kind if kind in KINDS[:3] else pytest.param(*kind, marks=pytest.mark.exhaustive) for kind in KINDS],
    ids=lambda of: of if isinstance(of, str) else "-".join(str(value) for value in of.values()))
def test_every_kind_of_model_can_be_laid_out(changes, optimizer, make_partitioner):
    _assert_same(make_partitioner("expert_model"), small_config(**changes, num_decoder_layers=0), optimizer)


@pytest.mark.slow
def test_adam_reads_no_variable_after_its_update_in_a_model_of_two_stacks(make_partitioner):
    config = small_config(num_decoder_layers=2, decoder_sparse_step=2)
    _assert_same(make_partitioner("expert_model"), config, "adam")


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "expert over 8", pytest.param("weights over several axes", marks=pytest.mark.exhaustive)])
def test_microbatches_and_rematerialisation_under_dtensor_with_experts_in_attention(name, make_partitioner):
    config = small_config(num_decoder_layers=0, remat=True, expert_sublayers="attention")
    _assert_same(_partitioner(name, make_partitioner), config, settings=StepSettings(num_microbatches=2))


@pytest.mark.slow
def test_in_bfloat16_pieces_of_weights_do_not_decide_how_activations_are_laid_out(make_partitioner):
    # They would split the bits of dropout, too, and DTensor cannot move unsigned integers between devices. GEGLU, as a
    # rounding of bfloat16 brings hidden units over the edge of a ReLU.
    config = small_config(num_decoder_layers=0, d_model=32, activation="geglu")
    one, other = (verification.Twin(lambda: SwitchTransformer(config, dtype="mixed_bfloat16"), OPTIMIZERS["adafactor"],
                                    partitioner, 8, PLAIN).train(batches(config, 4))
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
    _assert_same(partitioner, small_config(num_decoder_layers=0, remat=num_microbatches > 1), "adam", settings)


def test_the_tests_have_their_devices(shipped_layout):
    assert create_partitioner(shipped_layout("data")).mesh.size == 8
