"""Each fault of the packages is found and comes with its cure."""

import shutil
from importlib import metadata

import pytest

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.installation import doctor
from switch_tf.installation.doctor import OK, PROBLEM, WARNING
from switch_tf.refusals import Refusal


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


def test_text_of_another_tensorflow_is_a_problem(installed):
    installed(tensorflow_text="2.20.1")
    finding = only(doctor.check_versions(), "tensorflow-text")
    assert finding.status == PROBLEM
    assert finding.found == "2.20.1 beside tensorflow 2.21.0: the first two numbers must agree"
    assert finding.cure.endswith("install --no-deps tensorflow-text==2.21.1")


def test_other_keras_is_a_warning(installed):
    installed(keras="3.15.0")
    finding = only(doctor.check_versions(), "keras")
    assert (finding.status, finding.found) == (WARNING, "3.15.0; the tests run with 3.15.1")


def test_another_jaxlib_than_jax_wants_is_found_twice(installed):
    installed(jaxlib="0.11.0")
    assert only(doctor.check_versions(), "jaxlib").found == "0.11.0; the tests run with 0.10.2"
    assert only(doctor.check_requirements(), "jaxlib").found.startswith("jax wants jaxlib<=0.10.2")


def test_newer_libtpu_beside_tensorflow_tpu_is_a_problem(installed):
    installed(tensorflow=None, tensorflow_tpu="2.20.0", libtpu="0.0.42.1")
    finding = only(doctor.check_versions(), "libtpu")
    assert finding.status == PROBLEM
    assert finding.cure.endswith("install --no-deps libtpu==0.0.21")


def test_libtpu_is_optional_away_from_a_tpu(installed):
    installed(libtpu=None)
    assert only(doctor.check_versions(), "libtpu").status == OK


@pytest.mark.parametrize("version, status", [
    ("0.0.42.1", OK), ("0.0.42", OK), ("0.0.51", PROBLEM)])
def test_libtpu_must_go_with_jaxlib(installed, version, status):
    installed(libtpu=version, jaxlib="0.10.2")
    finding = only(doctor.check_versions(), "libtpu")
    assert finding.status == status
    assert finding.found.startswith(f"{version} beside jaxlib 0.10.2")
    assert finding.cure.endswith("install --no-deps libtpu==0.0.42.1" if status == PROBLEM else "")


@pytest.mark.parametrize("has_tpu, tensorflow_tpu, file", [
    (False, None, "requirements.txt"), (True, None, "requirements-tpu.txt"),
    (True, "2.20.0", "requirements-tensorflow-tpu.txt")])
def test_what_is_missing_is_in_the_list_of_the_machine(installed, monkeypatch, has_tpu, tensorflow_tpu, file):
    monkeypatch.setattr(host, "has_tpu", lambda: has_tpu)
    installed(keras=None, tensorflow_tpu=tensorflow_tpu)
    assert only(doctor.check_versions(), "keras").cure.endswith(f"; for all of them: -r {file}")


def test_on_a_tpu_jax_needs_libtpu(installed, monkeypatch):
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    installed(libtpu=None)
    finding = only(doctor.check_versions(), "libtpu")
    assert finding.status == PROBLEM and "install --no-deps libtpu==0.0.42.1" in finding.cure
    installed(libtpu="0.0.51")
    assert "JAX may not start the TPU" in only(doctor.check_versions(), "libtpu").found


def test_two_tensorflows_are_a_problem(installed):
    installed(tensorflow_tpu="2.20.0")
    finding = only(doctor.check_double_distributions(), "double packages")
    assert finding.status == PROBLEM
    assert "uninstall -y tensorflow && " in finding.cure
    assert finding.cure.endswith("install --no-deps --force-reinstall tensorflow-tpu==2.20.0")


