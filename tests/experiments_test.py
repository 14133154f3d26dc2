"""Experiments from Python, as the documentation shows them."""

import contextlib
import io
import json
import pathlib
import re

import pytest

TRAINING = pathlib.Path(__file__).parents[1] / "docs" / "training.md"


@pytest.mark.slow
def test_training_resuming_evaluating_and_comparing_take_a_line_each(tmp_path, monkeypatch):
    section = TRAINING.read_text().partition("## From Python")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    for large, small in (("300", "4"), ("400", "6"), ("BATCH_SIZE=32", "BATCH_SIZE=8"),
                         ("EVAL_PERIOD=100", "EVAL_PERIOD=2")):
        assert large in code
        code = code.replace(large, small)
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, str(TRAINING), "exec"), {})
    scores, table = printed.getvalue().split("\n", 1)
    assert "docs_corpus_span_corruption" in scores and "loss" in scores
    assert "sparse" in table and "dense" in table and "Report: runs/report/comparison.html" in table
    for name in ("sparse", "dense"):
        steps = [json.loads(line)["step"] for line in (tmp_path / "runs" / name / "metrics.jsonl").open()]
        assert steps[-1] == 6
    assert (tmp_path / "runs" / "dense" / "operative_config.gin").is_file()
