"""The doctor of a TPU finds what keeps JAX from the chips. The chips are files here, and JAX's answers are made up."""

import os
import socket
import subprocess
import sys

import pytest

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.installation import doctor
from switch_tf.installation.doctor import OK, PROBLEM
from switch_tf.partitioning import cluster


@pytest.fixture
def chips(monkeypatch, tmp_path):
    """A host with two chips, alone, on which JAX starts; gives their files."""
    files = [str(tmp_path / f"accel{index}") for index in range(2)]
    for file in files:
        open(file, "w").close()
    monkeypatch.setattr(host, "tpu_files", lambda: files)
    monkeypatch.setattr(doctor, "_LOCK", tmp_path / "lock")
    monkeypatch.setattr(doctor, "run_python", lambda code: ('["TPU v5 lite", "TPU v5 lite"]', ""))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    for name in ("TF_CONFIG", "MEGASCALE_NUM_SLICES"):
        monkeypatch.delenv(name, raising=False)
    return files


def found():
    return {finding.check: finding for finding in doctor.check_tpu()}


def test_chips_that_start_are_counted(chips):
    findings = found()
    assert [(finding.check, finding.status) for finding in findings.values()] == [
        ("TPU chips", OK), ("TPU hosts", OK), ("TPU starts", OK)]
    assert findings["TPU chips"].found.startswith("2 attached")
    assert findings["TPU starts"].found == "JAX has 2 TPU v5 lite"


def test_without_a_tpu_or_beside_tensorflow_tpu_nothing_is_checked(chips, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(host, "tpu_files", lambda: [])
        assert not found()
    monkeypatch.setattr(environment, "installed_version", lambda name: "2.20.0")
    assert not found()


def test_a_client_that_does_not_start_names_the_three_packages(chips, monkeypatch):
    monkeypatch.setattr(doctor, "run_python", lambda code: (None, "RuntimeError: Unable to initialize backend 'tpu'"))
    finding = found()["TPU starts"]
    assert finding.status == PROBLEM and "Unable to initialize backend" in finding.found
    assert finding.cure.endswith("install --no-deps jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1")


def test_a_process_that_has_the_chips_is_named(chips):
    holding = "import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holding, chips[1]], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        findings = found()
        holder.kill()
    assert findings["TPU chips"].status == PROBLEM and "TPU starts" not in findings
    assert findings["TPU chips"].found.startswith(f"they belong to process {holder.pid} (python")
    assert findings["TPU chips"].cure == f"kill {holder.pid}"


@pytest.mark.parametrize("file, words", [("chip", "cannot read and write"), ("lock", "belongs to another user")])
def test_files_of_another_user_are_a_problem(chips, monkeypatch, file, words):
    doctor._LOCK.touch()
    closed = chips[0] if file == "chip" else str(doctor._LOCK)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != closed and access(path, mode))
    findings = found()
    assert findings["TPU chips"].status == PROBLEM and words in findings["TPU chips"].found
    assert "sudo " in findings["TPU chips"].cure and "TPU starts" not in findings


def test_on_several_hosts_the_first_needs_its_port_and_the_chips_are_left_alone(chips, monkeypatch):
    monkeypatch.setattr(doctor, "run_python", lambda code: pytest.fail("it would wait for the others"))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    with socket.create_server(("", 0)) as server:
        monkeypatch.setattr(cluster, "TPU_PORT", server.getsockname()[1])
        for index, status in (("0", PROBLEM), ("1", OK)):
            monkeypatch.setenv("TPU_WORKER_ID", index)
            assert found()["TPU hosts"].status == status
    assert found()["TPU starts"].found.startswith("not tried on one of several hosts")


def test_one_of_several_slices_is_a_problem(chips, monkeypatch):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    assert "This TPU is one of 2 slices" in found()["TPU hosts"].found
