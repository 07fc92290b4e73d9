"""The filesystem of the store of models: what is there, how it is mounted, and how an empty disk gets one.

What is refused is decided in planning/storage.py, from the same facts in preflight and again before any change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuready.hardware import host
from gpuready.operations import packages
from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Failed, Failure, MachineCannot, Refusal, Result
from gpuready.planning import storage
from gpuready.planning.sources import STORE
from gpuready.planning.storage import Declared

UNIT_FILE = f"/etc/systemd/system/{storage.UNIT}"
BEGUN = "/var/lib/gpuready/formatting"
"""The UUID of the filesystem that is being made. Where it was left, mkfs was interrupted on a disk that was empty."""
ANSWER_SECONDS = 15
MOUNT_SECONDS = 60
_ENDS = 1 << 20
"""Bytes that are read at both ends of a disk."""
_COLUMNS = "NAME,PATH,TYPE,SIZE,RO,SERIAL,FSTYPE,LABEL,UUID,PTTYPE,MOUNTPOINTS"
_PROGRAMS = {"ext4": "e2fsprogs", "xfs": "xfsprogs", "nfs": "nfs-common", "nfs4": "nfs-common"}
_KILLED = (124, 137, -9)
"""What timeout(1) ends with when it had to end the program; by SIGKILL it ends itself, too."""

_MARK = "# Written by gpuready"
_UNIT = f"""\
{_MARK} for {{key}}. Where that is declared no more this stays; to take it away:
# systemctl disable --now {{unit}}, and remove this file.
[Unit]
Description=gpuready store of models

[Mount]
What={{what}}
Where={{store}}
{{type}}Options={{options}}
TimeoutSec={{seconds}}

[Install]
WantedBy=multi-user.target
"""


def declared(given: Mapping[str, Any] | None) -> Declared | None:
    """Return what a command's input `{mount, disk}` declares."""
    return storage.declared((given or {}).get("mount") or {}, (given or {}).get("disk") or {})


def demand_answer(machine: Machine) -> None:
    """Raise where a filesystem is mounted at STORE and does not answer; whoever touched it would wait for ever.

    One that autofs mounts when it is asked for is mounted by this question.
    """
    mounted = _mounted(machine, or_awaited=True)
    if mounted is None:
        return
    done = machine.run(["timeout", "--signal=KILL", str(ANSWER_SECONDS), "stat", "--file-system", STORE])
    if done.code:
        what = f"{STORE} ({mounted['source']}, {mounted['fstype']}) does not answer"
        why = f"no word within {ANSWER_SECONDS} s" if done.code in _KILLED else done.complaint
        raise MachineCannot(Failure("storage.dead", what, why, "see its server and the network, or unmount it"))


def facts(machine: Machine, wanted: Declared) -> dict[str, Any]:
    """Return what planning/storage.py decides on. Reads only."""
    mounted = _mounted(machine)
    place = machine.path(STORE)
    tree = [] if wanted.is_share else blocks(machine)
    found = storage.with_serial(tree, wanted.serial) if wanted.serial else []
    return {
        "mounted": mounted,
        "resolved": str(Path("/") / place.resolve().relative_to(machine.root.resolve())),
        "entries": sorted(one.name for one in place.iterdir()) if mounted is None and place.is_dir() else [],
        "arranged": _arranged(machine),
        "blocks": tree,
        "signatures": {one["path"]: _signatures(machine, one["path"]) for one in found},
        "blank": {one["path"]: _is_blank(machine.path(one["path"])) for one in found},
        "begun": (machine.read(BEGUN) or "").strip() == storage.uuid_of(wanted.serial),
    }


def _mounted(machine: Machine, *, or_awaited: bool = False) -> dict[str, str] | None:
    """Return what is mounted at STORE, or only awaited there by autofs; of several the last hides the others."""
    found = [one for one in host.mounts(machine.root) if one[0] == STORE and (or_awaited or one[2] != "autofs")]
    return {"source": found[-1][1], "fstype": found[-1][2]} if found else None


def blocks(machine: Machine) -> list[dict[str, Any]]:
    """Return the server's block devices as a tree, as lsblk tells them."""
    done = machine.run(["lsblk", "--json", "--bytes", "--output", _COLUMNS])
    try:
        return list(json.loads(done.out)["blockdevices"])
    except (ValueError, KeyError, TypeError):
        what = "lsblk does not tell the server's disks"
        raise MachineCannot(Failure("storage.lsblk", what, done.complaint, "see lsblk --json")) from None


