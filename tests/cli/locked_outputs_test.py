"""Each command that writes an output refuses one that another process writes, before it does anything."""

import os

import pytest

from switch_tf.storage import lock


@pytest.mark.parametrize("line", [
    "infer --run=run --input=a.txt", "export --run=run", "convert --input=run", "eval --run=run",
    "vocabulary --input=a.txt --size=300", "cache docs_corpus_span_corruption --split=validation",
    "compare --runs run other", "average --run=sparse --last=2", "shrink --from=sparse --num_experts=3"])
def test_an_output_that_another_process_writes_is_refused(run_folder, sparse_run, tmp_path, refused, line):
    (tmp_path / "run").symlink_to(run_folder)
    (tmp_path / "sparse").symlink_to(sparse_run)
    (tmp_path / "other").mkdir()
    (tmp_path / "a.txt").write_text("a line\n")
    is_written = "out/docs_corpus_span_corruption/validation" if line.startswith("cache") else "out"
    with lock.held(is_written):
        told = refused(f"{line} --output=out")
    assert told == (f"switch-tf {line.split()[0]}: Another process (pid {os.getpid()}) is writing {is_written!r}; wait "
                    "for it, stop it, or name another --output.")
