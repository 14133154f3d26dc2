"""The doctor prints every finding, and its status is 1 if anything is a problem."""

import argparse
import json

import pytest

from switch_tf import environment
from switch_tf.cli import doctor, main
from switch_tf.installation import doctor as checks


@pytest.mark.slow
def test_the_environment_of_the_tests_has_no_problem(capsys):
    assert main.main(["doctor", "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["problems"] == report["exit_status"] == 0, output.err
    assert {check["check"] for check in report["checks"]} >= {"Python", "tensorflow", "requirements", "accelerators"}
    assert "problems: 0" in output.err


def test_a_problem_gives_exit_status_1(monkeypatch, capsys):
    monkeypatch.setattr(checks, "run_python", lambda code: ("[]", ""))
    installed_version = environment.installed_version
    monkeypatch.setattr(environment, "installed_version",
                        lambda name: None if name == "keras" else installed_version(name))
    assert doctor.run_doctor(argparse.Namespace(model_dir=None))["exit_status"] == 1
    assert "cure: " in capsys.readouterr().out
