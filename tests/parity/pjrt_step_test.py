"""The step that is compiled ahead of time for the pjrt back end is the one that it trains."""

import json
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_what_is_compiled_ahead_of_time_is_what_trains():
    program = pathlib.Path(__file__).with_name("pjrt_step.py")
    # Experts and some weights over several mesh axes.
    done = subprocess.run([sys.executable, "-P", str(program), "fully_sharded_experts"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["is_same"]
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
