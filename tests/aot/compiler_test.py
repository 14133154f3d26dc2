"""The real TPU compiler on the real step of a small model: what it sends over which axis, state updated in place."""

import collections
import re

import numpy as np
import pytest
import seqio

pytest.importorskip("libtpu")

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.aot import compiler, lower
from switch_tf.aot.program import Program
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.run import StepSettings
from switch_tf.data.cached_tasks import CachedSource
from switch_tf.hardware import chips
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning import lowering

LENGTHS = {"inputs": 64, "targets": 32}


def _lower(layout, num_decoder_layers=1, lengths=LENGTHS):
    config = SwitchConfig(vocab_size=512, d_model=128, d_ff=256, num_heads=4, d_kv=32, num_encoder_layers=1,
                          num_decoder_layers=num_decoder_layers, encoder_sparse_step=1, decoder_sparse_step=1,
                          num_experts=8, num_groups_multiple=8, dropout_rate=0.1)
    return lower.lower_step(SwitchTransformer(config, dtype="mixed_bfloat16"), Adafactor(0.01), layout, 16, lengths,
                            StepSettings())


@pytest.fixture(scope="module")
def lowered(shipped_layout):
    """The program of a step of an encoder on PJRT; golden_test.py has a decoder too."""
    return _lower(shipped_layout("expert_model"), num_decoder_layers=0, lengths={"inputs": 64, "targets": 64})


@pytest.fixture(scope="module")
def compiled(lowered):
    return compiler.compile_step(lowered, "v5e:2x4")


def test_every_variable_is_an_argument_and_is_replaced(lowered):
    kinds = [argument.kind for argument in lowered.arguments]
    assert set(kinds) == {"feature", "weight", "slot"}
    updated = [kinds.count("feature") + index for index in lowered.program.updated]
    assert len(updated) == len(set(updated)) == kinds.count("weight") + kinds.count("slot") - 1
    (kept,) = {index for index, kind in enumerate(kinds) if kind != "feature"} - set(updated)
    assert "learning_rate" in lowered.arguments[kept].name
    experts = next(argument for argument in lowered.arguments if argument.name.endswith("experts/wi"))
    assert (experts.shape, experts.spec) == ((8, 128, 256), (("data",), (), ("model",)))


def test_all_annotations_are_shardys(lowered):
    # With a single one of GSPMD's, XLA would leave the whole program to GSPMD.
    assert "sdy.sharding_constraint" in lowered.text and "mhlo.sharding" not in lowered.text


@pytest.mark.parametrize("name, topology, num_parts, num_readers", [
    ("expert", "v5e:4x4", 4, 1), ("pod_256", "v5e:16x16", 2, 1), ("pod_256_experts", "v5e:16x16", 4, 1),
    ("pod_512", "v5p:8x8x8", 2, 4), ("pod_512_experts", "v5p:8x8x8", 4, 1),
    ("pod_512_fully_sharded", "v5p:8x8x8", 4, 1)])
