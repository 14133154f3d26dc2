"""Event files, read by TensorBoard's own package."""

import pytest
import tensorflow as tf

from switch_tf.checkpoints import run_folder
from switch_tf.reporting.summaries import Writer

EVALUATION = {"eval/mix/loss": 3.0, "eval/mix/accuracy": 0.25, "eval/one/loss": 2.0, "eval/average": 71.5}


def read(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance=dict.fromkeys(
        ("scalars", "tensors", "histograms"), 0))
    found.Reload()
    return found


def scalars(found):
    """Tag -> (step, value) of each scalar, which TensorFlow 2 writes as tensors."""
    return {tag: [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in found.Tensors(tag)]
            for tag in found.Tags()["tensors"] if found.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"}


@pytest.fixture
def folder(tmp_path):
    made = run_folder.RunFolder(tmp_path / "run")
    yield made
    made.close()


def test_training_and_evaluations_have_equal_tags_in_folders_of_their_own(folder):
    events = Writer(folder)
    events.write(0, EVALUATION)
    events.write(10, {"train/loss": 4.5, "train/cross_entropy": 4.25, "train/accuracy": 0.5, "seconds/steps": 1.0})
    events.close()
    train, held_out = (scalars(read(folder.path / "events" / kind)) for kind in ("train", "eval"))
    assert train == {"loss": [(10, 4.5)], "cross_entropy": [(10, 4.25)], "accuracy": [(10, 0.5)]}
    assert held_out == {"loss": [(0, 3.0)], "cross_entropy": [(0, 3.0)], "accuracy": [(0, 0.25)],
                        "one/loss": [(0, 2.0)], "one/cross_entropy": [(0, 2.0)], "average": [(0, 71.5)]}


def test_the_load_of_a_layers_experts_is_one_histogram(folder):
    events = Writer(folder)
    events.write(1, {"router/encoder/layers_1/expert_load": [0.5, float("nan"), 0.25],
                     "router/encoder/layers_1/x": 1.0})
    events.close()
    found = read(folder.path / "events" / "train")
    assert set(found.Tags()["tensors"]) == {"router/encoder/layers_1/expert_load", "router/encoder/layers_1/x"}
    plugin = found.SummaryMetadata("router/encoder/layers_1/expert_load").plugin_data.plugin_name
    assert plugin == "histograms"


def test_the_configuration_is_text_and_an_older_runs_files_stay(folder):
    old = folder.path / "events"
    old.mkdir()
    (old / "events.out.tfevents.1").write_bytes(b"")
    (folder.path / run_folder.CONFIGURATION).write_text("SEED = 1\nBATCH_SIZE = 8\n")
    events = Writer(folder)
    for step in (5, 6):
        events.write(step, {"train/loss": 1.0})
    events.close()
    found = read(folder.path / "events" / "train")
    [event] = found.Tensors("configuration")
    assert event.step == 5 and b"    SEED = 1\n    BATCH_SIZE = 8" in event.tensor_proto.string_val[0]
    assert sorted(entry.name for entry in old.iterdir()) == ["events.out.tfevents.1", "train"]
