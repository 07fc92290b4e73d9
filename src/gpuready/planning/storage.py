"""The filesystem of the store of models: what is declared, what the server has there, and what is refused.

Pure. A declared disk is formatted only where nothing at all is known to be on it. The filesystem that gpuready makes
has a UUID derived from the disk's serial, so that it is known again, and no other one is ever taken for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning.sources import STORE

UNIT = "srv-models.mount"
"""What systemd calls a mount at STORE."""
LABEL = "gpuready"
_NAMESPACE = uuid.UUID("5f2d6d5c-8b0e-4f43-9a55-0d1d7c1b1f0a")
SHARES = ("nfs", "nfs4")
DEVICES = ("ext4", "xfs")
_SYSTEM = ("/", "/boot", "/boot/efi", "/etc", "/opt", "/usr", "/var")
_USABLE = 0.98
"""Of a disk's bytes, at least so many are left for files by ext4 made for large files, and by xfs."""


@dataclass(frozen=True)
class Declared:
    """What is to be mounted at STORE: a share, a filesystem that is there, or a disk that gets one."""

    source: str
    """`host:/path`, `UUID=...` or `LABEL=...`."""
    fstype: str
    """Empty where the device's own is taken."""
    options: str = ""
    serial: str = ""
    """Of the disk that may be formatted; empty for what is only mounted."""

    @property
    def is_share(self) -> bool:
        """Return whether it comes from another machine."""
        return "=" not in self.source.partition("/")[0]

    @property
    def key(self) -> str:
        """Return the variable with its value, as a sentence names it."""
        return f"models_disk.serial = {self.serial}" if self.serial else f"models_mount.source = {self.source}"

    @property
    def what(self) -> str:
        """Return what mount(8) and systemd take."""
        kind, equals, value = self.source.partition("=")
        return self.source if self.is_share or not equals else f"/dev/disk/by-{kind.lower()}/{value}"


def uuid_of(serial: str) -> str:
    """Return the UUID of the filesystem that gpuready makes on the disk with this serial."""
    return str(uuid.uuid5(_NAMESPACE, serial))


def declared(mount: Mapping[str, Any], disk: Mapping[str, Any]) -> Declared | None:
    """Return what the role's knobs models_mount and models_disk declare; None where both are empty."""
    if disk:
        serial = str(disk["serial"])
        return Declared(f"UUID={uuid_of(serial)}", str(disk.get("fstype") or DEVICES[0]), "", serial)
    if mount:
        found = Declared(str(mount["source"]), str(mount.get("fstype") or ""), str(mount.get("options") or ""))
        return Declared(found.source, SHARES[0], found.options) if found.is_share and not found.fstype else found
    return None


# ------------------------------------------------------------------------------------------------ block devices


