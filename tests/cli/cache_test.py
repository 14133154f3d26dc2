"""`switch-tf cache` tokenises by Apache Beam, resumes after an end, and refuses mistakes in one sentence."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from switch_tf import data
from tests.cli import conftest

TEXTS = ("cache --gin_file=gin/tasks/text_files.gin --gin.TRAIN_FILES='texts.txt' --vocabulary=bytes --output=cache "
         "--json")


@pytest.fixture(autouse=True)
def _texts(tmp_path, monkeypatch):
    """A file of 4,000 lines, a twentieth of them held out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("".join(f"line {number} of many words\n" for number in range(4000)))


@pytest.fixture
def call(capfd):
    """Progress is printed as by other commands, also by Beam's processes."""
    return conftest.caller(capfd)


@pytest.mark.slow
def test_a_task_of_ones_own_files_is_cached_and_found_by_a_run(call):
    words = f"{TEXTS} --num_processes=1 --num_shards=2"
    result, err = call(words)
    assert [cache["split"] for cache in result["caches"]] == ["train", "validation"]
    assert sum(cache["examples"] for cache in result["caches"]) == 4000
    assert "--gin.CACHE_DIR=\"'cache'\"" in err and "INFO" not in err
    cached, plain = (list(data.get_dataset(data.DatasetDescription(
        "text_files", {"inputs": 64, "targets": 30}, 4, "validation", vocabulary="bytes",
        **options)).as_numpy_iterator()) for options in (
            {"use_cached_tasks": True, "cache_dir": result["cache_dir"]}, {}))
    assert len(cached) == len(plain) > 10
    assert all((one[name] == other[name]).all() for one, other in zip(cached, plain, strict=True) for name in one)

    shard = pathlib.Path(result["caches"][0]["folder"], "00001-of-00002.array_record")
    before, changed = shard.read_bytes(), shard.stat().st_mtime_ns
    shard.write_bytes(before[:-9])
    call(words)
    assert shard.read_bytes() == before and shard.stat().st_mtime_ns != changed


@pytest.mark.parametrize("flag, message", {
    "--runner=Nope": "Unexpected pipeline runner: Nope",
    "--direct_num_workers=x": "does not take --direct_num_workers=x"}.items())
def test_flags_that_beam_does_not_know_are_told(call, flag, message):
    assert message in call(TEXTS, "--", flag, status=2)[1]


@pytest.mark.slow
def test_a_bad_line_is_told_and_the_other_shards_are_kept(call, tmp_path, monkeypatch):
    from switch_tf.tasks import text_source

    monkeypatch.setattr(text_source, "LOOKED_THROUGH", 0)  # as if the files were too large to be looked through first
    lines = [json.dumps({"text": f"text {number}"}) for number in range(60_000)]
    lines[70] = "{broken"
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    words = f"{TEXTS} --gin.TRAIN_FILES='texts.jsonl' --num_processes=1 --split train --num_shards=2"
    said = call(words, status=2)[1].splitlines()[-1]
    assert "texts.jsonl, line 71: it is no JSON" in said and "1 of 2 shards are not written" in said
    lines[70] = lines[71]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    assert "is of something else: its source" in call(words, status=2)[1]


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_with_what_is_missing(process, tmp_path):
    """Several processes of Beam, killed with all of them, as a machine that goes down does."""
    words = f"{TEXTS} --num_processes=2 --num_shards=24"
    folder = tmp_path / "cache" / "text_files" / "train"
    with subprocess.Popen([sys.executable, "-m", "switch_tf.cli", *words.split()], start_new_session=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while len(list(folder.glob("0*.json"))) < 3:
            assert child.poll() is None
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGKILL)
    (folder / ".00005-of-00024.array_record.0123abcd.unfinished").write_bytes(b"of a process that was killed")
    written = {path: path.stat().st_mtime_ns for path in folder.glob("0*.json")}
    assert 3 <= len(written) < 24 and not (folder / "manifest.json").exists()
    caches = process(words)[0]["caches"]
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert sum(cache["examples"] for cache in caches) == 4000 and caches[0]["num_shards"] == 24
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
