"""The host around the GPUs: processor, memory, disks, ports, operating system; read from /proc, /sys and /etc.

No external command is run. Every function takes the root directory to read below, `/` on a real server.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready.outcome import Failure, MachineCannot

SIMULATION_MARKER = "etc/gpuready-simulated-machine"
"""Written by the builder of simulated machines, relative to the root; a real server never has it."""

_SECTOR_BYTES = 512  # the unit of /sys/block/*/size, whatever the disk's own sector size is
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True)
class Cpu:
    """The processors; `lscpu` shows the same."""

    model: str | None = None
    """E.g. `Intel(R) Xeon(R) Platinum 8480C`; None on architectures whose kernel does not tell."""
    sockets: int | None = None
    physical_cores: int | None = None
    """Cores of all sockets together."""
    logical_cores: int | None = None
    """Threads that the kernel schedules on: physical cores times SMT."""


@dataclass(frozen=True)
class Memory:
    """Main memory; `free -b` shows the same."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    """What a new process could get without swapping."""


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node; `numactl --hardware` shows the same."""

    number: int
    cpus: tuple[int, ...]
    """Logical cores of this node; empty for a node that has memory only."""
    total_bytes: int | None = None


@dataclass(frozen=True)
class NvmeDrive:
    """One NVMe namespace; `lsblk -b -d -o NAME,MODEL,SIZE` shows the same."""

    name: str
    """E.g. `nvme0n1`."""
    size_bytes: int | None = None
    model: str | None = None


@dataclass(frozen=True)
class Filesystem:
    """The filesystem that a path is on, or will be on; `df -B1 --output=target,source,fstype,size,avail PATH`."""

    path: str
    """The path that was asked for; it may not exist yet."""
    mount_point: str
    device: str
    """E.g. `/dev/nvme0n1p2`, or `tmpfs`."""
    type: str
    """E.g. `ext4`."""
    total_bytes: int | None = None
    free_bytes: int | None = None
    """What a service without root's reserve can still write."""


@dataclass(frozen=True)
class ListeningPort:
    """One listening TCP socket; `ss -ltnp` shows the same."""

    address: str
    """E.g. `127.0.0.1`, `0.0.0.0` or `::`."""
    port: int
    pid: int | None = None
    """Who listens; None when this process may not see it (not root) or it is in another container."""
    program: str | None = None
    """The program's name, e.g. `haproxy`, at most 15 characters long."""


@dataclass(frozen=True)
class System:
    """The operating system; `hostnamectl` and `systemd-detect-virt` show the same."""

    distribution: str | None = None
    """ID of os-release, e.g. `debian` or `ubuntu`."""
    distribution_version: str | None = None
    """VERSION_ID of os-release, e.g. `13` or `22.04`."""
    kernel: str | None = None
    """Release of the running kernel, e.g. `6.12.48+deb13-amd64`."""
    architecture: str | None = None
    """Of the running kernel, e.g. `x86_64` or `aarch64`."""
    python: str | None = None
    """Version of the Python that runs this, e.g. `3.13.5`."""
    container: str | None = None
    """`none` outside containers, else its kind, e.g. `systemd-nspawn` or `docker`."""
    hypervisor: bool | None = None
    """Whether the kernel runs in a virtual machine; None where the processor does not tell (not x86)."""


@dataclass(frozen=True)
class HostFacts:
    """Everything of this module at once, for `gpuready facts show`."""

    system: System
    cpu: Cpu
    memory: Memory
    numa_nodes: tuple[NumaNode, ...] | None
    nvme_drives: tuple[NvmeDrive, ...] | None
    filesystems: tuple[Filesystem, ...]
    shared_memory: Filesystem | None
    listening_ports: tuple[ListeningPort, ...] | None
    simulated_machine: dict[str, Any] | None


def facts(paths: Iterable[str] = (), root: str | Path = "/") -> HostFacts:
    """Return all facts of the host; `paths` are those whose filesystems are asked for.

    Takes some ten milliseconds. Raises MachineCannot when the marker of a simulated machine is there but damaged.
    """
    return HostFacts(
        system=system(root),
        cpu=cpu(root),
        memory=memory(root),
        numa_nodes=numa_nodes(root),
        nvme_drives=nvme_drives(root),
        filesystems=tuple(found for path in paths if (found := filesystem(path, root)) is not None),
        shared_memory=shared_memory(root),
        listening_ports=listening_ports(root),
        simulated_machine=simulated_machine(root),
    )