def test_of_as_many_parts_as_devices_cut_the_batch_a_host_reads_its_own(name, topology, num_parts, num_readers):
    devices = compiler.devices_of(topology)
    layout = gin_syntax.read([f"gin/layouts/{name}.gin"]).check().part(parts.LAYOUT).make().resolve(len(devices), "TPU")
    sharding = lowering.named_sharding(lowering.device_mesh(layout, devices), layout.spec(("batch",)))
    hosts = [lowering.rows_of_process(sharding, 2048, host) for host in {device.process_index for device in devices}]
    readers = collections.Counter(rows for host in hosts for rows in host)
    assert {len(host) for host in hosts} == {num_parts} and set(readers.values()) == {num_readers}
    assert sum(end - first for first, end in readers) == 2048
    # The shards of a cache that a host fetches: of its own parts.
    cache = CachedSource("train", {"examples": 10 * 1024, "shards": [{"examples": 10}] * 1024}, None, 0, None)
    for host in hosts:
        ranges = [cache.range_of(seqio.ShardInfo(first * len(readers) // 2048, len(readers))) for first, _ in host]
        assert sum(end - first for first, end in ranges) == 10 * num_parts * 1024 // len(readers)


@pytest.mark.slow  # parity/pjrt_test.py runs such a program
def test_the_program_of_pjrt_has_weights_over_several_mesh_axes_as_they_are(shipped_layout):
    layout = shipped_layout("fully_sharded_experts", backend="pjrt")
    config = SwitchConfig(vocab_size=512, d_model=32, d_ff=64, num_heads=4, d_kv=32, num_encoder_layers=1,
                          num_decoder_layers=0, encoder_sparse_step=1, num_experts=8, num_groups_multiple=8)
    lowered = lower.lower_step(SwitchTransformer(config), Adafactor(0.01), layout, 16, {"inputs": 64, "targets": 64},
                               StepSettings())
    experts = next(argument for argument in lowered.arguments if argument.name.endswith("experts/wi"))
    assert (experts.shape, experts.spec) == ((8, 32, 64), (("expert", "fsdp"), (), ("data",)))
    assert [argument.shape for argument in lowered.arguments if argument.kind == "feature"] == 3 * [(1, 16, 64)]


def test_packed_examples_bring_their_segments():
    config = SwitchConfig.from_preset("switch_tiny")
    added = lower.feature_specs(config, 8, LENGTHS, pack=True).items() - lower.feature_specs(config, 8, LENGTHS).items()
    assert {name: tuple(spec.shape) for name, spec in added} == {
        "encoder_segment_ids": (1, 8, 64), "decoder_segment_ids": (1, 8, 32)}


def test_experts_cost_four_all_to_alls_a_layer_over_the_data_axis_and_no_weight_is_gathered(compiled):
    sent = Program(compiled.hlo, {"data": 4, "model": 2}).collectives
    moved = [one for one in sent if one.kind == "all-to-all"]
    assert {one.axes for one in moved} == {("data",)}
    assert sorted(one.where for one in moved) == 2 * ["encoder/layers_0/mlp"] + 2 * ["gradient of encoder/layers_0/mlp"]
    # Tokens travel in pieces of the model axis, which are joined where experts compute, and cut again.
    joined = [one for one in sent if one.kind == "all-gather"]
    assert all("layers_0/mlp" in one.where for one in joined), {one.where for one in joined}
    assert not any("256" in one.shape for one in joined)  # d_ff, which every whole weight of an expert has
    assert {one.axes for one in sent if one.kind in ("all-gather", "reduce-scatter")} == {("model",)}
    assert {one.kind for one in sent} == {"all-to-all", "all-reduce", "all-gather", "reduce-scatter"}


def test_state_is_stored_in_pieces_and_updated_in_place(lowered, compiled):
    pieces = dict.fromkeys(("weight", "slot", "feature"), 0)
    for argument in lowered.arguments:
        cuts = [lowered.layout.mesh[axis] for axes in argument.spec for axis in axes]
        pieces[argument.kind] += np.prod(argument.shape) // np.prod(cuts) * np.dtype(argument.dtype).itemsize
    # Chips pad small arrays.
    assert sum(pieces.values()) <= compiled.memory["arguments"] <= 1.2 * sum(pieces.values())
    assert compiled.memory["aliased"] > 0.95 * (pieces["weight"] + pieces["slot"])


# Traps: what went wrong in this compiler's output before, or would without care.


def test_gradients_are_added_up_over_devices_in_float32(compiled):
    # Autodiff makes the gradient of a weight that was cast to bfloat16 in bfloat16.
    sums = [one for one in Program(compiled.hlo, {"data": 4, "model": 2}).collectives
            if one.kind == "all-reduce" and "data" in one.axes]
    assert sum(one.bytes for one in sums) > 4 * 50_000
    assert {one.shape.partition("[")[0] for one in sums} <= {"f32", "s32"}


def test_token_ids_stay_where_they_are(compiled):
    # The gradient of a gather is a scatter, and the partitioner then collects all ids, hundreds of times.
    assert not re.search(r"s32\[[\d,]*\]\S* (all-gather|all-to-all)", compiled.hlo)


def test_no_random_number_is_drawn_by_xla(lowered, compiled):
    # Its generator is not partitioned: every chip would make the numbers of all.
    assert "rng" not in compiled.hlo
    assert "rng_bit_generator" not in lowered.text and "stateless_random" not in lowered.text


def test_no_mask_or_bucket_is_a_constant_of_the_program(lowered):
    # As constants they would grow with the square of the length: here 64 * 64 numbers.
    largest = max((len(data) // 2 for data in re.findall(r'dense<"0x([0-9A-Fa-f]+)">', lowered.text)), default=0)
    assert largest < 64 * 64


def test_the_program_of_chips_with_two_devices_has_a_time(lowered):
    topology = chips.full_name("ironwood:2x2x1")
    compiled = compiler.compile_step(lowered, topology)
    schedule = Program(compiled.hlo, lowered.layout.mesh).schedule(chips.find_chip(topology), compiled.network)
    assert 0 < schedule.seconds < 0.1  # a number that stands for unknown cycles would be centuries


@pytest.mark.parametrize("topology, message", [
    ("v5litepod-8", "A topology reads like v5e:4x4"), ("v5e:3x3", "libtpu knows no topology 'v5e:3x3'"),
    ("v5e:2x2", "The mesh 'data=4,model=2' has 8 devices, but topology 'v5e:2x2' has 4")])
def test_topologies_that_are_not_there_are_refused(lowered, topology, message):
    with pytest.raises(ValueError, match=message):
        compiler.compile_step(lowered, topology)
