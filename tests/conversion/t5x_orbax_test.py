"""T5X checkpoints that Orbax wrote, by Orbax itself."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import numpy as np
import orbax.checkpoint
import pytest

from switch_tf import conversion
from switch_tf.conversion import formats
from tests.conversion.shared import assert_same_logits, golden, refusal
from tests.conversion.t5x_checkpoints import nested, scanned, with_layer_biases, write


def write_orbax(folder, arrays, dtype="float32", slots=None, step=7, **options):
    """Writes a T5X train state as Orbax does; returns the folder of the step."""
    tree = {"target": nested({name: values.astype(dtype) for name, values in arrays.items()}),
            "state": {"step": step, "param_states": nested(
                slots or {name: {"v": values} for name, values in arrays.items()})}}
    handler = orbax.checkpoint.PyTreeCheckpointHandler(**options)
    orbax.checkpoint.Checkpointer(handler).save(folder / "state", tree)
    return folder


refused = functools.partial(refusal, conversion.from_t5x)


@pytest.fixture(scope="module")
def ocdbt(tmp_path_factory):
    """A configuration, its arrays, and a checkpoint of them in Orbax' default format."""
    config, arrays = golden("switch")
    return config, arrays, write_orbax(tmp_path_factory.mktemp("ocdbt") / "checkpoint_7", arrays)


@pytest.fixture
def copied(ocdbt, tmp_path):
    """The configuration, and a copy of the checkpoint."""
    return ocdbt[0], shutil.copytree(ocdbt[2], tmp_path / "in")


@pytest.mark.parametrize("options", [
    {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}, {"use_ocdbt": True, "use_zarr3": True}], ids=str)
def test_logits_are_pytorchs_in_every_layout(options, tmp_path):
    config, arrays = golden("t5_1_1")
    folder = write_orbax(tmp_path / "checkpoint_7", arrays, **options)
    assert (folder / "state" / "manifest.ocdbt").exists() == options["use_ocdbt"]
    assert_same_logits(conversion.from_t5x(folder, config), "t5_1_1")


def test_the_step_and_its_state_are_taken(ocdbt):
    config, _, folder = ocdbt
    assert formats.find(folder) is formats.find(folder / "state") is formats.T5X
    for place in (folder, folder / "state"):
        assert_same_logits(conversion.from_t5x(place, config), "switch")


def test_scanned_bfloat16(tmp_path):
    config, arrays = golden("t5_1_0")
    num_layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    arrays = scanned(with_layer_biases(arrays, num_layers), num_layers)
    model = conversion.from_t5x(write_orbax(tmp_path / "in", arrays, "bfloat16"),
                                dataclasses.replace(config, relative_attention_per_layer=True))
    np.testing.assert_array_equal(model.encoder.layers[1].mlp.wo.numpy(), arrays[
        "encoder/encoder/mlp/wo/kernel"][:, 1].astype("bfloat16").astype("float32"))


def test_placeholders_may_stand_for_arrays_in_the_database(ocdbt, tmp_path):
    # As Orbax did at first: a msgpack file beside the database.
    config, arrays, folder = ocdbt
    shutil.copytree(folder / "state", tmp_path / "in")
    placeholders = write(tmp_path / "made", arrays, reference="placeholder")
    shutil.copy(placeholders / "checkpoint", tmp_path / "in")
    assert_same_logits(conversion.from_t5x(tmp_path / "in", config), "switch")


def test_a_relative_path_may_lead_upwards(copied, tmp_path, monkeypatch):
    config, folder = copied
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(folder)
    for path in (pathlib.Path("../in"), tmp_path / "link"):
        assert_same_logits(conversion.from_t5x(path, config), "switch")


@pytest.mark.parametrize(("names", "item"), [(("checkpoint_7", "checkpoint_10", "checkpoint_9"), "state"),
                                             (("7", "10", "9"), "default"), (("7", "10", "9"), "items")])
def test_of_a_run_folder_the_newest_checkpoint_is_taken(names, item, ocdbt, tmp_path, capsys):
    for name in names:
        shutil.copytree(ocdbt[2] / "state", tmp_path / "run" / name / item)
    (tmp_path / "run" / "checkpoint_11").mkdir()  # empty, as a save that has just begun
    found = formats.locate(tmp_path / "run", "--input")
    assert found == (tmp_path / "run" / names[1], formats.T5X)
    assert f"reading its newest checkpoint, {names[1]}" in capsys.readouterr().err
    assert_same_logits(conversion.from_t5x(found[0], ocdbt[0]), "switch")


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_is_refused_and_not_waited_for(kind, copied, tmp_path):
    config, folder = copied
    data = next(folder.rglob("ocdbt.process_0/d"))
    if kind == "pipe":
        os.mkfifo(data / "more")
    else:
        shutil.move(data, tmp_path / "elsewhere")
        data.symlink_to(tmp_path / "elsewhere")
    assert "must be a regular file, not a folder, a pipe, a device" in refused(folder, config)


def test_a_save_that_was_not_merged_is_refused(copied):
    config, folder = copied
    state = folder / "state"
    (state / "ocdbt.process_0").mkdir(exist_ok=True)
    for name in ("manifest.ocdbt", "d"):
        shutil.move(state / name, state / "ocdbt.process_0" / name)
    assert "not saved to its end: its arrays are in ['ocdbt.process_0'], which the last step of a save" in refused(
        folder, config)


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(path.read_bytes()[:100]), os.unlink])
def test_truncated_and_missing_values(change, copied):
    config, folder = copied
    # All of them: it depends on the time which ones hold weights, and which ones slots.
    for data in folder.rglob("ocdbt.process_0/d/*"):
        change(data)
    message = refused(folder, config)
    assert "cannot be read (" in message and message.endswith(f"; download {folder / 'state'} again.")


def described(*keys):
    return {"key_metadata": [{"key": key} for key in keys]}


@pytest.mark.parametrize(("change", "message"), [
    (lambda content: content.pop("tree_metadata"), "an array has no keys, but None"),
    (lambda content: content.update(tree_metadata={"a": 3}), "an array has no keys, but 3"),
    (lambda content: content.update(tree_metadata={"a": described(3)}), "an array has no keys, but"),
    (lambda content: content.update(tree_metadata={}), "must describe weights under \"target\""),
    (lambda content: content.update(tree_metadata={"a": described("target", "../../x")}),
     "an array is in 'target.../../x', which is no folder beside the file"),
    (lambda content: content["tree_metadata"].update(more=described("target", "more")),
     "'target/more' cannot be read (NOT_FOUND")])
def test_other_descriptions_are_refused(change, message, copied):
    config, folder = copied
    path = folder / "state" / "_METADATA"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert message in refused(folder, config)
