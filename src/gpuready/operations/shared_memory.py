"""Shared memory, /dev/shm: its size now, and at boot."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Failed, Failure, Refusal, Result

FSTAB = "/etc/fstab"
SHM = "/dev/shm"  # noqa: S108 - the mount itself, not a file in it


def set_shm(machine: Machine, percent: int, check: bool) -> Result:
    """Give /dev/shm at least this share of the RAM, now and at boot; what is larger stays as it is.

    NCCL and engines that run several processes pass tensors through it. Where the kernel's own size is enough
    and /etc/fstab does not speak of it, nothing is written.
    """
    if not 1 <= percent <= 95:
        raise Refusal(
            Failure("shm.percent", f"base_shm_percent is {percent}", "", "set 1 to 95, or null to leave /dev/shm alone")
        )
    ram = _ram_bytes(machine)
    size = _size_bytes(machine)
    if size is None:
        return Result(summary=f"not applied here: {SHM} (it is not a mount of its own)", data={"applied": False})
    wanted = ram * percent // 100
    resize = not _enough(size, wanted)
    fstab = machine.read(FSTAB) or ""
    listed = any(_is_shm(line) for line in fstab.splitlines())
    wanted_fstab = fstab_with_shm(fstab, percent, ram) if listed or resize else fstab
    result = Result(data={"bytes": size, "applied": True})
    if wanted_fstab != fstab:
        result.diff.append(Change(FSTAB, fstab, wanted_fstab))
    if resize:
        result.diff.append(Change(SHM, f"{_gib(size)} GiB\n", f"{_gib(wanted)} GiB ({percent} % of the RAM)\n"))
    result.changed = bool(result.diff)
    if check and result.changed:
        result.summary = f"{SHM} would have at least {percent} % of the RAM, now and at boot"
        return result
    if wanted_fstab != fstab:
        machine.write(FSTAB, wanted_fstab)
    if resize:
        result.data["bytes"] = _remount(machine, percent, wanted)
    result.summary = f"{SHM} has at least {percent} % of the RAM"
    return result


def _remount(machine: Machine, percent: int, wanted: int) -> int:
    done = machine.run(["mount", "-o", f"remount,size={percent}%", SHM])
    size = _size_bytes(machine) or 0
    if done.code or not _enough(size, wanted):
        why = done.complaint if done.code else f"it has {_gib(size)} GiB after the remount"
        what = f"{SHM} could not be given {percent} % of the RAM ({_gib(wanted)} GiB)"
        raise Failed(Failure("shm.remount", what, why, f"{FSTAB} asks for it at the next boot"))
    return size


def _enough(size: int, wanted: int) -> bool:
    # The kernel counts in pages, and a share in whole percent.
    return size >= wanted * 0.99


def fstab_with_shm(fstab: str, percent: int, ram: int) -> str:
    """Return /etc/fstab with a line that gives /dev/shm at least this share of the RAM; its other options stay."""
    lines, found = [], False
    for line in fstab.splitlines():
        if not _is_shm(line):
            lines.append(line)
            continue
        found = True
        fields = line.split()
        options = fields[3].split(",")
        if not _enough(_size_of(options, ram), ram * percent // 100):
            kept = [option for option in options if not option.startswith(_SIZES) and option != "defaults"]
            fields[3] = ",".join([*kept, f"size={percent}%"])
            line = "\t".join(fields)
        lines.append(line)
    if not found:
        lines.append(f"tmpfs\t{SHM}\ttmpfs\tnosuid,nodev,size={percent}%\t0\t0")
    return fstab if lines == fstab.splitlines() else "\n".join(lines) + "\n"


_SIZES = ("size=", "nr_blocks=")
_SIZE = re.compile(r"(size|nr_blocks)=(\d+)([kmgtpe%]?)", re.IGNORECASE)
_NO_LIMIT = sys.maxsize
"""tmpfs takes 0 for no limit, and shows 0 then."""


def _size_of(options: Sequence[str], ram: int) -> int:
    """Return the bytes of a tmpfs that is mounted with these options; 0 where they name a size that mount refuses."""
    size = ram // 2
    for option in options:
        found = _SIZE.fullmatch(option)
        if not found:
            size = 0 if option.startswith(_SIZES) else size
            continue
        name, number, unit = found[1], int(found[2]), found[3].lower()
        if unit == "%":
            size = ram * number // 100 if name == "size" else 0
        else:
            bytes_each = 1024 ** " kmgtpe".index(unit or " ") * (1 if name == "size" else os.sysconf("SC_PAGE_SIZE"))
            size = number * bytes_each or _NO_LIMIT
    return size


def _is_shm(line: str) -> bool:
    fields = line.split()
    return len(fields) >= 4 and not line.lstrip().startswith("#") and fields[1] == SHM


def _ram_bytes(machine: Machine) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.MULTILINE)
    if not found:
        raise Failed(Failure("shm.ram", "/proc/meminfo does not say how much RAM there is", "", "nothing was changed"))
    return int(found.group(1)) * 1024


def _size_bytes(machine: Machine) -> int | None:
    """Return the size of /dev/shm as `df` sees it; None where it is no mount of its own."""
    done = machine.run(["findmnt", "--bytes", "--noheadings", "--output", "SIZE", "--mountpoint", SHM])
    return int(done.out.strip()) or _NO_LIMIT if done.code == 0 and done.out.strip().isdigit() else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
