"""The step that is compiled ahead of time for the pjrt back end is the one that it trains."""

import json
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("layout, kind, dtype, tolerance", [
    ("fully_sharded_experts", "CPU", "float32", 1e-5),  # experts and some weights over several mesh axes
    ("expert", "GPU", "mixed_bfloat16", 1e-3),
    pytest.param("single", "GPU", "mixed_bfloat16", 1e-3, marks=pytest.mark.exhaustive)])
def test_what_is_compiled_ahead_of_time_is_what_trains(layout, kind, dtype, tolerance):
    program = pathlib.Path(__file__).with_name("pjrt_step.py")
    done = subprocess.run([sys.executable, "-P", str(program), layout, kind, dtype], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["is_same"] and (found["narrow"] > 0) == (kind == "GPU")
    assert found["losses"] == pytest.approx(found["expected"], rel=tolerance)
