import json

import pytest

from switch_tf.checkpoints import folders


def _write(folder, step, **changes):
    """A checkpoint of one file of 5 bytes; no variable is read."""
    path = folders.path_of(folder, step)
    path.mkdir(parents=True)
    (path / "state.index").write_bytes(bytes(5))
    (path / "checkpoint.json").write_text(json.dumps(
        {"format_version": 3, "step": step, "variables": {}, "files": {"state.index": 5}, **changes}))
    return path


def test_steps_are_sorted_by_number_and_unfinished_or_broken_folders_are_none(tmp_path):
    for name in ("step_100000000", "step_00000020", "step_00000003", "tmp.step_00000040", "broken.step_00000010",
                 "step_0000000000050", "step_abc", "step_00000060.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000070").write_text("a file")
    (tmp_path / "step_00000080").symlink_to("nowhere")
    assert folders.steps(tmp_path) == [3, 20, 100000000]
    assert folders.steps(tmp_path / "nothing") == []


def test_a_run_means_its_newest_checkpoint_and_a_checkpoint_itself(tmp_path):
    one, two = (_write(tmp_path / "checkpoints", step) for step in (1, 2))
    assert folders.resolve(tmp_path) == two
    assert folders.resolve(one) == one
    with pytest.raises(ValueError, match="INITIAL_CHECKPOINT must name a run folder with checkpoints"):
        folders.resolve(tmp_path / "nothing")


def test_a_description_is_read_when_every_file_has_its_size(tmp_path):
    path = _write(tmp_path, 7)
    assert folders.describe(path)["step"] == 7
    (path / "state.index").write_bytes(bytes(4))
    with pytest.raises(folders.BrokenCheckpoint, match="state.index should have 5 bytes but has 4"):
        folders.describe(path)
    (path / "state.index").unlink()
    with pytest.raises(folders.BrokenCheckpoint, match="state.index should have 5 bytes but has nothing"):
        folders.describe(path)


def _described(**changes):
    return json.dumps({"format_version": 3, "step": 1, "variables": {}, "files": {}, **changes}).encode()


@pytest.mark.parametrize("content", [
    b'{"step": 1, ', b"", bytes(range(128, 200)), b"[]", b"5", b'{"step": 1}', b"[" * 100_000, b"9" * 5000,
    b'{"format_version": 3, "step": 1, "variables": {}}', _described(variables=[]), _described(step=True),
    _described(step=-1), _described(step=[1]), _described(step="1"), _described(step=2), _described(step=10**40),
    _described(format_version=True), _described(format_version=-3), _described(format_version=0),
    _described(files=["state.index"]), _described(files={"state.index": "5"}), _described(files={"state.index": -5}),
    _described(variables={"model/a": 5}), _described(variables={"model/a": {"shape": 3, "dtype": "float32"}}),
    _described(variables={"model/a": {"shape": [-1], "dtype": "float32"}}),
    _described(variables={"model/a": {"shape": [1]}}), _described(variables={"a": {"shape": [1], "dtype": "float32"}}),
    _described(variables={"model/a": {"shape": [10**4000] * 2, "dtype": "float32"}}),
    _described(variables={"model/a": {"shape": [1] * 300, "dtype": "float32"}}),
    _described(variables={"model/a": {"shape": [4], "dtype": "float32", "unfolded": [[9, 2]]}}),
    _described(configuration=[1]), _described(configuration={"training data": 5}), _described(pending_metrics=[1])])
def test_a_description_that_cannot_be_read_is_a_broken_checkpoint(tmp_path, content):
    path = _write(tmp_path, 1)
    (path / "checkpoint.json").write_bytes(content)
    with pytest.raises(folders.BrokenCheckpoint, match="has no readable checkpoint.json") as raised:
        folders.describe(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "../nothing"])
def test_a_file_name_that_no_file_can_have_is_a_missing_file(tmp_path, name):
    path = _write(tmp_path, 1, files={name: 5})
    with pytest.raises(folders.BrokenCheckpoint, match="should have 5 bytes but has nothing"):
        folders.describe(path)


def test_a_folder_in_the_place_of_the_description_is_a_broken_checkpoint(tmp_path):
    path = _write(tmp_path, 1)
    (path / "checkpoint.json").unlink()
    (path / "checkpoint.json").mkdir()
    with pytest.raises(folders.BrokenCheckpoint, match="it is no file"):
        folders.describe(path)


def test_a_newer_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has format 99; this version of switch_tf reads formats 3 and 4"):
        folders.describe(_write(tmp_path, 1, format_version=99))


def test_a_broken_checkpoint_set_aside_makes_room_for_its_step(tmp_path):
    for _ in range(2):  # the second takes the place of the first
        aside = folders.set_aside(_write(tmp_path, 3))
    assert aside == tmp_path / "broken.step_00000003"
    assert folders.steps(tmp_path) == []