def test_requirement_of_a_requirement_is_checked(installed):
    installed(h5py="3.99.0", lxml=None)
    findings = list(doctor.check_requirements())
    assert only(findings, "h5py").found == "tensorflow wants h5py<3.15.0,>=3.11.0, installed is 3.99.0"
    assert only(findings, "lxml").found == "sacrebleu wants lxml, installed is none"
    assert {finding.status for finding in findings} == {PROBLEM}


def test_tensorflow_tpu_counts_as_tensorflow(installed, monkeypatch):
    requires = {"switch-tf": ["tensorflow>=2.20,<2.22"]}
    monkeypatch.setattr(metadata, "requires", requires.get)
    installed(tensorflow=None, tensorflow_tpu="2.20.0")
    assert only(doctor.check_requirements(), "requirements").status == OK
    installed(tensorflow=None, tensorflow_tpu="2.19.0")
    assert only(doctor.check_requirements(), "tensorflow-tpu").status == PROBLEM


@pytest.mark.parametrize("versions, what", [
    ({}, r"is not installed; run: .*install jax-cuda12-plugin==0\.10\.2 nvidia-cuda-nvcc-cu12$"),
    ({"jax-cuda12-plugin": "0.9.2"}, r"is jax-cuda12-plugin 0\.9\.2, which jaxlib 0\.10\.2 does not go with; run: "),
    ({"jax-cuda12-plugin": "0.10.2"}, "needs ptxas of CUDA, which .* install nvidia-cuda-nvcc-cu12$"),
    ({"jax-cuda13-plugin": "0.10.2"}, "needs ptxas of CUDA, which .* install nvidia-cuda-nvcc$")])
def test_a_missing_compiler_for_gpus_says_what_to_install(monkeypatch, versions, what):
    monkeypatch.setattr(environment, "installed_version", {"jaxlib": "0.10.2", **versions}.get)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ptxas" else name)
    with pytest.raises(Refusal, match=f"The compiler for NVIDIA's GPUs {what}"):
        doctor.check_gpu_compiler()
    for assembler in ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"):
        found = {"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2", assembler: "12.9.86"}
        monkeypatch.setattr(environment, "installed_version", found.get)
        doctor.check_gpu_compiler()


@pytest.mark.parametrize("version, what", [(None, "is not installed"), ("0.0.51", "is libtpu 0.0.51, which jaxlib")])
def test_a_missing_or_wrong_compiler_says_what_to_install(monkeypatch, version, what):
    monkeypatch.setattr(environment, "installed_version", lambda name: version if name == "libtpu" else None)
    with pytest.raises(Refusal, match=rf"The TPU compiler {what}.*; run: .* --no-deps libtpu==0\.0\.42\.1"):
        doctor.check_tpu_compiler()


def test_variables_that_change_a_run_are_listed(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_OF_USER", {
        "KERAS_BACKEND": "tensorflow", "KERAS_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "2", "JAX_X": "",
        "PATH": "x"})
    assert only(doctor.check_variables(), "variables").status == OK
    file = tmp_path / "keras.json"
    for content in ('{"backend": "tensorflow", "floatx": "float32", "epsilon": 1e-7}', "not JSON", "[]"):
        file.write_text(content)
        assert only(doctor.check_variables(), "variables").status == OK
    file.write_text('{"backend": "jax", "floatx": "bfloat16"}')
    monkeypatch.setitem(environment._OF_USER, "KERAS_BACKEND", "torch")
    monkeypatch.setitem(environment._OF_USER, "JAX_DISABLE_JIT", "1")
    found = only(doctor.check_variables(), "variables")
    assert found.status == WARNING
    assert found.found == (
        f'KERAS_BACKEND=torch, JAX_DISABLE_JIT=1, {file}={{"backend": "jax", "floatx": "bfloat16"}}; commands compute '
        "with TensorFlow, whatever Keras' back end")
    assert found.cure == f"unset KERAS_BACKEND JAX_DISABLE_JIT and correct {file}, unless you mean it"
