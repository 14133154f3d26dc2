"""Which format a folder is of, and that both users of the formats ask the same records."""

import types

import numpy as np
import pytest

from switch_tf import conversion
from switch_tf.conversion import checkpoint_files, formats
from switch_tf.conversion.formats import HUGGING_FACE, MESH_TENSORFLOW, SWITCH_TF, T5X
from switch_tf.storage import places
from tests.conversion import from_bucket
from tests.conversion.shared import GOLDEN, assert_same_values, refusal, values_of


@pytest.mark.parametrize(("files", "expected"), [
    ((), None),
    (("checkpoints/",), SWITCH_TF),
    (("checkpoint.json",), SWITCH_TF),
    (("checkpoint",), T5X),
    (("_METADATA",), T5X),
    (("model.ckpt-7.index",), MESH_TENSORFLOW),
    (("model.ckpt-7.meta", "model.ckpt-7.data-00000-of-00001"), None),
    (("state/", "state/_METADATA"), T5X),
    (("config.json",), HUGGING_FACE),
    (("config.json", "checkpoints/"), HUGGING_FACE),  # a run was to start in a downloaded folder
    (("config.json", "checkpoints/step_00000010/"), SWITCH_TF),
    (("config.json", "checkpoint.json"), SWITCH_TF)])
def test_folders_by_what_they_hold(files, expected, tmp_path):
    for name in files:
        path = tmp_path / name
        path.mkdir(parents=True) if name.endswith("/") else path.write_bytes(b"\x80" if name == "checkpoint" else b"{}")
    assert formats.find(tmp_path) is formats.find(str(tmp_path)) is expected


def test_tensorflows_file_of_the_same_name_is_not_t5xs(tmp_path):
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-1"')
    assert formats.find(tmp_path) is MESH_TENSORFLOW


def test_a_bucket_is_asked_too(bucket):
    folder = places.at(bucket.new_folder())
    assert formats.find(folder) is None
    (folder / "config.json").write_text("{}")
    assert formats.find(folder) is formats.find(str(folder)) is HUGGING_FACE


@pytest.mark.parametrize("case", ["t5_1_1", "switch"])
def test_weights_of_hugging_face_in_a_bucket_are_read_there(case, bucket, tmp_path, monkeypatch):
    num_bytes = from_bucket.convert(GOLDEN / case, bucket, monkeypatch, tmp_path / "out")
    # Each tensor is read once. The beginning of a file is read for its kind, length and header.
    assert num_bytes < 1.5 * places.tree_size(GOLDEN / case)
    assert_same_values(values_of(conversion.from_hugging_face(GOLDEN / case)),
                       values_of(conversion.from_switch_tf(tmp_path / "out")))


def test_a_file_of_pytorch_in_a_bucket_is_read_there(bucket):
    place = places.at(bucket.new_folder()) / "pytorch_model.bin"
    places.copy(GOLDEN / "tensors.bin", place)
    tensors, expected = checkpoint_files.open_pytorch(place), np.load(GOLDEN / "tensors.npz")
    for name in expected.files:
        np.testing.assert_array_equal(tensors[name].load().astype("float32"), expected[name])


def test_without_a_target_other_formats_become_ours_and_ours_hugging_faces():
    for one in formats.FORMATS:
        assert formats.default_target(one) is (HUGGING_FACE if one is SWITCH_TF else SWITCH_TF)


def _initial(folder, model_dir="no-such-run", variables="all"):
    return formats.opened(types.SimpleNamespace(
        initial_checkpoint=folder and str(folder), initial_variables=variables, model_dir=str(model_dir)), None)


def test_a_new_run_starts_from_weights_of_another_format_without_an_optimizer():
    weights = _initial(GOLDEN / "t5_1_1")
    assert weights.description["step"] == 0 and len(weights.description["variables"]) > 9
    assert "is of hugging_face; convert it with switch-tf convert --with_optimizer" in refusal(
        _initial, GOLDEN / "t5_1_1", variables="with_optimizer")


def test_our_own_weights_unknown_folders_and_a_run_that_goes_on_are_left_to_the_checkpoints(tmp_path):
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "nowhere", None):
        assert _initial(folder) is None
    assert _initial(GOLDEN / "t5_1_1", tmp_path) is None
