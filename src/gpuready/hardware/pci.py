"""PCI devices, read from sysfs; works without any driver, so also on a blank server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuready.outcome import Failure, MachineCannot

NVIDIA = 0x10DE
"""PCI vendor id of NVIDIA."""

SYSFS = "/sys/bus/pci/devices"

_SPEED = re.compile(r"([0-9.]+) GT/s")


@dataclass(frozen=True)
class PciDevice:
    """One PCI function; `lspci -nn -s ADDRESS` shows the same ids.

    The ids are the numbers of pci.ids, e.g. vendor 0x10de and device 0x2330 for an H100 SXM5 80GB.
    """

    address: str
    """Domain, bus, device and function in sysfs' spelling, e.g. `0000:1b:00.0`."""
    vendor: int
    device: int
    class_code: int
    """24 bits: class, subclass, programming interface, e.g. 0x030200 for a 3D controller."""
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    revision: int | None = None
    numa_node: int | None = None
    """NUMA node that the device hangs on; None where the firmware does not tell."""
    link_speed_gts: float | None = None
    """PCIe speed now, in GT/s (32.0 is generation 5); an idle GPU may have lowered it."""
    link_width: int | None = None
    """PCIe lanes in use now."""
    max_link_speed_gts: float | None = None
    max_link_width: int | None = None
    driver: str | None = None
    """Kernel driver bound to the device, e.g. `nvidia` or `vfio-pci`; None when none is."""

    @property
    def ids(self) -> str:
        """Vendor and device as lspci writes them, e.g. `10de:2330`."""
        return f"{self.vendor:04x}:{self.device:04x}"

    @property
    def is_gpu(self) -> bool:
        """Whether this is an NVIDIA GPU: a display controller (class 03) of NVIDIA."""
        return self.vendor == NVIDIA and self.class_code >> 16 == 0x03

    @property
    def is_nvswitch(self) -> bool:
        """Whether this is an NVSwitch: a bridge of the class `other` (0680) of NVIDIA."""
        return self.vendor == NVIDIA and self.class_code >> 8 == 0x0680

    @property
    def is_nvme(self) -> bool:
        """Whether this is an NVMe controller (class 010802) of any vendor."""
        return self.class_code == 0x010802


def scan(root: str | Path = SYSFS) -> list[PciDevice]:
    """Return all PCI devices under a sysfs directory, sorted by address; like `lspci -Dnn`.

    A device that vanishes while it is read is left out. Raises MachineCannot when there is no such directory.
    """
    directory = Path(root)
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise MachineCannot(
            Failure(
                "no-pci",
                f"the PCI devices under {directory} cannot be listed",
                error.strerror or str(error),
                "run this on the server itself, with sysfs mounted",
            )
        ) from error
    return [device for entry in entries if (device := _read(entry)) is not None]


def gpus(devices: Iterable[PciDevice]) -> list[PciDevice]:
    """Return the NVIDIA GPUs among the devices; like `lspci -d 10de::03xx`."""
    return [device for device in devices if device.is_gpu]


def nvswitches(devices: Iterable[PciDevice]) -> list[PciDevice]:
    """Return the NVSwitches among the devices; like `lspci -d 10de::0680`."""
    return [device for device in devices if device.is_nvswitch]


def nvmes(devices: Iterable[PciDevice]) -> list[PciDevice]:
    """Return the NVMe controllers among the devices; like `lspci -d ::0108`."""
    return [device for device in devices if device.is_nvme]


def _read(entry: Path) -> PciDevice | None:
    vendor, device, class_code = (_number(entry / name, 16) for name in ("vendor", "device", "class"))
    if vendor is None or device is None or class_code is None:
        return None
    numa_node = _number(entry / "numa_node", 10)
    driver = entry / "driver"
    return PciDevice(
        address=entry.name,
        vendor=vendor,
        device=device,
        class_code=class_code,
        subsystem_vendor=_number(entry / "subsystem_vendor", 16),
        subsystem_device=_number(entry / "subsystem_device", 16),
        revision=_number(entry / "revision", 16),
        numa_node=None if numa_node is None or numa_node < 0 else numa_node,
        link_speed_gts=_speed(entry / "current_link_speed"),
        link_width=_width(entry / "current_link_width"),
        max_link_speed_gts=_speed(entry / "max_link_speed"),
        max_link_width=_width(entry / "max_link_width"),
        driver=driver.resolve().name if driver.is_symlink() else None,
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path, base: int) -> int | None:
    text = _text(path)
    try:
        return None if text is None else int(text, base)
    except ValueError:
        return None


def _speed(path: Path) -> float | None:
    found = _SPEED.match(_text(path) or "")  # the kernel writes `Unknown` for a link that is down
    return float(found.group(1)) if found else None


def _width(path: Path) -> int | None:
    width = _number(path, 10)
    return width if width not in (0, 255) else None  # 0 and 255: no link
