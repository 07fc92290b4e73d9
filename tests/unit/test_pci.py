from __future__ import annotations

from pathlib import Path

import pytest

from gpuready.hardware import pci
from gpuready.outcome import MachineCannot

SYSFS = Path(pci.SYSFS)

# sysfs of one H100 in an 8 x H100 server with NVSwitches, as NCCL read it (github.com/aliyun/SimAI/issues/128).
H100 = {
    "vendor": "0x10de",
    "device": "0x2330",
    "class": "0x030200",
    "subsystem_vendor": "0x10de",
    "subsystem_device": "0x16c1",
    "numa_node": "1",
    "current_link_speed": "32.0 GT/s PCIe",
    "current_link_width": "16",
    "max_link_speed": "32.0 GT/s PCIe",
    "max_link_width": "16",
}
NVSWITCH = {"vendor": "0x10de", "device": "0x22a3", "class": "0x068000", "revision": "0xa1"}
NVME = {"vendor": "0x144d", "device": "0xa824", "class": "0x010802", "numa_node": "-1"}
PCI_BRIDGE = {"vendor": "0x1000", "device": "0xc030", "class": "0x060400"}
GPU_AUDIO = {"vendor": "0x10de", "device": "0x10f0", "class": "0x040300"}


def tree(root: Path, **devices: dict[str, str]) -> Path:
    for address, files in devices.items():
        directory = root / address.replace("_", ":").replace("-", ".")
        directory.mkdir(parents=True)
        for name, text in files.items():
            (directory / name).write_text(text + "\n", encoding="ascii")
    return root


def test_a_gpu_is_read_with_ids_numa_node_and_link(tmp_path: Path) -> None:
    tree(tmp_path, **{"0000:b8:00.0": H100})

    assert pci.scan(tmp_path) == [
        pci.PciDevice(
            address="0000:b8:00.0",
            vendor=0x10DE,
            device=0x2330,
            class_code=0x030200,
            subsystem_vendor=0x10DE,
            subsystem_device=0x16C1,
            revision=None,
            numa_node=1,
            link_speed_gts=32.0,
            link_width=16,
            max_link_speed_gts=32.0,
            max_link_width=16,
            driver=None,
        )
    ]
    assert pci.scan(tmp_path)[0].ids == "10de:2330"


def test_devices_are_told_apart_by_vendor_and_class(tmp_path: Path) -> None:
    tree(
        tmp_path,
        **{
            "0000:b8:00.0": H100,
            "0000:b8:00.1": GPU_AUDIO,
            "0000:05:00.0": NVSWITCH,
            "0000:20:00.0": NVME,
            "0000:d7:00.0": PCI_BRIDGE,
        },
    )
    devices = pci.scan(tmp_path)

    assert [device.address for device in devices] == sorted(device.address for device in devices)
    assert [device.address for device in pci.gpus(devices)] == ["0000:b8:00.0"]
    assert [device.address for device in pci.nvswitches(devices)] == ["0000:05:00.0"]
    assert [device.address for device in pci.nvmes(devices)] == ["0000:20:00.0"]


def test_what_sysfs_does_not_tell_is_none_and_never_zero(tmp_path: Path) -> None:
    # Linux writes -1 for an unknown NUMA node, `Unknown` and 0 or 255 for a link that is down.
    down = {
        **H100,
        "numa_node": "-1",
        "current_link_speed": "Unknown",
        "current_link_width": "0",
        "max_link_width": "255",
    }
    tree(tmp_path, **{"0000:b8:00.0": down})
    (gpu,) = pci.scan(tmp_path)

    assert gpu.numa_node is None
    assert gpu.link_speed_gts is None
    assert gpu.link_width is None
    assert gpu.max_link_width is None
    assert gpu.max_link_speed_gts == 32.0


def test_older_kernels_write_the_speed_without_pcie(tmp_path: Path) -> None:
    tree(tmp_path, **{"0000:3b:00.0": {**H100, "current_link_speed": "8 GT/s", "max_link_speed": "2.5 GT/s"}})
    (gpu,) = pci.scan(tmp_path)

    assert (gpu.link_speed_gts, gpu.max_link_speed_gts) == (8.0, 2.5)


def test_the_bound_driver_is_named(tmp_path: Path) -> None:
    tree(tmp_path, **{"0000:b8:00.0": H100})
    (tmp_path / "drivers/vfio-pci").mkdir(parents=True)
    (tmp_path / "0000:b8:00.0/driver").symlink_to("../drivers/vfio-pci")

    assert pci.scan(tmp_path)[0].driver == "vfio-pci"


def test_a_device_that_vanishes_meanwhile_is_left_out(tmp_path: Path) -> None:
    tree(tmp_path, **{"0000:b8:00.0": H100, "0000:d9:00.0": H100})
    (tmp_path / "0000:b8:00.0/vendor").unlink()

    assert [device.address for device in pci.scan(tmp_path)] == ["0000:d9:00.0"]


def test_no_pci_directory_is_said_and_is_not_an_empty_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineCannot) as caught:
        pci.scan(tmp_path / "devices")
    (failure,) = caught.value.failures

    assert failure.code == "no-pci"
    assert str(tmp_path / "devices") in failure.what
    assert failure.why == "No such file or directory"


@pytest.mark.skipif(not SYSFS.is_dir() or not any(SYSFS.iterdir()), reason="this machine has no PCI devices")
def test_this_machine_is_read_as_the_kernel_announces_it() -> None:
    announced = {}
    for uevent in SYSFS.glob("*/uevent"):
        values = dict(line.split("=", 1) for line in uevent.read_text(encoding="ascii").splitlines())
        announced[values["PCI_SLOT_NAME"]] = (
            values["PCI_ID"].lower(),
            int(values["PCI_CLASS"], 16),
            values.get("DRIVER"),
        )
    if not announced:
        pytest.skip("this machine's PCI devices are simulated")

    assert {device.address: (device.ids, device.class_code, device.driver) for device in pci.scan()} == announced
