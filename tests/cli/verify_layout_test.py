"""The command on real runs: the numbers it finds, the collectives it counts, what it refuses."""

import math

import pytest

from switch_tf.cli import main
from switch_tf.configs.semantics import Grouping
from switch_tf.installation import quiet
from switch_tf.layers import grouping
from switch_tf.partitioning import collectives
from switch_tf.training import verification
from tests.cli.lines import SHALLOW

BATCH, LENGTHS, D_MODEL, EXPERTS = 16, {"inputs": 128, "targets": 29}, 32, 8
RUN = ("verify-layout --gin_file=gin/models/switch_tiny.gin --gin_file=gin/tasks/docs_corpus.gin "
       f"--gin_file=gin/runs/pretrain.gin --gin.BATCH_SIZE={BATCH} --gin.SwitchConfig.d_model={D_MODEL} "
       f"--gin.SwitchConfig.d_ff=64 {SHALLOW} --gin.DROPOUT_RATE=0.1 --gin.EXPERT_DROPOUT_RATE=0.1 --json")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "pjrt"])
def test_experts_cost_two_all_to_alls_each_way_and_no_weight_is_gathered(backend, process):
    result, _ = process(f"{RUN} --gin_file=gin/layouts/expert.gin --devices=2 --gin.Layout.backend='{backend}'")
    assert result["mesh"] == {"data": 2}
    assert result["loss_relative_difference"] <= 1e-12
    assert result["gradient_relative_difference"] <= 1e-12
    assert result["weight_difference"] <= 1e-12
    assert len(result["losses"]) == 3
    # Of each sparse layer, one in the encoder and one in the decoder: there, back, and both in the backward pass. Each
    # moves the buffers of all experts for the groups of one device.
    buffers = 0
    for length in LENGTHS.values():
        groups = grouping.global_groups(BATCH * length, Grouping(EXPERTS, 4096, 8))
        capacity = math.floor(groups.size * 1.25 / EXPERTS)
        buffers += EXPERTS * (groups.count // 2) * capacity * D_MODEL * 8  # float64
    assert result["collectives"]["all-to-all"] == {"count": 2 * 4, "bytes": 4 * buffers}
    others = {"all-reduce"} | ({"all-gather"} if backend == "pjrt" else set())  # of token counts and groups
    assert set(result["collectives"]) == {"all-to-all", *others}
    gathered = result["collectives"].get("all-gather", {"bytes": 0})["bytes"]
    assert gathered < D_MODEL * 64 * 8 * 8  # less than the smallest kernel of the experts, in float64
    assert result["unsafe_all_to_alls"] == 0


@pytest.mark.slow
def test_logits_are_not_gathered_where_the_vocabulary_is_split(process):
    result, _ = process(
        f"{RUN} --gin_file=gin/layouts/data_model.gin --devices=4 --steps=1 --gin.SwitchConfig.encoder_sparse_step=0 "
        "--gin.SwitchConfig.decoder_sparse_step=0 --gin.DROPOUT_RATE=0.0")
    assert result["mesh"] == {"data": 2, "model": 2}
    assert set(result["collectives"]) == {"all-reduce"}


@pytest.mark.exhaustive
def test_mirrored_replicas_are_verified_too(process):
    result, _ = process(f"{RUN} --gin_file=gin/layouts/data.gin --devices=2 --steps=2 "
                        "--gin.Layout.backend='mirrored' --gin.StepSettings.num_microbatches=2")
    assert result["gradient_relative_difference"] <= 1e-12
    assert result["collectives"] == {}


@pytest.mark.parametrize("words, message", {
    "data_model.gin --gin.StepSettings.steps_per_call=2": "steps_per_call must be 1, not 2",
    "expert.gin --gin.NUM_EXPERTS=12": "num_experts ('expert', 12) over the 8 devices",
    "data.gin --gin.MESH_SHAPE='data=3'": "MESH_SHAPE 'data=3' is for 3 devices, but there are 8 (CPU); make the "
                                          "product of its sizes 8, or have 3 virtual",
    "single.gin --steps=0": "--steps must be an integer of at least 1, not 0.",
    "expert.gin --gin.SwitchConfig.dispatch='index'":
        "dispatch='index' moves rows by their place in one device's memory",
    "expert.gin --gin.Layout.backend='mirrored'":
        "copies the model to every device, so the layout cannot split expert"}.items())
def test_what_cannot_be_laid_out_is_one_sentence(words, message, monkeypatch, refused):
    # In this process, because its TensorFlow has eight devices already.
    monkeypatch.setattr(quiet, "import_tensorflow", lambda num_cpu_devices: None)
    monkeypatch.setattr(collectives, "dump_partitioned_programs", lambda folder: None)
    assert message in refused(f"{RUN} --gin_file=gin/layouts/{words}")


def test_without_a_layout_the_one_for_its_devices_is_verified(monkeypatch, capsys):
    checked = []
    monkeypatch.setattr(quiet, "import_tensorflow", lambda num_cpu_devices: None)
    monkeypatch.setattr(collectives, "dump_partitioned_programs", lambda folder: None)
    monkeypatch.setattr(verification, "verify", lambda described, *rest: checked.append(described) or ({}, ""))
    assert main.main(RUN.split()) == 0
    assert checked[0].layout.mesh == {"data": 8} and dict(checked[0].layout.rules)["expert"] == "data"
    assert "No layout is named, so 8 devices use" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_of_its_own_says_that_sentence_alone(process):
    _, err = process(f"{RUN} --gin_file=gin/layouts/expert.gin --devices=16", status=2)
    first, *others = err.strip().splitlines()
    assert first == "Importing TensorFlow ..." and len(others) == 1, err
    assert "num_experts ('expert', 8) over the 16 devices" in err
