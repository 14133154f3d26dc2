"""Each command that writes an output refuses one that another process writes, before it does anything."""

import os

import pytest

from switch_tf.cli import main
from switch_tf.storage import lock


@pytest.mark.parametrize("command", ["infer", "export", "convert", "eval", "vocabulary", "cache", "compare",
                                     "average", "shrink"])
def test_an_output_that_another_process_writes_is_refused(run_folder, sparse_run, tmp_path, capsys, command):
    (tmp_path / "a.txt").write_text("a line\n")
    output, task = tmp_path / "out", "docs_corpus_span_corruption"
    words = {
        "infer": [f"--run={run_folder}", f"--input={tmp_path / 'a.txt'}", f"--output={output}"],
        "export": [f"--run={run_folder}", f"--output={output}"], "eval": [f"--run={run_folder}", f"--output={output}"],
        "convert": [f"--input={run_folder}", f"--output={output}"],
        "vocabulary": [f"--input={tmp_path / 'a.txt'}", "--size=300", f"--output={output}"],
        "cache": [task, f"--output={output}", "--split=validation"],
        "average": [f"--run={sparse_run}", "--last=2", f"--output={output}"],
        "shrink": [f"--from={sparse_run}", "--num_experts=3", f"--output={output}"],
        "compare": ["--runs", str(run_folder), str(tmp_path), f"--output={output}"]}[command]
    is_written = output / task / "validation" if command == "cache" else output
    with lock.held(is_written):
        before = sorted(tmp_path.rglob("*"))
        assert main.main([command, *words]) == 2
        assert sorted(tmp_path.rglob("*")) == before
    assert f"switch-tf {command}: Another process (pid {os.getpid()}) is writing {str(is_written)!r}; wait for it, " \
           "stop it, or name another --output." in capsys.readouterr().err
