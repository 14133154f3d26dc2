"""The pjrt back end makes the steps of TensorFlow on one device, in float64: loss, every gradient, every weight."""

import functools

import pytest

from switch_tf.configs import shipped_gin
from switch_tf.configs.run import StepSettings
from tests.parity.steps import KINDS, Precision, assert_same, packed_batches, small_config

# A mesh of at most eight devices for each file of gin/layouts.
MESHES = {
    "single": "data=1", "data": "data=8", "expert": "data=4", "data_expert": "data=2,expert=4",
    "data_model": "data=2,model=4", "expert_model": "data=4,model=2", "fully_sharded": "data=4",
    "fully_sharded_model": "data=4,model=2", "fully_sharded_experts": "fsdp=2,data=2,expert=2",
    "pod_256": "data=2,model=2", "pod_256_experts": "expert_outer=2,data=2,expert=2,fsdp=1",
    "pod_512": "data=4,model=2", "pod_512_experts": "data=8",
    "pod_512_fully_sharded": "expert=2,expert_x=1,expert_y=1,fsdp_y=1,data_y=2,fsdp=2,data=1"}
QUICK = "fully_sharded_experts"
WITH_DECODER = (QUICK, "expert_model", "pod_512_fully_sharded")  # together they split whatever a decoder adds
_assert_same = functools.partial(assert_same, Precision("float64", steps=3, loss=1e-14, rest=1e-12))


def test_every_shipped_layout_has_a_mesh_here():
    # auto.gin chooses one of these.
    assert {*MESHES, "auto"} == {file.stem for file in shipped_gin.folder().glob("gin/layouts/*.gin")}


def test_a_layout_trains_an_encoder_as_one_device_does(make_partitioner):
    """The quick one of these tests: inference/pjrt_test.py has a decoder too."""
    _assert_same(make_partitioner(QUICK, MESHES[QUICK], backend="pjrt"), small_config(
        num_decoder_layers=0, dropout_rate=0.0, expert_dropout_rate=0.0))  # jitter is drawn still


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_layout_computes_what_one_device_does(name, make_partitioner):
    _assert_same(make_partitioner(name, MESHES[name], backend="pjrt"),
                 small_config(num_decoder_layers=int(name in WITH_DECODER)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.exhaustive), "expert_model"])
@pytest.mark.parametrize("changes, optimizer", KINDS,
                         ids=lambda of: of if isinstance(of, str) else "-".join(str(value) for value in of.values()))
def test_every_kind_of_model_can_be_laid_out(changes, optimizer, layout, make_partitioner):
    partitioner = make_partitioner(layout, MESHES[layout], backend="pjrt")
    _assert_same(partitioner, small_config(**changes, num_decoder_layers=0), optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.exhaustive), "fully_sharded_experts"])
def test_microbatches_rematerialisation_clipping_and_frozen_weights(layout, make_partitioner):
    config = small_config(remat=True, expert_sublayers="attention")
    settings = StepSettings(num_microbatches=2, clip_norm=0.1, trainable="experts")
    _assert_same(make_partitioner(layout, MESHES[layout], backend="pjrt"), config, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.exhaustive), "fully_sharded_experts"])
def test_packed_examples_are_kept_apart(layout, make_partitioner):
    (features,) = packed_batches(small_config(), 1)
    for name, most in (("encoder_segment_ids", 3), ("decoder_segment_ids", 3), ("encoder_positions", 15)):
        assert features[name].numpy().min() >= 0 and 1 < features[name].numpy().max() <= most
    _assert_same(make_partitioner(layout, MESHES[layout], backend="pjrt"), small_config(), make_batches=packed_batches)
