"""Other devices that a virtual machine passes through are not taken for a TPU."""

import pytest

from switch_tf.hardware import host


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes device files, and PCI devices by vendor and class."""
    for name, pattern in (("_ACCELERATORS", "accel[0-9]*"), ("_VFIO", "vfio/[0-9]*"), ("_PCI_DEVICES", "pci/*")):
        monkeypatch.setattr(host, name, str(tmp_path / pattern))

    def make(files, *devices):
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        for index, (vendor, kind) in enumerate(devices):
            folder = tmp_path / "pci" / str(index)
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "class").write_text(f"{kind}\n")

    return make


NETWORK, DISK, CHIP = ("0x1ae0", "0x020000"), ("0x1ae0", "0x010802"), ("0x1ae0", "0x120000")


@pytest.mark.parametrize("files, devices, count", [
    ([], [CHIP], 0), (["accel0", "accel1"], [], 2), (["vfio/vfio", "vfio/0", "vfio/1"], [NETWORK, DISK, CHIP], 2),
    (["vfio/vfio", "vfio/12"], [NETWORK, DISK, ("0x10de", "0x030200")], 0), (["vfio/vfio"], [CHIP], 0)])
def test_chips_are_files_of_googles_driver_or_of_vfio_beside_a_chip_of_googles(machine, files, devices, count):
    machine(files, *devices)
    assert len(host.tpu_files()) == count and host.has_tpu() == (count > 0)
