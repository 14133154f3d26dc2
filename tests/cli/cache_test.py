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
from switch_tf.cli import main

FILES = ["--gin_file=gin/tasks/text_files.gin"]


@pytest.fixture
def texts(tmp_path):
    """A file of 4,000 lines, a twentieth of them held out."""
    (tmp_path / "texts.txt").write_text("".join(f"line {number} of many words\n" for number in range(4000)))
    return [*FILES, f"--gin.TRAIN_FILES='{tmp_path}/texts.txt'", "--vocabulary=bytes", f"--output={tmp_path / 'cache'}"]


def told(capsys, *words):
    """Returns the error output of a refused `switch-tf cache`."""
    assert main.main(["cache", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_task_of_ones_own_files_is_cached_and_found_by_a_run(texts, tmp_path, capfd):
    words = ["cache", *texts, "--num_processes=1", "--num_shards=2", "--json"]
    assert main.main(words) == 0
    out, err = capfd.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert [cache["split"] for cache in result["caches"]] == ["train", "validation"]
    assert sum(cache["examples"] for cache in result["caches"]) == 4000
    assert f"--gin.CACHE_DIR=\"'{tmp_path / 'cache'}'\"" in err and "INFO" not in err
    description = data.DatasetDescription("text_files", {"inputs": 64, "targets": 30}, 4, "validation",
                                          vocabulary="bytes", use_cached_tasks=True, cache_dir=result["cache_dir"])
    cached, plain = (list(data.get_dataset(one).as_numpy_iterator()) for one in (
        description, data.DatasetDescription("text_files", {"inputs": 64, "targets": 30}, 4, "validation",
                                             vocabulary="bytes")))
    assert len(cached) == len(plain) > 10
    assert all((one[name] == other[name]).all() for one, other in zip(cached, plain, strict=True) for name in one)

    shard = pathlib.Path(result["caches"][0]["folder"], "00001-of-00002.array_record")
    before, changed = shard.read_bytes(), shard.stat().st_mtime_ns
    shard.write_bytes(before[:-9])
    assert main.main(words) == 0
    assert shard.read_bytes() == before and shard.stat().st_mtime_ns != changed


def test_mistakes_are_sentences(texts, tmp_path, capsys):
    assert "Name a TASK, or give the --gin_file" in told(capsys)
    assert "No shipped task or mixture is called 'docs_corpu'. Did you mean" in told(capsys, "docs_corpu")
    assert "--num_processes must be an integer of at least 1, not 0" in told(capsys, *texts, "--num_processes=0")
    assert "'DataflowRunner' is no flag of Apache Beam" in told(capsys, *texts, "--", "--runner", "DataflowRunner")
    assert "'text_files' has the splits train, validation, received 'test'" in told(capsys, *texts, "--split", "test")
    assert "Unexpected pipeline runner: Nope" in told(capsys, *texts, "--", "--runner=Nope")
    assert "does not take --direct_num_workers=x" in told(capsys, *texts, "--", "--direct_num_workers=x")
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    assert f"--output '{folder}/text_files/train' cannot be written (Not a directory); name another one." in told(
        capsys, *texts, f"--output={folder}")
    (tmp_path / "texts.txt").unlink()
    assert "TRAIN_FILES: there is no file" in told(capsys, *texts)


@pytest.mark.slow
def test_a_bad_line_is_told_and_the_other_shards_are_kept(texts, tmp_path, capfd, monkeypatch):
    from switch_tf.tasks import text_source

    monkeypatch.setattr(text_source, "LOOKED_THROUGH", 0)  # as if the files were too large to be looked through first
    lines = [json.dumps({"text": f"text {number}"}) for number in range(60_000)]
    lines[70] = "{broken"
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    words = [*texts, f"--gin.TRAIN_FILES='{tmp_path}/texts.jsonl'", "--num_processes=1", "--split", "train",
             "--num_shards=2"]
    said = told(capfd, *words).splitlines()[-1]
    assert "texts.jsonl, line 71: it is no JSON" in said and "1 of 2 shards are not written" in said
    lines[70] = lines[71]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    assert "is of something else: its source" in told(capfd, *words)


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_with_what_is_missing(texts, tmp_path):
    """Several processes of Beam, killed with all of them, as a machine that goes down does."""
    command = [sys.executable, "-m", "switch_tf.cli", "cache", *texts, "--num_processes=2", "--num_shards=24", "--json"]
    folder = tmp_path / "cache" / "text_files" / "train"
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as child:
        while len(list(folder.glob("0*.json"))) < 3:
            assert child.poll() is None
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGKILL)
    (folder / ".00005-of-00024.array_record.0123abcd.unfinished").write_bytes(b"of a process that was killed")
    written = {path: path.stat().st_mtime_ns for path in folder.glob("0*.json")}
    assert 3 <= len(written) < 24 and not (folder / "manifest.json").exists()
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {path: path.stat().st_mtime_ns for path in written} == written
    caches = json.loads(result.stdout.splitlines()[-1])["caches"]
    assert sum(cache["examples"] for cache in caches) == 4000 and caches[0]["num_shards"] == 24
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
