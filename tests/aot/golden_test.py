"""A gate: a change that lets the compiler send more, need a tenth more memory or take longer is seen here.

It takes longer by the compiler's own clock, which is the same in every run.
"""

import importlib.util
import json
import pathlib

import pytest

pytest.importorskip("libtpu")

_SPEC = importlib.util.spec_from_file_location(
    "compiled_layouts", pathlib.Path(__file__).parents[1] / "golden" / "compiled_layouts.py")
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)


@pytest.mark.slow  # compiler_test.py counts what one layout sends
@pytest.mark.parametrize("name", [
    # expert_model and data_expert have what these have.
    *(pytest.param(name, marks=[pytest.mark.exhaustive] if name in ("data", "expert", "data_model") else [])
      for name in golden.LAYOUTS),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in (*golden.REAL, *golden.PODS))])
def test_the_compiler_sends_and_needs_what_it_did(name):
    expected, found = json.loads(golden.FILE.read_text())[name], golden.measure(name)
    counts = [{kind: entry["count"] for kind, entry in one["collectives"].items()} for one in (expected, found)]
    assert counts[1] == counts[0], "run `make golden` if the difference is meant"
    for kind, entry in expected["collectives"].items():
        assert found["collectives"][kind]["bytes"] == pytest.approx(entry["bytes"], rel=0.1), kind
    for kind in ("arguments", "gradients", "temporaries"):
        assert found[kind] == pytest.approx(expected[kind], rel=0.1), kind
    for kind in {"core_seconds", "step_seconds"} & set(expected):
        assert found[kind] <= 1.03 * expected[kind], kind
