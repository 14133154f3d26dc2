"""Each fault of the machine is found and comes with its cure."""

import contextlib
import io

import pytest

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.installation import doctor
from switch_tf.installation.doctor import OK, PROBLEM, WARNING


def only(findings, check):
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


def _run_here(code, timeout):
    """Does what `run_python` does in this process, where TensorFlow is imported already."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {})
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return printed.getvalue(), ""


def test_folder_that_cannot_be_written_is_a_problem(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    finding = only(doctor.check_folders(), "cache folder")
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
    assert doctor.run_python(code) == (None, message)


def test_tensorboard_without_pkg_resources_names_setuptools(monkeypatch):
    monkeypatch.setattr(doctor, "run_python", lambda code: (None, "No module named 'pkg_resources'"))
    assert only(doctor.check_tensorboard(), "tensorboard starts").cure.endswith("install --no-deps 'setuptools<81'")


def test_a_program_that_jaxlib_cannot_read_names_the_three_packages(monkeypatch):
    monkeypatch.setattr(doctor, "_LOWERING", "raise ValueError('Unable to parse module')")
    finding = only(doctor.check_pjrt(), "pjrt")
    assert finding.status == WARNING
    assert "so --backend=pjrt fails: ValueError: Unable to parse module" in finding.found
    assert finding.cure.endswith("install --no-deps tensorflow==2.21.0 jax==0.10.2 jaxlib==0.10.2")


@pytest.mark.slow  # a process imports TensorFlow; parity/pjrt_test.py runs such programs too
def test_a_program_of_this_tensorflow_is_read_by_this_jaxlib(monkeypatch):
    monkeypatch.setattr(host, "gpus", lambda: [])
    assert only(doctor.check_pjrt(), "pjrt").status == OK


def test_a_gpu_without_a_client_of_jax_is_pointed_at_its_extra(monkeypatch):
    monkeypatch.setattr(doctor, "run_python", lambda code: ("", ""))
    monkeypatch.setattr(host, "gpus", lambda: ["0"])
    assert "install 'jax[cuda12]==" in only(doctor.check_pjrt(), "pjrt").cure


@pytest.mark.parametrize("name", ["jax-cuda12-plugin", "jax-cuda13-plugin"])
def test_the_client_of_a_gpu_has_the_version_of_jax(name, monkeypatch):
    monkeypatch.setattr(doctor, "run_python", lambda code: ("[]", ""))
    monkeypatch.setattr(host, "gpus", lambda: ["0"])
    monkeypatch.setattr(doctor.shutil, "which", lambda command: f"/usr/bin/{command}")
    real = environment.installed_version
    versions = {name: real("jax")}
    monkeypatch.setattr(environment, "installed_version", lambda other: versions.get(other) or real(other))
    assert only(doctor.check_pjrt(), "pjrt").status == OK
    assert only(doctor.check_accelerators(), "accelerators").status == OK
    versions[name] = "0.4.38"
    finding = only(doctor.check_pjrt(), "pjrt")
    assert finding.status == PROBLEM and f"{name} is 0.4.38 and jax" in finding.found
    assert f"install 'jax[{name.split('-')[1]}]==" in finding.cure


@pytest.mark.slow
def test_a_folder_for_runs_must_be_writable_on_a_disk_and_in_a_bucket(bucket, tmp_path):
    for folder in (str(tmp_path / "deep" / "runs"), bucket.new_folder()):
        assert only(doctor.check_model_dir(folder), "MODEL_DIR").status == OK
    assert not list(tmp_path.iterdir())
    finding = only(doctor.check_model_dir("gs://locked/runs"), "MODEL_DIR")
    assert finding.status == PROBLEM and "gs://locked/runs cannot be written and read: " in finding.found


def test_data_that_a_variable_names_must_be_readable(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "run_python", _run_here)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    assert list(doctor.check_data()) == []
    (tmp_path / "c4").mkdir()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    finding = only(doctor.check_data(), "TFDS_DATA_DIR")
    assert (finding.status, finding.found) == (OK, f"{tmp_path} can be read, entries: 1")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "absent"))
    finding = only(doctor.check_data(), "TFDS_DATA_DIR")
    assert finding.status == PROBLEM and "absent cannot be read: " in finding.found and "gs://" in finding.cure
