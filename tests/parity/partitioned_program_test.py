"""What the TPU compiler is given, partitioned and run on virtual CPU devices, makes the step of one device."""

import json
import pathlib
import subprocess
import sys

import pytest


# pjrt_test.py runs the same programs by JAX's client; constrained_points_test.py has what the compiler is given.
@pytest.mark.parametrize("name", [
    pytest.param("pod_512_fully_sharded", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in (
        "data", "expert_model", "expert", "data_expert", "data_model", "fully_sharded", "fully_sharded_model",
        "fully_sharded_experts", "pod_256_experts"))])
def test_the_partitioned_program_makes_the_step_of_one_device(name):
    program = pathlib.Path(__file__).with_name("partitioned_program.py")
    done = subprocess.run([sys.executable, "-P", str(program), name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for expected, loss in found["losses"]:
        assert loss == pytest.approx(expected, rel=1e-6)
    assert found["largest_difference"] <= 1e-5
