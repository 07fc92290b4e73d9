"""All the reasons why the simulation cannot work here, said at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sim.machine import network, pool, sources
from sim.machine.common import CANNOT, Sim, SimError, read_json, run

PCI = Path("/sys/bus/pci/devices")


def need_root() -> SimError:
    """Return the refusal for everybody but root."""
    return SimError("the simulation boots machines and needs root", "run it as root, e.g. with sudo", CANNOT)


def check(sim: Sim) -> list[SimError]:
    """Return every refusal, each with its remedy."""
    if os.geteuid() != 0:
        return [need_root()]
    problems = [
        real_hardware_problem(),
        isolation_problem(),
        resolver_problem(),
        pool.disk_problem(sim),
        *(kernel_problem(name) for name in ("btrfs", "loop", "bridge")),
    ]
    if not read_json(sim.state / "network.json"):
        problems += [network.range_problem(sim), network.forward_problem(sim)]
    return [problem for problem in problems if problem]


def refuse_if_unfit(sim: Sim) -> None:
    """Raise one refusal that carries all of them."""
    problems = check(sim)
    if problems:
        text = "\n".join(str(problem) for problem in problems).rstrip(".")
        raise SimError(text, "", CANNOT)


def real_hardware_problem(devices: Path = PCI) -> SimError | None:
    """Refuse a machine with a real NVIDIA GPU: a stand-in must never come near one."""
    for device in sorted(devices.glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return SimError(
                f"this machine has NVIDIA hardware (PCI {device.name})",
                "simulate on a machine without, and run site.yml with your own inventory for this one",
                CANNOT,
            )
    return None


def isolation_problem() -> SimError | None:
    """Refuse where the kernel, or a container around this machine, does not allow namespaces."""
    if shutil.which("unshare") is None:
        return None
    tried = run(["unshare", "--mount", "--pid", "--fork", "--net", "--uts", "--ipc", "true"], check=False)
    if tried.returncode == 0:
        return None
    return SimError(
        "this machine does not allow new namespaces, so systemd-nspawn cannot boot anything"
        f" ({tried.stderr.strip().rstrip('.')})",
        "use a virtual machine, or a container that is privileged",
        CANNOT,
    )


def resolver_problem() -> SimError | None:
    """Refuse where no name server is known that a simulated machine could ask."""
    if sources.name_servers() is not None:
        return None
    return SimError(
        "/etc/resolv.conf names no name server that another machine can reach", "add a `nameserver` line to it", CANNOT
    )


def kernel_problem(what: str) -> SimError | None:
    """Refuse a kernel without btrfs, loop devices or bridges."""
    if what == "bridge" and (shutil.which("unshare") is None or shutil.which("ip") is None):
        return None
    if _kernel_has(what) or (run(["modprobe", what], check=False).returncode == 0 and _kernel_has(what)):
        return None
    name = {"btrfs": "btrfs", "loop": "loop devices", "bridge": "network bridges"}[what]
    return SimError(f"the kernel here has no {name}", "use a machine with an ordinary Debian or Ubuntu kernel", CANNOT)


def _kernel_has(what: str) -> bool:
    if what == "btrfs":
        return "\tbtrfs\n" in Path("/proc/filesystems").read_text()
    if what == "loop":
        return Path("/dev/loop-control").exists()
    # In a network of its own, so that nothing here changes.
    return run(["unshare", "--net", "ip", "link", "add", "try0", "type", what], check=False).returncode == 0
