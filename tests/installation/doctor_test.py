"""Each fault of the machine and its packages is found and comes with its cure."""

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import types
from importlib import metadata

import pytest

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.installation import doctor
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal

GOOD = {**environment.KNOWN_GOOD["tensorflow"], "t5": "0.9.4", "etils": "1.15.0", "fsspec": "2026.1"}
OLD_WAY = {"tensorflow": None, "tensorflow-tpu": "2.20.0"}
REQUIRES = {"switch-tf": ["tensorflow>=2.20,<2.22", "jax", "etils[epath]", "absent; python_version < '3'"],
            "jax": ["jaxlib<=0.10.2"], "etils": ["fsspec; extra == 'epath'", "absent; extra == 'dev'"]}


def assert_reported(findings, pattern):
    report = "\n".join(f"{finding.status} {finding.check}: {finding.found}; {finding.cure}" for finding in findings)
    assert re.search(f"^{pattern}", report, re.MULTILINE), report


@pytest.mark.parametrize("has_tpu, versions, pattern", [
    (False, {"keras": "3.15.0"}, r"warning keras: 3.15.0; the tests run with 3.15.1; .* --no-deps keras==3.15.1$"),
    (False, {"keras": None}, "problem keras: not installed; .*; for all of them: -r requirements.txt$"),
    (True, {"keras": None}, "problem keras: .*-r requirements-tpu.txt$"),
    (True, {"keras": None, **OLD_WAY}, "problem keras: .*-r requirements-tensorflow-tpu.txt$"),
    (False, {"t5": None}, "ok t5: absent; only downstream tasks such as GLUE need it: .* --no-deps t5==0.9.4; $"),
    (False, {"libtpu": None}, "ok libtpu: absent; only `switch-tf compile` needs it: "),
    (True, {"libtpu": None}, "problem libtpu: not installed; .* --no-deps libtpu==0.0.42.1;"),
    (False, {"libtpu": "0.0.42"}, "ok libtpu: 0.0.42; $"),
    (False, {"libtpu": "0.0.51"}, "problem libtpu: 0.0.51 does not go with tensorflow 2.21.0 and jaxlib 0.10.2; "),
    (True, OLD_WAY, "problem libtpu: 0.0.42.1 does not go with tensorflow-tpu 2.20.0 and .* libtpu==0.0.21$"),
    (False, {"tensorflow-tpu": "2.20.0"}, "problem double packages: tensorflow-tpu and tensorflow write the same files"
     "; .* uninstall -y tensorflow && .* --force-reinstall tensorflow-tpu==2.20.0$"),
    (False, {}, "ok requirements: "),
    (False, {"tensorflow": None, "tensorflow-cpu": "2.21.0"}, "ok requirements: "),
    (True, {**OLD_WAY, "tensorflow-tpu": "2.19.0"}, "problem tensorflow-tpu: switch-tf wants .*, installed is 2.19.0"),
    (False, {"jaxlib": "0.11.0"}, "problem jaxlib: jax wants jaxlib<=0.10.2, .* install --no-deps 'jaxlib<=0.10.2'$"),
    (False, {"fsspec": None}, "problem fsspec: etils wants fsspec, installed is none; "),
])
def test_packages(has_tpu, versions, pattern, monkeypatch):
    monkeypatch.setattr(environment, "installed_version", {**GOOD, **versions}.get)
    monkeypatch.setattr(host, "has_tpu", lambda: has_tpu)
    monkeypatch.setattr(metadata, "requires", REQUIRES.get)
    assert_reported(itertools.chain(doctor.check_versions(), doctor.check_double_distributions(),
                                    doctor.check_requirements()), pattern)