def _signatures(machine: Machine, path: str) -> list[str] | None:
    """Return the kinds of all signatures on a device, None where it cannot be read."""
    done = machine.run(["wipefs", "--no-act", "--json", path])
    if done.code:
        return None
    try:
        return [str(one["type"]) for one in json.loads(done.out or '{"signatures": []}')["signatures"]]
    except (ValueError, KeyError, TypeError):
        return None


def _is_blank(path: Path) -> bool | None:
    """Return whether a disk has nothing but zeros at its start and end; None where it cannot be opened alone."""
    try:
        # Alone: the kernel refuses where the device is mounted, swapped to, or part of another one.
        handle = os.open(path, os.O_RDONLY | os.O_EXCL)
    except OSError:
        return None
    try:
        end = os.lseek(handle, 0, os.SEEK_END)
        return not any(any(os.pread(handle, _ENDS, at)) for at in {0, max(0, end - _ENDS)})
    except OSError:
        return None
    finally:
        os.close(handle)


def _arranged(machine: Machine) -> dict[str, Any] | None:
    """Return who has something mounted at STORE at every boot: a unit, else a line of fstab; None where nobody has."""
    for folder in ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system"):
        text = machine.read(f"{folder}/{storage.UNIT}")
        if text is not None:
            what = [line.partition("=")[2].strip() for line in text.splitlines() if line.startswith("What=")]
            ours = text.startswith(_MARK)
            return {"file": f"{folder}/{storage.UNIT}", "what": what[-1] if what else "", "ours": ours}
    for line in (machine.read("/etc/fstab") or "").splitlines():
        fields = line.split()
        if len(fields) > 2 and not fields[0].startswith("#") and fields[1].rstrip("/") == STORE:
            return {"file": "/etc/fstab", "what": fields[0], "ours": False}
    return None


# ------------------------------------------------------------------------------------------------ changes


def settle(machine: Machine, wanted: Declared | None, check: bool) -> Result:
    """Have what is declared mounted at STORE, now and at every boot; format its disk where that is empty.

    Nothing is ever unmounted. Where nothing is declared and a unit of ours is there, `data.notes` says so.

    Raises:
        Refusal: before anything is changed, with every reason.
        Failed: where the disk could not be formatted, or the mount did not come within MOUNT_SECONDS.
    """
    demand_answer(machine)
    if wanted is None:
        return _undeclared(machine)
    found = facts(machine, wanted)
    refused = storage.failures(wanted, found)
    if refused:
        raise Refusal(refused)
    result = Result()
    with result.kept_by_failures(check):
        package = _PROGRAMS.get(wanted.fstype)
        mounted = storage.is_mounted(wanted, found)
        if package and (wanted.is_share or not mounted):
            result.include(packages.ensure(machine, packages.Wanted([package]), check))
        disk = storage.to_format(wanted, found)
        if disk is not None:
            result.include(_format(machine, wanted, disk, found["begun"], check))
        result.include(_mount(machine, wanted, found, check))
    if result.changed:
        result.summary = f"{STORE} {'would be' if check else 'is'} mounted from {wanted.what}."
    result.data["pending"] = check and not mounted
    return result


def _undeclared(machine: Machine) -> Result:
    arranged = _arranged(machine)
    if arranged is None or not arranged["ours"]:
        return Result()
    note = f"{STORE} stays mounted from {arranged['what']}, declared no more; {arranged['file']} says how it ends"
    return Result(data={"notes": [note]})


