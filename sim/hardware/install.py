#!/usr/bin/env python3
"""Puts stand-in GPU hardware into the root of a simulated machine.

    python3 sim/hardware/install.py --root ROOT --preset h100-80gb-sxm-x8

The machine then has a libnvidia-ml.so.1 that answers from /var/lib/gpuready-standin/gpus.conf, and a unit that,
at boot, makes the dynamic linker find that library first, lays a PCI tree over /sys/bus/pci/devices and the
driver's lines over /proc/devices. The library has a directory of its own because Debian's libnvidia-ml1, which
comes with the CUDA toolkit, owns the usual place.

Running it again changes nothing. It needs gcc and the system's Python, nothing else, and never installs into a
running system: ROOT is a directory other than /. The unit does nothing outside a container, nor where there is
real NVIDIA hardware.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "nvml"
PRESETS = HERE / "presets"

COMPILER = "gcc"
FLAGS = (
    "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-fPIC", "-shared", "-fvisibility=hidden",
    "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wl,-soname,libnvidia-ml.so.1",
)  # fmt: skip

LIBRARY = "libnvidia-ml-standin.so"
STATE = "var/lib/gpuready-standin/gpus.conf"
HOME = "usr/lib/gpuready-standin"
LINKER = "etc/ld.so.conf.d/00-gpuready-standin.conf"  # sorts before the distribution's own directories
UNIT = "gpuready-standin-hardware.service"

GPU_KEYS = frozenset(
    [
        "name",
        "pci_device_id",
        "pci_subsystem_id",
        "memory_total_bytes",
        "memory_reserved_bytes",
        "compute_capability_major",
        "compute_capability_minor",
        "brand",
        "architecture",
        "mig_current",
        "mig_pending",
        "mig_max_devices",
        "persistence_mode",
        "ecc_current",
        "ecc_pending",
        "temperature_celsius",
        "power_milliwatts",
        "power_limit_milliwatts",
        "utilization_gpu_percent",
        "utilization_memory_percent",
        "nvlink_links",
        "nvlink_active",
    ]
)
PCI_KEYS = frozenset(
    [
        "what",
        "address",
        "vendor",
        "device",
        "class",
        "revision",
        "subsystem_vendor",
        "subsystem_device",
        "numa_node",
        "link_speed",
        "link_width",
    ]
)
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\Z")

UNIT_TEXT = f"""\
# A stand-in: simulated PCI devices and NVML. Only inside a container, never on a real server.
[Unit]
Description=Stand-in GPU hardware of a simulated machine
DefaultDependencies=no
Conflicts=shutdown.target
After=local-fs.target
Before=sysinit.target shutdown.target
ConditionVirtualization=container

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/{HOME}/hardware-standin start
ExecStop=/{HOME}/hardware-standin stop

[Install]
WantedBy=sysinit.target
"""

SCRIPT_TEXT = f"""\
#!/bin/sh
# A stand-in: makes the dynamic linker find the simulated NVML, lays the simulated PCI tree over
# /sys/bus/pci/devices and the NVIDIA driver's lines over /proc/devices.
set -eu
home=/{HOME}
run=/run/gpuready-standin
over=' /sys/bus/pci/devices  /proc/devices '

