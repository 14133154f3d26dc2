"""Each fault that the doctor knows is found and comes with what to type."""

import argparse
import json
from importlib import metadata

import pytest

from switch_tf import environment
from switch_tf.cli import doctor


@pytest.fixture
def installed(monkeypatch):
    """Pretends other installed versions: name -> version, None for absent."""
    real = environment.installed_version

    def pretend(**versions):
        versions = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(environment, "installed_version", lambda name: versions.get(name, real(name)))

    return pretend


def only(findings, check):
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


@pytest.mark.slow
def test_the_environment_of_the_tests_has_no_problem(capsys):
    report = doctor.run(argparse.Namespace(json=True))
    output = capsys.readouterr()
    assert report["problems"] == report["exit_status"] == 0, output.err
    assert {check["check"] for check in report["checks"]} >= {"Python", "tensorflow", "requirements", "accelerators"}
    json.dumps(report)
    assert output.out == ""  # with --json, standard output is main's
    assert "problems: 0" in output.err


def test_a_problem_gives_exit_status_1(installed, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_python", lambda code: ("[]", ""))
    installed(keras=None)
    assert doctor.run(argparse.Namespace(json=False))["exit_status"] == 1
    assert "cure: " in capsys.readouterr().out


def test_text_of_another_tensorflow_is_a_problem(installed):
    installed(tensorflow_text="2.20.1")
    finding = only(doctor.check_versions(), "tensorflow-text")
    assert finding.status == doctor.PROBLEM
    assert finding.found == "2.20.1 beside tensorflow 2.21.0: the first two numbers must agree"
    assert finding.cure.endswith("install --no-deps tensorflow-text==2.21.1")


def test_other_keras_is_a_warning(installed):
    installed(keras="3.15.0")
    finding = only(doctor.check_versions(), "keras")
    assert (finding.status, finding.found) == (doctor.WARNING, "3.15.0; the tests run with 3.15.1")


def test_newer_libtpu_beside_tensorflow_tpu_is_a_problem(installed):
    installed(tensorflow=None, tensorflow_tpu="2.20.0", libtpu="0.0.42.1")
    finding = only(doctor.check_versions(), "libtpu")
    assert finding.status == doctor.PROBLEM
    assert finding.cure.endswith("install --no-deps libtpu==0.0.21")


def test_libtpu_is_optional_away_from_a_tpu(installed):
    installed(libtpu=None)
    assert only(doctor.check_versions(), "libtpu").status == doctor.OK


@pytest.mark.parametrize("version, status", [
    ("0.0.42.1", doctor.OK), ("0.0.42", doctor.OK), ("0.0.51", doctor.PROBLEM)])
def test_libtpu_must_go_with_jaxlib(installed, version, status):
    installed(libtpu=version, jaxlib="0.10.2")
    finding = only(doctor.check_versions(), "libtpu")
    assert finding.status == status
    assert finding.found.startswith(f"{version} beside jaxlib 0.10.2")
    assert finding.cure.endswith("install --no-deps libtpu==0.0.42.1" if status == doctor.PROBLEM else "")


def test_plain_tensorflow_on_a_tpu_machine_is_pointed_at_the_other_list(monkeypatch):
    monkeypatch.setattr(environment, "has_tpu", lambda: True)
    assert "requirements-tpu.txt" in only(doctor.check_versions(), "TPU").cure


def test_two_tensorflows_are_a_problem(installed):
    installed(tensorflow_tpu="2.20.0")
    finding = only(doctor.check_double_distributions(), "double packages")
    assert finding.status == doctor.PROBLEM
    assert "uninstall -y tensorflow && " in finding.cure
    assert finding.cure.endswith("install --no-deps --force-reinstall tensorflow-tpu==2.20.0")


def test_requirement_of_a_requirement_is_checked(installed):
    installed(h5py="3.99.0", lxml=None)
    findings = list(doctor.check_requirements())
    assert only(findings, "h5py").found == "tensorflow wants h5py<3.15.0,>=3.11.0, installed is 3.99.0"
    assert only(findings, "lxml").found == "sacrebleu wants lxml, installed is none"
    assert {finding.status for finding in findings} == {doctor.PROBLEM}


def test_tensorflow_tpu_counts_as_tensorflow(installed, monkeypatch):
    requires = {"switch-tf": ["tensorflow>=2.20,<2.22"]}
    monkeypatch.setattr(metadata, "requires", requires.get)
    installed(tensorflow=None, tensorflow_tpu="2.20.0")
    assert only(doctor.check_requirements(), "requirements").status == doctor.OK
    installed(tensorflow=None, tensorflow_tpu="2.19.0")
    assert only(doctor.check_requirements(), "tensorflow-tpu").status == doctor.PROBLEM


def test_folder_that_cannot_be_written_is_a_problem(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    finding = only(doctor.check_folders(), "cache folder")
    assert finding.status == doctor.PROBLEM
    assert finding.found.startswith("/proc is not writable: ")


@pytest.mark.parametrize(
    "code, message",
    [
        ("import os; os.abort()", "ended with status -6"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_import_that_fails_or_aborts_is_reported(code, message):
    assert doctor._python(code) == (None, message)


def test_tensorboard_without_pkg_resources_names_setuptools(monkeypatch):
    monkeypatch.setattr(doctor, "_python", lambda code: (None, "No module named 'pkg_resources'"))
    assert only(doctor.check_tensorboard(), "tensorboard starts").cure.endswith("install --no-deps 'setuptools<81'")