@pytest.mark.parametrize("check, versions, message", [
    (doctor.check_gpu_compiler, {}, "jax-cuda12-plugin 0.10.2, but installed is none; run: .* nvidia-cuda-nvcc-cu12$"),
    (doctor.check_gpu_compiler, {"jax-cuda13-plugin": "0.9.2"}, "jax-cuda13-plugin==0.10.2 nvidia-cuda-nvcc$"),
    (doctor.check_gpu_compiler, {"jax-cuda13-plugin": "0.10.2"}, "needs ptxas of CUDA, .* nvidia-cuda-nvcc$"),
    (doctor.check_tpu_compiler, {"libtpu": None}, "installed is none; run: .* --no-deps libtpu==0.0.42.1$"),
    (doctor.check_tpu_compiler, {"libtpu": "0.0.51"}, "libtpu 0.0.42.1, but installed is 0.0.51; run: "),
    (doctor.check_tpu_compiler, OLD_WAY, "does not go with tensorflow-tpu"),
])
def test_a_missing_or_wrong_compiler_says_what_to_install(check, versions, message, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ptxas" else name)
    monkeypatch.setattr(environment, "installed_version", {**GOOD, **versions}.get)
    with pytest.raises(Refusal, match=message):
        check()
    for assembler in ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"):
        fit = {"jax-cuda12-plugin": "0.10.2", assembler: "12.9.86"}
        monkeypatch.setattr(environment, "installed_version", {**GOOD, **fit}.get)
        check()


@pytest.mark.parametrize("backend, content, pattern", [
    ("tensorflow", '{"backend": "tensorflow", "floatx": "float32", "epsilon": 1e-7}', "ok variables: none"),
    ("tensorflow", "not JSON", "ok "), ("tensorflow", "[]", "ok "),
    ("torch", '{"floatx": "bfloat16"}', "warning variables: KERAS_BACKEND=torch, /.*/keras.json={.*}; commands compute "
     "with TensorFlow, whatever Keras' back end; unset or correct them, unless you mean it")])
def test_variables_that_change_a_run_are_listed(backend, content, pattern, monkeypatch, tmp_path):
    (tmp_path / "keras.json").write_text(content)
    monkeypatch.setattr(environment, "OF_USER", {
        "KERAS_BACKEND": backend, "KERAS_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "2", "JAX_X": "", "PATH": "x"})
    assert_reported(doctor.check_variables(), pattern)


@pytest.mark.parametrize("code, timeout, pattern", [
    ("import os; os.abort()", 60, "problem it: fails: ended with status -6; cure"),
    ("import no_such_module", 60, "problem it: fails: ModuleNotFoundError: No module named 'no_such_module'; cure"),
    ("import time; time.sleep(60)", 0.5, "problem it: fails: no answer within 0.5 seconds; cure"),
    ("print(2)", 60, "ok it: runs: 2; $")])
def test_what_fails_or_aborts_or_hangs_in_a_process_is_reported(code, timeout, pattern):
    assert_reported([doctor.run_python("it", code, "runs: ", "fails", "cure", timeout)], pattern)


@pytest.mark.parametrize("devices, lowering, versions, pattern", [
    ("print('1 CPU')", "", {}, "ok accelerators: TensorFlow imports and sees 1 CPU; "),
    ("1 / 0", "", {}, "problem accelerators: TensorFlow does not import: ZeroDivisionError: .*requirements-tpu.txt$"),
    ("print('1 CPU')", "", OLD_WAY, "problem accelerators: a TPU chip is attached and TensorFlow does not see it"),
    ("print('4 TPU')", "", OLD_WAY, "ok accelerators: "),
    ("", "", {}, "ok pjrt: tensorflow 2.21.0 and jaxlib 0.10.2 go together"),
    ("", "1 / 0", {}, "warning pjrt: .* do not go together, so --backend=pjrt fails: ZeroDivisionError: .* --no-deps "
     "tensorflow==2.21.0 jax==0.10.2 jaxlib==0.10.2"),
    ("", "", {}, r"warning GPU: .*, installed is none; .* install 'jax\[cuda12]==0.10.2'"),
    ("", "", {"jax-cuda13-plugin": "0.10.2"}, "ok GPU: --backend=pjrt needs jax-cuda13-plugin 0.10.2, "),
    ("", "", {"jax-cuda13-plugin": "0.4.38"}, r"problem GPU: .*, installed is 0.4.38; .* 'jax\[cuda13]==0.10.2'"),
])
def test_accelerators(devices, lowering, versions, pattern, monkeypatch):
    monkeypatch.setattr(doctor, "_DEVICES", devices)
    monkeypatch.setattr(doctor, "_LOWERING", lowering)
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    monkeypatch.setattr(host, "gpus", lambda: ["0"])
    monkeypatch.setattr(environment, "installed_version", {**GOOD, **versions}.get)
    assert_reported(doctor.check_accelerators(), pattern)


@pytest.mark.parametrize("is_writable, free, status", [
    (True, 5e9, "ok"), (True, 4e9, "warning"), (True, 1e8, "problem"), (False, 5e9, "problem")])
def test_the_cache_folder_must_be_writable_and_have_room(is_writable, free, status, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "absent"))
    monkeypatch.setattr(os, "access", lambda folder, mode: is_writable or folder != tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free))
    assert_reported(doctor.check_folders(), f"{status} cache folder: ")


@pytest.mark.slow
@pytest.mark.parametrize("data, folder, pattern", [
    ("", "{disk}/deep/runs", "ok TFDS_DATA_DIR: .* can be read, entries: 0; \nok MODEL_DIR: "),
    ("", "{bucket}", "ok TFDS_DATA_DIR: .*\nok MODEL_DIR: "),
    ("/absent", "gs://locked/runs", "problem TFDS_DATA_DIR: .*/absent cannot be read: .*=gs://BUCKET/FOLDER\n"
     "problem MODEL_DIR: gs://locked/runs cannot be written and read: ")])
def test_data_and_a_folder_for_runs_are_tried(data, folder, pattern, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", f"{tmp_path}{data}")
    assert_reported(doctor.check_folders(folder.format(disk=tmp_path, bucket=bucket.new_folder())), pattern)
    assert not list(tmp_path.iterdir())


def test_a_tensorboard_that_does_not_start_names_setuptools(monkeypatch):
    monkeypatch.setattr(
        doctor, "run_python", lambda check, code, found, fault, cure: doctor.Finding(check, fault, cure))
    assert_reported(doctor.check_tensorboard(), "problem tensorboard starts: it does not import; .* install --no-deps "
                    "tensorboard==.* 'setuptools<81'$")


def test_variables_of_jax_and_the_back_end_of_keras_json_are_listed(monkeypatch, tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "jax", "floatx": "bfloat16"}')
    monkeypatch.setattr(environment, "OF_USER", {
        "KERAS_HOME": str(tmp_path), "JAX_DISABLE_JIT": "1", "TF_ENABLE_ONEDNN_OPTS": "0", "XLA_FLAGS": "--x"})
    assert_reported(doctor.check_variables(), "warning variables: JAX_DISABLE_JIT=1, TF_ENABLE_ONEDNN_OPTS=0, "
                    'XLA_FLAGS=--x, /.*/keras.json={"backend": "jax", "floatx": "bfloat16"}; commands compute with ')


def test_without_a_gpu_no_client_of_gpus_is_asked_for(monkeypatch):
    monkeypatch.setattr(doctor, "run_python", lambda check, *_: doctor.Finding(check, "works"))
    monkeypatch.setattr(host, "gpus", list)
    assert [finding.check for finding in doctor.check_accelerators()] == ["accelerators", "pjrt"]


@pytest.fixture
def chips(monkeypatch, tmp_path):
    """A host with two chips, which are files here, and an occupied port. Returns the files."""
    files = [str(tmp_path / f"accel{index}") for index in range(2)]
    for file in (*files, tmp_path / "lock"):
        open(file, "w").close()
    monkeypatch.setattr(host, "tpu_files", lambda: files)
    monkeypatch.setattr(doctor, "_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(doctor, "_CHIPS", "print('2 TPU v5 lite')")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    for name in ("TF_CONFIG", "MEGASCALE_NUM_SLICES"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("", 0)) as server:
        monkeypatch.setattr(cluster, "TPU_PORT", server.getsockname()[1])
        yield files


@pytest.mark.parametrize("variables, code, pattern", [
    ({}, "print('2 TPU v5 lite')", "ok TPU hosts: this one alone; \nok TPU chips: JAX has 2 TPU v5 lite; $"),
    ({}, "raise RuntimeError('No chips')", "problem TPU chips: JAX cannot use them: RuntimeError: No chips; .* "
     "--no-deps jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1$"),
    ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, "", "problem TPU hosts: .* cannot listen at port"),
    ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, "1 / 0", "ok TPU hosts: 1 of 2, which meet at a:.*\n"
     "ok TPU chips: 2; to try them, train a few steps on all hosts; $"),
    ({"MEGASCALE_NUM_SLICES": "2"}, "1 / 0", "problem TPU hosts: This TPU is one of 2 slices.*\nok TPU chips: 2; "),
])
def test_the_hosts_and_chips_of_a_tpu(variables, code, pattern, chips, monkeypatch):
    monkeypatch.setattr(doctor, "_CHIPS", code)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_reported(doctor.check_tpu(), pattern)


def test_without_a_tpu_or_beside_tensorflow_tpu_no_chips_are_checked(chips, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(host, "tpu_files", list)
        assert not list(doctor.check_tpu())
    monkeypatch.setattr(environment, "installed_version", {**GOOD, **OLD_WAY}.get)
    assert not list(doctor.check_tpu())


def test_a_process_that_has_the_chips_is_named(chips):
    holding = "import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holding, chips[1]], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        findings = list(doctor.check_tpu())
        holder.kill()
    pid = holder.pid
    assert_reported(findings, rf"problem TPU chips: they belong to process {pid} \(python.*\); kill {pid}$")
    assert [finding.check for finding in findings] == ["TPU hosts", "TPU chips"]  # JAX is not started


@pytest.mark.parametrize("name", ["accel0", "lock"])
def test_files_of_another_user_are_a_problem(name, chips, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not path.endswith(name) and access(path, mode))
    findings = list(doctor.check_tpu())
    assert [finding.check for finding in findings] == ["TPU hosts", "TPU chips"]
    assert_reported(findings, f"problem TPU chips: this user cannot read and write /.*/{name}; end any .*, "
                    f"then sudo rm -f /.*/lock && sudo chmod a.rw {' '.join(chips)}$")