case "$1" in
start)
    "$0" stop
    if grep -qs 0x10de /sys/bus/pci/devices/*/vendor; then
        echo "hardware-standin: this machine has real NVIDIA hardware; nothing is simulated on it" >&2
        exit 1
    fi
    ldconfig
    mkdir -p "$run"
    mount --bind "$home/pci" /sys/bus/pci/devices
    if [ -f "$home/character-devices" ]; then
        awk -v lines="$home/character-devices" '
            {{ print }}
            /^Character devices:/ {{ while ((getline line < lines) > 0) print line }}
        ' /proc/devices >"$run/proc-devices"
        mount --bind "$run/proc-devices" /proc/devices
    fi
    ;;
stop)
    for place in $over; do
        while grep -q " $place " /proc/self/mounts; do umount "$place"; done
    done
    ;;
*)
    echo "hardware-standin: start or stop, not $1" >&2
    exit 2
    ;;
esac
"""

# What the NVIDIA driver registers: 195 is its own major number, the others are given out when it loads.
CHARACTER_DEVICES = (
    "195 nvidia\n195 nvidiactl\n234 nvidia-caps\n235 nvidia-nvswitch\n236 nvidia-nvlink\n511 nvidia-uvm\n"
)


class RefusalError(Exception):
    """Nothing was changed; the text is one sentence for the operator."""


def load_preset(name: str) -> dict[str, Any]:
    """Read and check a preset, by its name or by the path of a JSON file of the same form."""
    path = Path(name) if name.endswith(".json") else PRESETS / f"{name}.json"
    try:
        preset = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in PRESETS.glob("*.json")))
        raise RefusalError(f"there is no preset {name}; known are: {known}") from None
    except ValueError as error:
        raise RefusalError(f"{path}: not JSON: {error}") from None
    check_preset(path, preset)
    return dict(preset)


def check_preset(path: Path, preset: dict[str, Any]) -> None:
    """Refuse a preset that lacks a key, has an unknown one, or gives a PCI address twice."""
    for key in ("system", "gpu", "gpu_pci", "gpus", "pci"):
        if key not in preset:
            raise RefusalError(f"{path}: key {key} is missing")
    for key in ("name", "pci_device_id", "pci_subsystem_id", "memory_total_bytes"):
        if key not in preset["gpu"]:
            raise RefusalError(f"{path}: key gpu.{key} is missing")
    for key in sorted(set(preset["gpu"]) - GPU_KEYS):
        raise RefusalError(f"{path}: unknown key gpu.{key}; allowed are: {', '.join(sorted(GPU_KEYS))}")
    devices = pci_devices(preset)
    for device in devices:
        for key in sorted(set(device) - PCI_KEYS):
            allowed = ", ".join(sorted(PCI_KEYS))
            raise RefusalError(f"{path}: unknown key {key} of {device['address']}; allowed are: {allowed}")
        if not ADDRESS.match(device["address"]):
            raise RefusalError(f"{path}: {device['address']} is not a PCI address like 0000:1b:00.0")
    addresses = [device["address"] for device in devices]
    for address in addresses:
        if addresses.count(address) > 1:
            raise RefusalError(f"{path}: PCI address {address} is used twice")


def pci_devices(preset: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every PCI device of a preset: its GPUs, then the others."""
    gpu = preset["gpu"]
    device, subsystem = int(gpu["pci_device_id"], 16), int(gpu["pci_subsystem_id"], 16)
    common = {
        "what": gpu["name"],
        "vendor": f"0x{device & 0xFFFF:04x}",
        "device": f"0x{device >> 16:04x}",
        "subsystem_vendor": f"0x{subsystem & 0xFFFF:04x}",
        "subsystem_device": f"0x{subsystem >> 16:04x}",
        **preset["gpu_pci"],
    }
    return [{**common, **one} for one in preset["gpus"]] + list(preset["pci"])


def render_state(preset: dict[str, Any], machine: str) -> str:
    """Return the state file.

    UUIDs and serial numbers follow from the machine's name, so that no two machines share one.
    """
    lines = [
        "gpuready-standin 1",
        f"# Simulated hardware of {machine}: {preset.get('description', '')}",
        "",
        "[system]",
        *(f"{key} = {value}" for key, value in preset["system"].items()),
    ]
    for index, one in enumerate(preset["gpus"]):
        identity = uuid.uuid5(uuid.NAMESPACE_DNS, f"{machine}/gpu/{index}")
        lines += [
            "",
            f"[gpu {index}]",
            f"uuid = GPU-{identity}",
            f"serial = 165{identity.int % 10**10:010d}",
            f"pci_address = {one['address']}",
            f"minor = {index}",
            *(f"{key} = {value}" for key, value in preset["gpu"].items()),
        ]
    return "\n".join(lines) + "\n"


def config_space(device: dict[str, Any]) -> bytes:
    """Return the 64 bytes of a PCI configuration header, which lspci reads."""

    def number(key: str) -> int:
        return int(device.get(key, "0"), 16)

    header = bytearray(64)
    struct.pack_into("<HH", header, 0, number("vendor"), number("device"))
    struct.pack_into("<I", header, 8, number("class") << 8 | number("revision"))
    struct.pack_into("<HH", header, 0x2C, number("subsystem_vendor"), number("subsystem_device"))
    return bytes(header)


def pci_files(preset: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of the PCI tree; what the preset does not say is not there."""
    files: dict[str, bytes] = {}
    for device in pci_devices(preset):
        texts = {
            key: device.get(key)
            for key in ("vendor", "device", "class", "revision", "subsystem_vendor", "subsystem_device")
        }
        texts["numa_node"] = device.get("numa_node", -1)  # what Linux writes where firmware does not tell
        for kind in ("current", "max"):
            texts[f"{kind}_link_speed"] = device.get("link_speed")
            texts[f"{kind}_link_width"] = device.get("link_width")
        texts["irq"] = 0
        texts["resource"] = "\n".join(["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 13)
        for name, value in texts.items():
            if value is not None:
                files[f"{device['address']}/{name}"] = f"{value}\n".encode()
        files[f"{device['address']}/config"] = config_space(device)
    return files


def compiler_says(option: str) -> str:
    """Ask the compiler something about itself."""
    try:
        return subprocess.run([COMPILER, option], check=True, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        raise RefusalError(f"{COMPILER} is missing; install it (apt-get install gcc libc6-dev)") from None


def compile_library(cache: Path) -> Path:
    """Compile the stand-in, or take it from the cache if sources, flags and compiler are the same."""
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(
        "\0".join([*FLAGS, compiler_says("-dumpfullversion"), compiler_says("-dumpmachine")]).encode()
    )
    for source in sources:
        digest.update(source.read_bytes())
    library = cache / f"{digest.hexdigest()[:16]}-{LIBRARY}"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / LIBRARY
        command = [
            COMPILER,
            *FLAGS,
            "-o",
            str(made),
            *(str(source) for source in sources if source.suffix == ".c"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RefusalError(f"{COMPILER} could not compile the stand-in: {done.stderr.strip()}")
        made.replace(library)
    return library


class Installer:
    """Writes into a root only what differs, and remembers what it wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changed: list[str] = []

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write one file, unless it is there already with this content and mode."""
        target = self.root / path
        if (
            target.is_file()
            and not target.is_symlink()
            and target.read_bytes() == content
            and target.stat().st_mode & 0o777 == mode
        ):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.new")
        new.write_bytes(content)
        new.chmod(mode)
        new.replace(target)
        self.changed.append(path)

    def link(self, path: str, to: str) -> None:
        """Make one symbolic link."""
        target = self.root / path
        if target.is_symlink() and os.readlink(target) == to:  # noqa: PTH115 - Path.readlink, but for the text alone
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(to)
        self.changed.append(path)

    def tree(self, path: str, files: dict[str, bytes]) -> None:
        """Make a directory hold exactly these files."""
        target = self.root / path
        present = (
            {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}
            if target.is_dir()
            else {}
        )
        if present == files:
            return
        if target.exists():
            shutil.rmtree(target)
        for name, content in files.items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        self.changed.append(path)

    def remove(self, path: str) -> None:
        """Remove one file or link, if it is there."""
        target = self.root / path
        if target.exists() or target.is_symlink():
            target.unlink()
            self.changed.append(path)


def check_root(root: Path) -> None:
    """Refuse a root that is not a machine's or that is this running system."""
    if not (root / "etc").is_dir() or not (root / "usr").is_dir():
        raise RefusalError(f"{root} is not the root of a machine (no etc and usr in it)")
    if root.resolve() == Path("/"):
        raise RefusalError(
            "the stand-in hardware is never installed into a running system;"
            " give the root directory of a simulated machine"
        )


def install(root: Path, preset_name: str, machine: str | None, cache: Path, driver: bool) -> list[str]:
    """Install a preset into a root and return what was changed, as paths relative to the root."""
    preset = load_preset(preset_name)
    check_root(root)
    if machine is None:
        hostname = root / "etc/hostname"
        machine = (hostname.read_text(encoding="utf-8").strip() if hostname.is_file() else "") or preset_name
    library = compile_library(cache)

    installer = Installer(root)
    installer.tree(f"{HOME}/pci", pci_files(preset))
    installer.file(f"{HOME}/hardware-standin", SCRIPT_TEXT.encode(), 0o755)
    installer.file(f"etc/systemd/system/{UNIT}", UNIT_TEXT.encode())
    installer.link(f"etc/systemd/system/sysinit.target.wants/{UNIT}", f"../{UNIT}")
    if driver:
        installer.file(f"{HOME}/character-devices", CHARACTER_DEVICES.encode())
        installer.file(STATE, render_state(preset, machine).encode())
        installer.file(f"{HOME}/lib/{LIBRARY}", library.read_bytes())
        installer.link(f"{HOME}/lib/libnvidia-ml.so.1", LIBRARY)
        installer.file(LINKER, f"/{HOME}/lib\n".encode())
    else:
        for path in (
            LINKER,
            f"{HOME}/lib/libnvidia-ml.so.1",
            f"{HOME}/lib/{LIBRARY}",
            STATE,
            f"{HOME}/character-devices",
        ):
            installer.remove(path)
    return installer.changed


def main() -> int:
    """Run the command."""
    default_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuready" / "standin"
    parser = argparse.ArgumentParser(description="Put stand-in GPU hardware into the root of a simulated machine.")
    parser.add_argument("--root", type=Path, required=True, help="root directory of the machine, never /")
    parser.add_argument("--preset", required=True, help="name of a file in presets/, or the path of another such file")
    parser.add_argument(
        "--machine", help="name that UUIDs and serial numbers follow from (default: etc/hostname in the root)"
    )
    parser.add_argument(
        "--no-driver",
        dest="driver",
        action="store_false",
        help="PCI devices only, as on a server without a driver",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache,
        help="where the compiled library is kept (default: %(default)s)",
    )
    options = parser.parse_args()
    try:
        changed = install(options.root, options.preset, options.machine, options.cache, options.driver)
    except RefusalError as refusal:
        print(f"install.py: {refusal}.", file=sys.stderr)
        return 2
    for path in changed:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
