"""Predictions of the real compiler's programs against counts by hand, and the faults that it lets pass."""

import pytest

pytest.importorskip("libtpu")

from switch_tf import SwitchConfig
from switch_tf.aot import estimate
from switch_tf.aot.clock import LINKS
from switch_tf.aot.hlo import SENT
from switch_tf.aot.program import Collective
from switch_tf.configs.run import StepSettings
from switch_tf.partitioning.layout import Layout
from tests.aot.made_up import experiment


def _ask(config, layout, topology, batch_size, lengths, settings=None):
    return estimate.make(experiment(config, layout, batch_size, lengths, settings), topology, is_full=True)


def _warnings(program, config, layout, batch_size, lengths):
    return estimate.warnings(experiment(config, layout, batch_size, lengths), program)


@pytest.mark.exhaustive  # minutes of the compiler
def test_a_dense_model_takes_what_its_products_take():
    d, ff, inner, vocab, layers, batch, length = 2048, 8192, 2048, 1024, 2, 16, 512
    config = SwitchConfig(vocab_size=vocab, d_model=d, d_ff=ff, num_heads=16, d_kv=128, num_encoder_layers=layers,
                          num_decoder_layers=0, num_experts=0, dropout_rate=0.0)
    answer = _ask(config, Layout("data=1"), "v5e:1x1", batch, {"inputs": length, "targets": length})
    # Multiply-adds of one token: four projections, two products of the feed-forward layer, queries by keys and
    # probabilities by values; then the logits. Two FLOPs each; the backward pass takes twice the forward one's.
    token = layers * (4 * d * inner + 2 * d * ff + 2 * length * inner) + d * vocab
    seconds = 3 * 2 * token * batch * length / 197e12
    assert answer.roofline.compute == pytest.approx(seconds, rel=0.1)
    assert max(answer.roofline) == answer.roofline.compute
    assert answer.roofline.links == 0
    # Products alone would take that long; norms, softmax and the update come on top.
    assert 1.1 < sum(answer.parts.values()) / answer.roofline.compute < 2.5
    assert SENT not in answer.parts and sum(answer.parts.values()) == pytest.approx(answer.schedule.seconds)
    lengths = {"inputs": length, "targets": length}
    assert _warnings(answer.program, config, Layout("data=1"), batch, lengths) == []


SMALL = SwitchConfig(vocab_size=512, d_model=128, d_ff=256, num_heads=4, d_kv=32, num_encoder_layers=1,
                     num_decoder_layers=0, encoder_sparse_step=1, num_experts=8, num_groups_multiple=16)
LENGTHS = {"inputs": 128, "targets": 128}


@pytest.fixture(scope="module")
def expert(shipped_layout):
    return shipped_layout("expert")


@pytest.fixture(scope="module")
def whole(expert):
    return _ask(SMALL, expert, "v5e:2x4", 32, LENGTHS)


@pytest.mark.slow
def test_every_part_of_a_switch_layer_is_found_by_the_clock(whole):
    assert whole.parts.keys() >= {"attention", "router", "dispatch", "experts", "combine", "norms and residuals",
                                  "embedding", "logits and loss", "optimizer", SENT}
    assert "dense feed-forward" not in whole.parts
    assert min(whole.parts.values()) >= 0 and sum(whole.parts.values()) >= max(whole.roofline)
    # With this compiler, sending holds up the core.
    assert whole.parts[SENT] == pytest.approx(whole.roofline.links)
    assert sum(span.seconds for span in whole.schedule.spans if span.lane == LINKS) == pytest.approx(
        whole.roofline.links)


@pytest.mark.slow
def test_a_loop_over_microbatches_counts_as_the_whole_batch(whole, expert):
    parts = _ask(SMALL, expert, "v5e:2x4", 32, LENGTHS, StepSettings(num_microbatches=2))
    assert parts.flops == pytest.approx(whole.flops, rel=0.1)
    assert parts.parts["attention"] > 0.8 * whole.parts["attention"]  # halves of so little take longer each
    assert parts.collectives["all-to-all"]["bytes"] == pytest.approx(
        whole.collectives["all-to-all"]["bytes"], rel=0.01)
    assert parts.collectives["all-to-all"]["count"] == 2 * whole.collectives["all-to-all"]["count"]


@pytest.mark.slow
def test_experts_computed_everywhere_are_a_fault(whole, expert):
    layout = Layout("data=8", (("batch", "data"),))  # forgets group
    answer = _ask(SMALL, layout, "v5e:2x4", 32, LENGTHS)
    (fault,) = _warnings(answer.program, SMALL, layout, 32, LENGTHS)
    assert "tokens are computed on several chips at once" in fault
    assert _warnings(whole.program, SMALL, expert, 32, LENGTHS) == []


class _Gathers:
    def __init__(self, shape):
        self.collectives = [Collective("all-gather", 8, 8, ("data",), shape, "encoder/layers_0/mlp")]
        self.unread_loops = self.expert_products = ()


@pytest.mark.parametrize("shape, count", [("bf16[8,128,256]", 1), ("bf16[128,256]", 0)])
def test_gathered_experts_are_a_fault(shape, count, expert):
    found = _warnings(_Gathers(shape), SMALL, expert, 32, LENGTHS)
    assert len(found) == count
    assert all("all-gather of bf16[8,128,256] in encoder/layers_0/mlp" in fault for fault in found)
