"""The type of a TPU is read from the environment, or from the metadata server of the machine."""

import socket

import pytest

from switch_tf.hardware import chips, devices, host


@pytest.fixture(autouse=True)
def _tpu_without_a_variable(monkeypatch):
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # never asked
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    monkeypatch.setattr(host, "_TIMEOUT", 60)  # a busy machine may take its time
    host.vm_attribute.cache_clear()
    yield
    host.vm_attribute.cache_clear()


def test_the_metadata_server_is_asked_once(metadata_server, monkeypatch):
    address, asked = metadata_server(accelerator_type="v5litepod-8\n")
    monkeypatch.setenv("GCE_METADATA_HOST", address)
    assert host.accelerator_type() == host.accelerator_type() == "v5litepod-8"
    assert asked == ["/computeMetadata/v1/instance/attributes/accelerator-type"]
    monkeypatch.setattr(devices, "device_type", lambda: "TPU")
    assert devices.nominal_flops("bfloat16") == 197e12
    with pytest.raises(ValueError, match=r"and has 16\.0 GiB"):
        chips.check_memory(17 * 2**30)


def test_the_variable_comes_first_and_a_machine_without_tpu_asks_nobody(metadata_server, monkeypatch):
    address, asked = metadata_server(accelerator_type="v5litepod-8")
    monkeypatch.setenv("GCE_METADATA_HOST", address)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-8")
    assert host.accelerator_type() == "v4-8"
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    monkeypatch.setattr(host, "has_tpu", lambda: False)
    assert host.accelerator_type() == "" and not asked


@pytest.mark.parametrize("status, tries", [(404, 1), (503, 3)])
def test_a_server_that_does_not_know_is_no_error_and_one_that_is_busy_is_asked_again(
        metadata_server, monkeypatch, status, tries):
    address, asked = metadata_server(accelerator_type=status)
    monkeypatch.setenv("GCE_METADATA_HOST", address)
    assert host.accelerator_type() == "" and len(asked) == tries


def test_a_server_that_is_not_there_is_no_error(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    assert host.accelerator_type() == ""


def test_a_server_that_never_answers_is_given_up_soon(monkeypatch):
    monkeypatch.setattr(host, "_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{silent.getsockname()[1]}")
        assert host.accelerator_type() == ""
