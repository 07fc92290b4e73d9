"""A cgroup of its own for every machine, where no systemd outside gives it one.

Without, all machines that nspawn boots share one payload cgroup: units of the same name in two machines are
then one cgroup, a stop in one waits for processes of the other, and a kill reaches them.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids")


def systemd_outside() -> bool:
    """Say whether systemd runs this machine; nspawn then asks it for a scope."""
    return Path("/run/systemd/system").is_dir()


def hierarchies(mounts: Path = MOUNTS) -> list[Path]:
    """Return the tops of the hierarchies in which nspawn places a machine: cgroup2, and v1's name=systemd."""
    tops = []
    for line in mounts.read_text().splitlines():
        _device, place, kind, options, *_rest = line.split()
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            tops.append(Path(place))
    return tops


def has_cgroup2(mounts: Path = MOUNTS) -> bool:
    """Say whether a machine can be given cgroup2, as every current server has."""
    return any(line.split()[2] == "cgroup2" for line in mounts.read_text().splitlines())


def _places(parent: str, name: str) -> list[Path]:
    return [top / parent / name for top in hierarchies()]


def make(parent: str, name: str) -> list[Path]:
    """Make the machine's cgroups anew and return them."""
    remove(parent, name)
    places = _places(parent, name)
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        for above in (place.parent.parent, place.parent):
            for controller in CONTROLLERS:
                # What the outside does not let go, the machine does without.
                with contextlib.suppress(OSError):
                    (above / "cgroup.subtree_control").write_text(f"+{controller}")
    return places


def remove(parent: str, name: str, seconds: float = 5.0) -> None:
    """End what is left in the machine's cgroups, and remove them."""
    for place in _places(parent, name):
        if not place.is_dir():
            continue
        with contextlib.suppress(OSError):
            (place / "cgroup.kill").write_text("1")
        end = time.monotonic() + seconds
        while place.is_dir():
            for folder in sorted((entry for entry in place.rglob("*") if entry.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                place.rmdir()
            if not place.is_dir() or time.monotonic() > end:
                break
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            place.parent.rmdir()
