"""Advice has numbers, and the flags that it gives are ones that a run takes."""

import dataclasses

import pytest

from switch_tf import SwitchConfig
from switch_tf.aot.compiler import DoesNotFit
from switch_tf.aot.estimate import Estimate, advice
from switch_tf.hardware.chips import CHIPS
from switch_tf.partitioning.layout import Layout
from switch_tf.training.train_step import check_division
from tests.aot.made_up import experiment

GIB = 2**30
CONFIG = SwitchConfig.from_preset("switch_base_8")
LAYOUT = Layout("data=8", (("batch", "data"), ("group", "data"), ("expert", "data")))


def _answer(weights, temporaries, refused=None, state=28 * GIB, compiled=((12, 12),)):
    memory = {"weights": weights, "slots": GIB, "gradients": 0, "arguments": weights + GIB, "outputs": weights + GIB,
              "aliased": weights + GIB, "temporaries": temporaries, "code": 0}
    return Estimate(memory, state, list(compiled), {}, refused)


def _advice(answer, config=CONFIG, batch_size=128):
    return advice(experiment(config, LAYOUT, batch_size, {"inputs": 512, "targets": 114}), answer, CHIPS["v5e"])


def test_it_says_what_is_missing_and_what_helps():
    lines = _advice(_answer(11 * GIB, 8 * GIB))
    assert lines == [
        "4.25 GiB a chip are missing: weights and slots take 12.00 GiB, activations and temporaries 8.00 "
        "GiB, of 15.75 GiB.",
        "Weights and slots are 28.00 GiB in all, 3.50 GiB a chip where all are split over all "
        "(gin/layouts/fully_sharded_model.gin); 4 chips hold them in half of their memory.",
        "Recompute activations in the backward pass, for about a third more compute: --gin.SwitchConfig.remat=True.",
        "Process the batch in parts, about 2.00 GiB of activations and temporaries each: "
        "--gin.StepSettings.num_microbatches=4 --gin.SwitchConfig.num_groups_multiple=32.",
        "Or take a smaller batch: --gin.BATCH_SIZE=32."]


def test_an_extrapolated_refusal_asks_for_all_layers_unless_weights_alone_are_too_much():
    def first_words(weights):
        answer = _answer(weights, 8 * GIB, compiled=((2, 2), (4, 4)))
        return [line.split(":")[0] for line in _advice(answer)]

    assert first_words(11 * GIB)[1] == "Compile all layers"
    assert "Compile all layers" not in first_words(15 * GIB)


def test_its_flags_are_taken():
    config = dataclasses.replace(CONFIG, num_groups_multiple=32)
    lengths = {"inputs": 512, "targets": 114}
    check_division(config, LAYOUT, 128, lengths, num_microbatches=4)
    check_division(CONFIG, LAYOUT, 32, lengths, num_microbatches=1)


@pytest.mark.parametrize("message, size", [
    ("the total memory required for HLO temporaries (28.93G) exceeds available HBM (15.75G).", 28.93 * GIB),
    ("Used 20.5G of 15.75G hbm.", 20.5 * GIB), ("Used 512M of 128M.", GIB / 2), ("no room", 0)])
def test_what_the_compiler_says_is_read(message, size):
    assert DoesNotFit(message).temporaries == pytest.approx(size, abs=1)


def test_where_no_parts_would_do_none_are_advised():
    config = dataclasses.replace(CONFIG, remat=True)
    assert _advice(_answer(20 * GIB, GIB, "no room"), config)[1:] == []
    assert _advice(_answer(GIB, 64 * GIB, "no room"), config, 8) == []