def flat(tree: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield all devices of what `lsblk --json` calls blockdevices, one that lies on several disks as often."""
    for one in tree:
        yield one
        yield from flat(one.get("children") or ())


def disks(tree: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the whole disks."""
    return [one for one in tree if one["type"] == "disk" and int(one["size"] or 0)]


def serial_of(disk: Mapping[str, Any]) -> str:
    """Return a disk's serial; empty where it has none. SCSI pads it with blanks."""
    return str(disk.get("serial") or "").strip()


def with_serial(tree: Iterable[Mapping[str, Any]], serial: str) -> list[Mapping[str, Any]]:
    """Return the disks that have a serial."""
    return [one for one in disks(tree) if serial_of(one) == serial]


def with_source(tree: Iterable[Mapping[str, Any]], source: str) -> list[Mapping[str, Any]]:
    """Return the devices whose filesystem has the UUID or LABEL of a source, each once.

    The members of an array have a UUID, too, but no filesystem of their own.
    """
    key, _, value = source.partition("=")
    found = {one["path"]: one for one in flat(tree) if one.get(key.lower()) == value}
    return [one for one in found.values() if not str(one.get("fstype") or "").endswith(("_member", "LUKS"))]


def mounted_at(device: Mapping[str, Any]) -> list[str]:
    """Return where a device is mounted; [SWAP] where it is swapped to."""
    return [str(one) for one in device.get("mountpoints") or () if one]


def size(count: int) -> str:
    """Return bytes as a sentence says them."""
    gib = count / 2**30
    return f"{gib / 1024:.1f} TiB" if gib >= 1024 else f"{gib:.1f} GiB"


def is_ours(disk: Mapping[str, Any], serial: str) -> bool:
    """Return whether the disk holds, as a whole, the filesystem that gpuready makes for its serial."""
    return bool(disk.get("uuid") == uuid_of(serial) and not disk.get("children"))


def to_format(wanted: Declared, facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the disk that is to be formatted, as lsblk tells it; None where there is none, or it is ours already."""
    found = with_serial(facts["blocks"], wanted.serial) if wanted.serial else []
    if len(found) != 1 or is_mounted(wanted, facts):
        return None
    return found[0] if facts["begun"] or not is_ours(found[0], wanted.serial) else None


def filesystem_of(wanted: Declared, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the filesystem that a disk will have, in the form of the facts; None where none is to be made."""
    disk = to_format(wanted, facts)
    if disk is None:
        return None
    return {
        "mount": f"{STORE} (the disk with serial {wanted.serial})",
        "total_bytes": int(disk["size"]),
        "free_bytes": int(int(disk["size"]) * _USABLE),
        "fix": "declare a greater disk, or smaller models",
    }


# ------------------------------------------------------------------------------------------------ refusals


def failures(wanted: Declared, facts: Mapping[str, Any]) -> list[Failure]:
    """Return everything that keeps the store from being mounted, or its disk from being formatted.

    `facts` is what operations/storage.py found: mounted, resolved, entries, arranged, blocks, signatures, blank, begun.
    """
    found = _place_failures(wanted.key, wanted, facts)
    if wanted.serial:
        found += _disk_failures(wanted.key, wanted, facts)
    elif not wanted.is_share:
        found += _device_failures(wanted.key, wanted, facts)
    return found


def host_failures(host: str, facts: Mapping[str, Any]) -> list[Failure]:
    """Return what the server said is wrong with the store that is declared."""
    said = facts.get("store") or {"failures": []}
    return [Failure(one["code"], f"host {host}, {one['what']}", one["why"], one["fix"]) for one in said["failures"]]


def without_unseen(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts without what is wrong with models in a store that could not be looked at: that says it all."""
    if not (facts.get("store") or {}).get("failures"):
        return dict(facts)
    models = {
        path: {"failures": []} if path.startswith(f"{STORE}/") and one.get("failures") else one
        for path, one in facts["models"].items()
    }
    return {**facts, "models": models}


def is_read_only(wanted: Declared, facts: Mapping[str, Any]) -> bool:
    """Return whether nothing can be written to a device: it is so itself, or is declared or mounted so."""
    found = [to_format(wanted, facts), *with_source(facts["blocks"], wanted.source)]
    return "ro" in wanted.options.split(",") or any(one["ro"] for one in found if one is not None)


def is_mounted(wanted: Declared, facts: Mapping[str, Any]) -> bool:
    """Return whether what is declared is what is mounted at STORE."""
    mounted = facts["mounted"]
    if mounted is None:
        return False
    if wanted.is_share:
        return mounted["fstype"] in SHARES and _same_share(mounted["source"], wanted.source)
    return any(STORE in mounted_at(one) for one in with_source(facts["blocks"], wanted.source))


def _same_share(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


def _place_failures(where: str, wanted: Declared, facts: Mapping[str, Any]) -> list[Failure]:
    """Check the mount point: what is mounted there, what a mount would hide, and who else arranges it."""
    if facts["resolved"] != STORE:
        what = f"{where}: {STORE} leads to {facts['resolved']} by a symbolic link, and systemd mounts on none"
        return [Failure("storage.link", what, "", f"make {STORE} a folder, or mount {facts['resolved']} yourself")]
    mounted, found = facts["mounted"], []
    if mounted is not None and not is_mounted(wanted, facts):
        what = f"{where}: {mounted['source']} ({mounted['fstype']}) is mounted at {STORE}"
        fix = "declare that, or unmount it where nothing needs it; gpuready unmounts nothing"
        found.append(Failure("storage.other_mount", what, "", fix))
    elif mounted is None and facts["entries"]:
        count = len(facts["entries"])
        shown = ", ".join(facts["entries"][:3]) + (" ..." if count > 3 else "")
        what = f"{where}: {STORE} holds {shown} ({count} in all), which the mount would hide"
        fix = "move it away, or into what is to be mounted; gpuready moves and erases nothing"
        found.append(Failure("storage.hidden", what, "", fix))
    arranged = facts["arranged"]
    same = (wanted.what.rstrip("/"), wanted.source)
    if arranged is not None and not arranged["ours"] and arranged["what"].rstrip("/") not in same:
        what = f"{where}: {arranged['file']} has {STORE} mounted from {arranged['what']}"
        found.append(Failure("storage.arranged", what, "", "declare that, or remove it there"))
    return found


def _device_failures(where: str, wanted: Declared, facts: Mapping[str, Any]) -> list[Failure]:
    found = with_source(facts["blocks"], wanted.source)
    if not found:
        key = wanted.source.partition("=")[0].lower()
        there = [f"{one[key]} ({one['path']})" for one in flat(facts["blocks"]) if one.get(key) and one.get("fstype")]
        why = f"there are {', '.join(dict.fromkeys(there))}" if there else "no device has one"
        return [Failure("storage.no_device", f"{where}: no filesystem has it", why, "correct it, or attach the device")]
    if len(found) > 1:
        paths = ", ".join(one["path"] for one in found)
        return [Failure("storage.several", f"{where}: {paths} have it", "", "name one by a UUID of its own")]
    fstype, elsewhere = found[0].get("fstype"), [one for one in mounted_at(found[0]) if one != STORE]
    if fstype not in DEVICES or wanted.fstype not in ("", fstype):
        expected = wanted.fstype or " or ".join(DEVICES)
        what = f"{where}: {found[0]['path']} holds {fstype}, and {expected} is expected"
        return [Failure("storage.fstype", what, "", "correct models_mount.fstype, or mount it yourself")]
    if elsewhere:
        what = f"{where}: {found[0]['path']} is mounted at {', '.join(elsewhere)}"
        return [Failure("storage.elsewhere", what, "", "unmount it there where nothing needs it")]
    return []


def _disk_failures(where: str, wanted: Declared, facts: Mapping[str, Any]) -> list[Failure]:
    """Return why a disk is not formatted: the first reason is enough, for the others follow from it."""
    tree = facts["blocks"]
    found = with_serial(tree, wanted.serial)
    if not found:
        there = [f"{serial_of(one) or 'none'} ({_titled(one)})" for one in disks(tree)]
        why = f"the serials are {', '.join(there)}" if there else "the server shows no disk"
        fix = "declare one of them, as lsblk -d -o NAME,SERIAL shows it"
        return [Failure("storage.no_serial", f"{where}: no disk has this serial", why, fix)]
    if len(found) > 1:
        return [_several(where, found)]
    disk = found[0]
    titled = f"{where}: {_titled(disk)}"
    if is_ours(disk, wanted.serial):
        return _our_failures(titled, wanted, disk)
    used = _use_of(disk)
    if used:
        return [
            Failure("storage.in_use", f"{titled} {used}", "", "declare another disk; gpuready formats empty ones alone")
        ]
    if disk["ro"]:
        return [Failure("storage.read_only", f"{titled} is read-only", "", "unlock it, or declare another disk")]
    # What an interrupted mkfs left has no signature yet, and the record says that the disk was empty before.
    blank = facts["begun"] or facts["blank"].get(disk["path"])
    content = _content_of(disk, facts["signatures"].get(disk["path"]), blank)
    if content:
        fix = (
            "declare an empty disk, or its filesystem in models_mount; where nobody needs what it holds, erase it "
            f"yourself (wipefs --all {disk['path']}, blkdiscard {disk['path']})"
        )
        return [Failure("storage.not_empty", f"{titled} {content}", "", fix)]
    return []


def _several(where: str, found: Sequence[Mapping[str, Any]]) -> Failure:
    paths = ", ".join(str(one["path"]) for one in found)
    joined = {str(child["path"]) for one in found for child in one.get("children") or () if child["type"] == "mpath"}
    why = f"they are paths to {', '.join(sorted(joined))}" if joined else ""
    fix = "gpuready formats a disk that is known by one name alone: format this one yourself and declare models_mount"
    return Failure("storage.several", f"{where}: {len(found)} disks have this serial, {paths}", why, fix)


def _our_failures(titled: str, wanted: Declared, disk: Mapping[str, Any]) -> list[Failure]:
    elsewhere = [one for one in mounted_at(disk) if one != STORE]
    if elsewhere:
        what = f"{titled} has gpuready's own filesystem, which is mounted at {', '.join(elsewhere)}"
        return [Failure("storage.elsewhere", what, "", "unmount it there")]
    if disk["fstype"] != wanted.fstype:
        what = f"{titled} was formatted by gpuready with {disk['fstype']}, and models_disk.fstype is {wanted.fstype}"
        return [Failure("storage.fstype", what, "", f"set models_disk.fstype: {disk['fstype']}")]
    return []


def _titled(disk: Mapping[str, Any]) -> str:
    return f"{disk['path']}, {size(int(disk['size']))}"


def _use_of(disk: Mapping[str, Any]) -> str:
    """Return how a disk is used, in words; empty where nothing uses it."""
    parts = list(flat(disk.get("children") or ()))
    places = [place for one in (disk, *parts) for place in mounted_at(one)]
    if any(place in _SYSTEM for place in places):
        return f"is the system disk ({', '.join(dict.fromkeys(places))})"
    if places:
        return f"is in use ({', '.join(dict.fromkeys(places))})"
    holders = [f"{one['type']} {one['path']}" for one in parts if one["type"] != "part"]
    return f"is in use by {', '.join(dict.fromkeys(holders))}" if holders else ""


def _content_of(disk: Mapping[str, Any], signatures: Sequence[str] | None, blank: bool | None) -> str:
    """Return what a disk holds, in words; empty where nothing is on it. What cannot be read is not empty."""
    parts = [str(one["path"]) for one in disk.get("children") or () if one["type"] == "part"]
    if parts:
        return f"has the partitions {', '.join(parts)}"
    kinds = [*(signatures or ()), *(str(disk[key]) for key in ("pttype", "fstype") if disk.get(key))]
    if kinds:
        return f"is not empty: it has the signature of {', '.join(dict.fromkeys(kinds))}"
    if signatures is None or blank is None:
        return "could not be read, or something holds it open"
    return "" if blank else "is not empty: there is data of an unknown kind at its start or end"
