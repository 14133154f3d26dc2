"""Each fault of the machine is found and comes with its cure."""

import pytest

from switch_tf.installation import machine
from switch_tf.installation.findings import PROBLEM


def only(findings, check):
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


def test_folder_that_cannot_be_written_is_a_problem(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    finding = only(machine.check_folders(), "cache folder")
    assert finding.status == PROBLEM
    assert finding.found.startswith("/proc is not writable: ")


@pytest.mark.parametrize(
    "code, message",
    [
        ("import os; os.abort()", "ended with status -6"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_import_that_fails_or_aborts_is_reported(code, message):
    assert machine._python(code) == (None, message)


def test_tensorboard_without_pkg_resources_names_setuptools(monkeypatch):
    monkeypatch.setattr(machine, "_python", lambda code: (None, "No module named 'pkg_resources'"))
    assert only(machine.check_tensorboard(), "tensorboard starts").cure.endswith("install --no-deps 'setuptools<81'")
