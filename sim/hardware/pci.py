"""The PCI tree of a described server, as sysfs has it under /sys/bus/pci/devices."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from sim.hardware.model import Device, Server

NVIDIA = 0x10DE
SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
"""GT/s of each generation of PCIe."""
DRIVER = Path("../../../bus/pci/drivers/nvidia")
"""What the kernel links to where NVIDIA's driver has the device. Here nothing is at its end."""


def render_tree(server: Server, driver: bool = True) -> dict[str, bytes | Path]:
    """Return the files of the tree by their paths in it; a path among them is where a symbolic link leads to."""
    files: dict[str, bytes | Path] = {}
    if driver:
        files |= {f"{place.address}/driver": DRIVER for place in server.gpus}
    devices = [(place.address, _of_gpu(server), place.numa_node) for place in server.gpus]
    devices += [(device.address, _of_device(device), device.numa_node) for device in server.devices]
    for address, texts, node in devices:
        cpus = None if node is None else server.numa.get(node)
        texts = {**texts, **_common(), "numa_node": -1 if node is None else node, "local_cpulist": cpus}
        for name, value in texts.items():
            if value is not None:
                files[f"{address}/{name}"] = f"{value}\n".encode()
        files[f"{address}/config"] = _config_space(texts)
    return files


def _of_gpu(server: Server) -> dict[str, Any]:
    pci = server.gpu.pci
    return {
        **_identity(NVIDIA, pci.device, pci.class_code, pci.revision, pci.subsystem_vendor, pci.subsystem_device),
        "current_link_speed": f"{SPEEDS[pci.generation or pci.generation_max]} GT/s PCIe",
        "max_link_speed": f"{SPEEDS[pci.generation_max]} GT/s PCIe",
        "current_link_width": pci.width,
        "max_link_width": pci.width_max,
    }


def _of_device(one: Device) -> dict[str, Any]:
    return _identity(one.vendor, one.device, one.class_code, one.revision, one.subsystem_vendor, one.subsystem_device)


def _identity(
    vendor: int, device: int, class_code: int, revision: int, subsystem_vendor: int | None, subsystem_device: int | None
) -> dict[str, str | None]:
    return {
        "vendor": f"0x{vendor:04x}",
        "device": f"0x{device:04x}",
        "class": f"0x{class_code:06x}",
        "revision": f"0x{revision:02x}",
        "subsystem_vendor": None if subsystem_vendor is None else f"0x{subsystem_vendor:04x}",
        "subsystem_device": None if subsystem_device is None else f"0x{subsystem_device:04x}",
    }


def _common() -> dict[str, Any]:
    return {"irq": 0, "resource": "\n".join(["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 13)}


def _config_space(texts: dict[str, Any]) -> bytes:
    """Return the 64 bytes of a PCI configuration header, which lspci reads."""

    def number(key: str) -> int:
        return int(texts.get(key) or "0", 16)

    header = bytearray(64)
    struct.pack_into("<HH", header, 0, number("vendor"), number("device"))
    struct.pack_into("<I", header, 8, number("class") << 8 | number("revision"))
    struct.pack_into("<HH", header, 0x2C, number("subsystem_vendor"), number("subsystem_device"))
    return bytes(header)
