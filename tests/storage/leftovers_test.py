"""Whatever lies in a run folder never stops a start."""

import os
import shutil

import pytest

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.storage import leftovers
from switch_tf.storage.whole_file import write_whole


def _leave(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")


def test_leftovers_of_kills_go(tmp_path):
    _leave(tmp_path, "checkpoints/tmp.step_00000005/state_temp/part-00000", "checkpoints/tmp.step_00000006",
           "checkpoints/tmp.step_00000007/state.index", ".operative_config.gin.0123abcd.unfinished",
           "checkpoints/.best.json.0123abcd.unfinished")
    (tmp_path / "checkpoints" / "tmp.step_00000008" / "state_temp").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints" / "tmp.step_00000009").symlink_to(tmp_path / "elsewhere")
    RunFolder(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "elsewhere", "lock"]


def test_foreign_things_stay_as_they_are(tmp_path):
    foreign = ["notes.txt", "checkpoints/step_abc", "checkpoints/step_00000010.bak", "checkpoints/tmp.notes",
               "checkpoints/step_0000000000010/x", "checkpoints/step_٠٠٠٠٠٠١٠/x", "checkpoints/step_00000020",
               ".notes.unfinished", "checkpoints/broken.step_00000003"]
    _leave(tmp_path, *foreign)
    (tmp_path / "checkpoints" / "step_00000030").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\xfe")
    before = sorted(tmp_path.rglob("*"))
    folder = RunFolder(tmp_path)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "lock"])
    assert folders.steps(folder.checkpoints) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "lock", "report.html", "loss.png", "operative_config.gin",
                                  "end.json", "checkpoints/best.json"])
@pytest.mark.parametrize("kind", ["folder", "dangling link", "pipe"])
def test_another_thing_by_the_name_of_a_file_makes_room_for_it(tmp_path, capsys, name, kind):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    {"folder": path.mkdir, "dangling link": lambda: path.symlink_to("nowhere"), "pipe": lambda: os.mkfifo(path)}[kind]()
    folder = RunFolder(tmp_path)
    aside = path.with_name(f"broken.{path.name}")
    assert (aside.is_symlink() or aside.exists()) and f"{path} is no file, so it is kept as {aside}" in (
        capsys.readouterr().err)
    folder.cut_metrics(1)
    write_whole(tmp_path / "operative_config.gin", "# x")
    folder.write_end(1, "x")
    folders.set_best(folder.checkpoints, step=1, metric="eval/x/loss", value=1.0)


@pytest.mark.parametrize("name", ["checkpoints", "events"])
def test_a_file_by_the_name_of_a_folder_makes_room_for_it(tmp_path, name):
    (tmp_path / name).write_text("mine")
    folder = RunFolder(tmp_path)
    assert folder.checkpoints.is_dir()
    assert (tmp_path / f"broken.{name}").read_text() == "mine"


def test_a_linked_folder_of_checkpoints_is_used(tmp_path):
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "large_disk")
    folder = RunFolder(tmp_path / "run")
    assert folder.checkpoints.is_symlink()


def test_what_is_set_aside_takes_no_other_things_place(tmp_path):
    for number in range(3):
        (tmp_path / "a").write_text(str(number))
        leftovers.set_aside(tmp_path / "a")
    assert [(tmp_path / name).read_text() for name in ("broken.a", "broken.a.1", "broken.a.2")] == ["0", "1", "2"]


def test_a_failed_removal_is_a_warning(tmp_path, capsys, monkeypatch):
    def refuse(path, **options):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    (tmp_path / "old").mkdir()
    assert not leftovers.remove(tmp_path / "old")
    assert "old could not be removed (Operation not permitted)" in capsys.readouterr().err
