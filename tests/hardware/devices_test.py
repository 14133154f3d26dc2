"""Chips are known by the names that TensorFlow and TPU VMs give them."""

import pytest

from switch_tf.hardware import devices
from switch_tf.hardware.chips import CHIPS


@pytest.mark.parametrize("name, dtype, teraflops", [
    ("NVIDIA H200", "bfloat16", 989.5), ("NVIDIA H200", "float32", 494.5), ("NVIDIA H200 NVL", "bfloat16", 835.5),
    ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5), ("NVIDIA H100 PCIe", "bfloat16", 756.5),
    ("NVIDIA A100-SXM4-80GB", "bfloat16", 312), ("NVIDIA A100-PCIE-40GB", "float32", 156),
    ("NVIDIA H200", "float64", None), ("NVIDIA H200 MIG 1g.18gb", "bfloat16", None), ("Tesla T4", "bfloat16", None),
    ("NVIDIA GH200 480GB", "bfloat16", None), ("", "bfloat16", None)])
def test_a_gpu_has_the_dense_rate_of_its_data_sheet_or_none(name, dtype, teraflops, monkeypatch):
    monkeypatch.setattr(devices, "device_type", lambda: "GPU")
    monkeypatch.setattr(devices, "device_name", lambda: name)
    assert devices.nominal_flops(dtype) == (teraflops and teraflops * 1e12)


@pytest.mark.parametrize("accelerator, chip", [
    ("v5litepod-8", "v5e"), ("v4-16", "v4"), ("v6e-1", "v6e"), ("tpu7x-8", "tpu7x")])
def test_a_tpu_has_the_rate_that_predictions_are_made_with(accelerator, chip, monkeypatch):
    monkeypatch.setattr(devices, "device_type", lambda: "TPU")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)
    assert devices.nominal_flops("bfloat16") == devices.nominal_flops("float32") == CHIPS[chip].flops
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v99-8")
    assert devices.nominal_flops("bfloat16") is None


def test_of_a_cpu_nothing_is_known():
    assert devices.nominal_flops("float32") is None