def cpu(root: str | Path = "/") -> Cpu:
    """Return the processors of the host; like `lscpu`."""
    text = _text(Path(root, "proc/cpuinfo"))
    if text is None:
        return Cpu()
    models = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    logical = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    cores: set[tuple[int, int]] = set()
    for topology in Path(root, "sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        package, core = _number(topology / "physical_package_id"), _number(topology / "core_id")
        if package is not None and core is not None:
            cores.add((package, core))
    return Cpu(
        model=models[0].strip() if models else None,
        sockets=len({package for package, _ in cores}) or None,
        physical_cores=len(cores) or None,
        logical_cores=logical or None,
    )


def memory(root: str | Path = "/") -> Memory:
    """Return the host's main memory; like `free -b`."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(Path(root, "proc/meminfo")) or "", re.MULTILINE))
    return Memory(total_bytes=_kib(found.get("MemTotal")), available_bytes=_kib(found.get("MemAvailable")))


def numa_nodes(root: str | Path = "/") -> tuple[NumaNode, ...] | None:
    """Return the NUMA nodes by number, or None where the kernel does not tell; like `numactl --hardware`."""
    nodes = []
    for entry in Path(root, "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _text(entry / "cpulist")
        if cpus is None:
            continue
        found = re.search(r"MemTotal:\s+(\d+) kB", _text(entry / "meminfo") or "")
        total = _kib(found.group(1)) if found else None
        nodes.append(NumaNode(number=int(entry.name[4:]), cpus=tuple(_cpu_list(cpus)), total_bytes=total))
    return tuple(sorted(nodes, key=lambda node: node.number)) or None


def nvme_drives(root: str | Path = "/") -> tuple[NvmeDrive, ...] | None:
    """Return the NVMe drives by name, or None where sysfs has no block devices; like `lsblk -b -d`."""
    block = Path(root, "sys/block")
    if not block.is_dir():
        return None
    drives = []
    for entry in block.iterdir():
        if re.fullmatch(r"nvme\d+n\d+", entry.name):  # not nvme0c0n1, one path of a multipath drive
            sectors = _number(entry / "size")
            size = None if sectors is None else sectors * _SECTOR_BYTES
            drives.append(NvmeDrive(name=entry.name, size_bytes=size, model=_text(entry / "device/model")))
    return tuple(sorted(drives, key=lambda drive: [int(part) for part in re.findall(r"\d+", drive.name)]))


def filesystem(path: str, root: str | Path = "/") -> Filesystem | None:
    """Return the filesystem that an absolute path is on, or would be on once it is made; like `df -B1`.

    Returns None when the kernel does not list its mounts. Raises ValueError for a relative path.
    """
    if not path.startswith("/"):
        raise ValueError(f"{path} is not an absolute path")
    wanted = Path(root, path.lstrip("/"))
    place = next(parent for parent in (wanted, *wanted.parents) if os.access(parent, os.F_OK))
    below = Path("/") / place.resolve().relative_to(Path(root).resolve())
    mount = None
    for candidate in mounts(root):
        mount_point = Path(candidate[0])
        # Of two mounts at one place the later one hides the earlier.
        if below.is_relative_to(mount_point) and (mount is None or mount_point.is_relative_to(mount[0])):
            mount = candidate
    if mount is None:
        return None
    try:
        room = os.statvfs(place)
    except OSError:
        return Filesystem(path, *mount)
    return Filesystem(path, *mount, total_bytes=room.f_blocks * room.f_frsize, free_bytes=room.f_bavail * room.f_frsize)


def shared_memory(root: str | Path = "/") -> Filesystem | None:
    """Return the filesystem at /dev/shm, or None when nothing is mounted there; like `df -B1 /dev/shm`."""
    found = filesystem("/dev/shm", root)  # noqa: S108 - the mount itself is asked for
    return found if found is not None and found.mount_point == "/dev/shm" else None  # noqa: S108


def listening_ports(root: str | Path = "/") -> tuple[ListeningPort, ...] | None:
    """Return the listening TCP ports by number and address, or None where /proc does not tell; like `ss -ltnp`.

    As root every program is named; other users see only their own.
    """
    proc = Path(root, "proc")
    tables = [table for name in ("tcp", "tcp6") if (table := _text(proc / "net" / name)) is not None]
    if not tables:
        return None
    listening = []
    for table in tables:
        for line in table.splitlines()[1:]:
            columns = line.split()
            if len(columns) > 9 and columns[3] == _LISTEN:
                address, port = columns[1].split(":")
                listening.append((_address(address), int(port, 16), columns[9]))
    holders = _socket_holders(proc, {inode for _, _, inode in listening})
    ports = {
        ListeningPort(address, port, pid, program(pid, root) if pid is not None else None)
        for address, port, inode in listening
        for pid in [holders.get(inode)]
    }
    return tuple(sorted(ports, key=lambda found: (found.port, found.address, found.pid or 0)))


def program(pid: int, root: str | Path = "/") -> str | None:
    """Return the name of a process' program, or None when it is gone; like `ps -o comm= -p PID`."""
    return _text(Path(root, "proc", str(pid), "comm"))


def unit(pid: int, root: str | Path = "/") -> str | None:
    """Return the systemd service that a process belongs to, or None; like `ps -o unit= -p PID`."""
    groups = _text(Path(root, "proc", str(pid), "cgroup")) or ""
    found = [part for line in groups.splitlines() for part in line.split("/") if part.endswith(".service")]
    return found[-1] if found else None


def system(root: str | Path = "/") -> System:
    """Return the operating system, its kernel, and what it runs in."""
    release = _os_release(Path(root))
    flags = re.search(r"^flags\s*:(.*)$", _text(Path(root, "proc/cpuinfo")) or "", re.MULTILINE)
    return System(
        distribution=release.get("ID"),
        distribution_version=release.get("VERSION_ID"),
        kernel=_text(Path(root, "proc/sys/kernel/osrelease")),
        architecture=platform.machine() or None,
        python=".".join(map(str, sys.version_info[:3])),
        container=_container(Path(root)),
        hypervisor="hypervisor" in flags.group(1).split() if flags else None,
    )


def simulated_machine(root: str | Path = "/") -> dict[str, Any] | None:
    """Return what the builder of simulated machines wrote about this one, or None on a real server.

    Raises MachineCannot when the marker is there but is no JSON object.
    """
    marker = Path(root, SIMULATION_MARKER)
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _damaged(str(error)) from error
    if not isinstance(content, dict):
        raise _damaged("not a JSON object")
    return content


def _damaged(why: str) -> MachineCannot:
    what = f"the marker of a simulated machine, /{SIMULATION_MARKER}, is damaged"
    return MachineCannot(Failure("simulation-marker", what, why, "build the machine again"))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _kib(text: str | None) -> int | None:
    return None if text is None else int(text) * 1024


def _cpu_list(text: str) -> Iterator[int]:
    """Read the kernel's lists of processors, e.g. `0-55,112-167`."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def mounts(root: str | Path = "/") -> Iterator[tuple[str, str, str]]:
    """Yield mount point, device and type of each mount, in the order of mounting; see proc_pid_mountinfo(5)."""
    for line in (_text(Path(root, "proc/self/mountinfo")) or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, device = after.split()[:2]
        yield _unescape(before.split()[4]), _unescape(device), kind


def _unescape(text: str) -> str:
    """Read what the kernel writes for blanks and backslashes: three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def _address(text: str) -> str:
    """Read an address of /proc/net/tcp: words of four bytes, each in the byte order of the machine."""
    words = [bytes.fromhex(text[i : i + 8]) for i in range(0, len(text), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return str(ipaddress.ip_address(packed))


def _socket_holders(proc: Path, inodes: set[str]) -> dict[str, int]:
    """Find which process holds which socket; of several (a parent and its workers) the first started."""
    holders: dict[str, int] = {}
    for pid in sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()):
        try:
            for descriptor in (proc / str(pid) / "fd").iterdir():
                link = str(descriptor.readlink())
                if link.startswith("socket:[") and link[8:-1] in inodes:
                    holders.setdefault(link[8:-1], pid)
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return holders


def _os_release(root: Path) -> dict[str, str]:
    """Read os-release; its ID and VERSION_ID hold nothing that would need the shell's escapes."""
    text = _text(root / "etc/os-release") or _text(root / "usr/lib/os-release") or ""
    values = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not key.startswith("#"):
            values[key.strip()] = value.strip().strip("\"'")
    return values


def _container(root: Path) -> str | None:
    """Return the kind of container, as systemd-detect-virt --container does."""
    kind = _text(root / "run/systemd/container")
    if kind:
        return kind
    environment = _text(root / "proc/1/environ")
    for variable in (environment or "").split("\0"):
        name, _, value = variable.partition("=")
        if name == "container" and value:
            return value
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "none" if environment is not None else None  # only root may read the environment of process 1