def _format(machine: Machine, wanted: Declared, disk: Mapping[str, Any], again: bool, check: bool) -> Result:
    """Make the filesystem on a whole disk that was judged to be empty a moment ago."""
    path, uuid = str(disk["path"]), storage.uuid_of(wanted.serial)
    titled = f"{path} (serial {wanted.serial}, {storage.size(int(disk['size']))})"
    after = f"{wanted.fstype}, label {storage.LABEL}, UUID {uuid}\n"
    result = Result(changed=True, diff=[Change(titled, "half formatted\n" if again else "empty\n", after)])
    if check:
        return result
    machine.write(BEGUN, f"{uuid}\n", 0o600)
    commands = {
        # No reserve for root, and few inodes: models are few and large files.
        "ext4": ["mkfs.ext4", "-q", "-L", storage.LABEL, "-U", uuid, "-m", "0", "-T", "largefile"],
        # Without -f it refuses by itself what has a signature.
        "xfs": ["mkfs.xfs", "-q", "-L", storage.LABEL, "-m", f"uuid={uuid}", *(["-f"] if again else [])],
    }
    done = machine.run([*commands[wanted.fstype], path])
    if done.code:
        fix = "see dmesg; the next run formats it again, for nothing was on it"
        raise Failed(Failure("storage.format", f"{titled} could not be formatted", done.complaint, fix))
    made = storage.with_serial(blocks_of(machine, path), wanted.serial)
    if not made or not storage.is_ours(made[0], wanted.serial):
        what = f"{titled} was formatted, and does not show the UUID {uuid}"
        raise Failed(Failure("storage.format", what, "", "see dmesg and blkid -p; the next run formats it again"))
    os.sync()
    machine.remove(BEGUN)
    return result


def blocks_of(machine: Machine, path: str) -> list[dict[str, Any]]:
    """Return one device as `blocks` does, read after udev has looked at what was written."""
    machine.run(["udevadm", "settle", "--timeout=30"])
    return [one for one in blocks(machine) if one["path"] == path]


def unit_text(wanted: Declared) -> str:
    """Return the mount unit.

    `nofail` keeps the boot from waiting for it: engines order themselves after it and wait for their models.
    """
    options = ",".join(filter(None, ("nofail", wanted.options)))
    kind = f"Type={wanted.fstype}\n" if wanted.fstype else ""
    return _UNIT.format(
        key=wanted.key,
        unit=storage.UNIT,
        what=wanted.what,
        store=STORE,
        type=kind,
        options=options,
        seconds=MOUNT_SECONDS,
    )


def _mount(machine: Machine, wanted: Declared, found: Mapping[str, Any], check: bool) -> Result:
    """Write the unit where nobody else arranges the mount, and have it mounted."""
    result = Result()
    mounted = storage.is_mounted(wanted, found)
    ours = found["arranged"] is None or found["arranged"]["ours"]
    before, text = machine.read(UNIT_FILE) or "", unit_text(wanted)
    rewritten = ours and before != text
    if rewritten:
        result.diff.append(Change(UNIT_FILE, before, text))
    if not mounted:
        result.diff.append(Change(STORE, "no mount point\n", f"{wanted.what}\n"))
    result.changed = bool(result.diff)
    if check or not result.changed:
        return result
    if rewritten:
        machine.write(UNIT_FILE, text)
        _demand(machine, ["systemctl", "daemon-reload"], wanted)
    if ours:
        _demand(machine, ["systemctl", "--quiet", "enable", storage.UNIT], wanted)
    # What is mounted already takes on new options by the unit's reload, which remounts it.
    verb = "reload" if mounted and before and rewritten else "start"
    if not mounted or verb == "reload":
        machine.path(STORE).mkdir(mode=0o755, parents=True, exist_ok=True)
        _demand(machine, ["timeout", str(2 * MOUNT_SECONDS), "systemctl", verb, storage.UNIT], wanted)
    demand_answer(machine)
    if not storage.is_mounted(wanted, facts(machine, wanted)):
        what = f"{storage.UNIT} ended well, and {wanted.what} is not mounted at {STORE}"
        raise Failed(Failure("storage.not_mounted", what, "", f"see systemctl status {storage.UNIT}"))
    return result


def _demand(machine: Machine, words: list[str], wanted: Declared) -> None:
    done = machine.run(words)
    if done.code == 0:
        return
    journal = machine.run(["journalctl", "--unit", storage.UNIT, "--lines=3", "--output=cat", "--no-pager"])
    why = f"no end within {2 * MOUNT_SECONDS} s" if done.code in _KILLED else journal.complaint
    what = f"{wanted.key}: {wanted.what} could not be mounted at {STORE}"
    fix = f"see systemctl status {storage.UNIT}, and its server and the network where it is a share; then run again"
    raise Failed(Failure("storage.mount", what, why, fix))
