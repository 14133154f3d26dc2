"""What the TPU compiler is given, partitioned and run on virtual CPU devices, makes the step of one device."""

import json
import pathlib
import subprocess
import sys

import pytest

DATA = [["batch", "data"], ["group", "data"]]
EXPERT = [*DATA, ["expert", "data"]]
MODEL = [["heads", "model"], ["mlp", "model"], ["expert_mlp", "model"], ["vocab", "model"]]
EXCHANGE = ["expert_embed", "model"]
LAYOUTS = {
    "data": {"mesh_shape": "data=8", "rules": DATA}, "expert": {"mesh_shape": "data=8", "rules": EXPERT},
    "data_model": {"mesh_shape": "data=2,model=4", "rules": [*DATA, *MODEL]},
    "expert_model": {"mesh_shape": "data=4,model=2", "rules": [*EXPERT, *MODEL, EXCHANGE]},
    "fully_sharded": {"mesh_shape": "data=8", "rules": EXPERT, "at_rest_rules": [["embed", "data"]]},
    "fully_sharded_model": {"mesh_shape": "data=4,model=2", "rules": [*EXPERT, *MODEL, EXCHANGE],
                            "at_rest_rules": [["embed", "data"]]}}


# What these two do not show, of experts, of the model axis and of weights in pieces, is left to `make slow`.
QUICK = ("expert_model", "fully_sharded")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
                                  for name in LAYOUTS])
def test_the_partitioned_program_makes_the_step_of_one_device(name):
    program = pathlib.Path(__file__).with_name("partitioned_program.py")
    done = subprocess.run([sys.executable, "-P", str(program), json.dumps(LAYOUTS[name])], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for expected, loss in found["losses"]:
        assert loss == pytest.approx(expected, rel=1e-6)
    assert found["largest_difference"] <= 1e-5
