"""The doctor prints every finding, and its status is 1 if anything is a problem."""

import json

import pytest

from switch_tf import environment
from switch_tf.cli import main
from switch_tf.installation import doctor


@pytest.mark.slow
def test_the_environment_of_the_tests_has_no_problem(capsys):
    assert main.main(["doctor", "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["problems"] == report["exit_status"] == 0, output.err
    statuses = {check["check"]: check["status"] for check in report["checks"]}
    names = ("Python", "tensorflow", "requirements", "tensorboard starts", "accelerators", "pjrt", "current folder")
    assert statuses.items() >= dict.fromkeys(names, doctor.OK).items()
    assert "problems: 0" in output.err


def test_a_problem_gives_exit_status_1(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run_python", lambda check, *_: doctor.Finding(check, "works"))
    real = environment.installed_version
    monkeypatch.setattr(environment, "installed_version", lambda name: None if name == "keras" else real(name))
    assert main.main(["doctor"]) == 1
    assert "cure: " in capsys.readouterr().out
