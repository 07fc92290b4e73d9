"""The store's filesystem: what is declared, and every refusal, on what lsblk really said of many kinds of disks.

data/disks was recorded in virtual machines on Debian 13 (util-linux 2.41); `played` builds what could not be had there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuready.planning import preflight, storage
from gpuready.planning.storage import Declared, declared, failures, uuid_of

RECORDED = Path(__file__).parent / "data" / "disks"
GIB = 2**30


def recorded(name: str) -> list[dict[str, Any]]:
    return list(json.loads((RECORDED / f"{name}.json").read_text())["blockdevices"])


def node(path: str = "/dev/sdb", **values: Any) -> dict[str, Any]:
    usual = {"name": path.rpartition("/")[2], "path": path, "type": "disk", "size": 4 * GIB, "ro": False}
    empty = {"serial": None, "fstype": None, "label": None, "uuid": None, "pttype": None, "mountpoints": [None]}
    return {**usual, **empty, **values}


def facts(blocks: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """Return the facts of a server on which nothing is mounted; every disk is blank, where nothing else is said."""
    paths = [one["path"] for one in blocks]
    usual: dict[str, Any] = {
        "mounted": None,
        "resolved": "/srv/models",
        "entries": [],
        "arranged": None,
        "begun": False,
    }
    return {
        **usual,
        "blocks": blocks,
        "signatures": dict.fromkeys(paths, []),
        "blank": dict.fromkeys(paths, True),
        **values,
    }


def disk(serial: str, fstype: str = "ext4") -> Declared:
    found = declared({}, {"serial": serial, "fstype": fstype})
    assert found is not None
    return found


def share(source: str = "nas:/models", **values: Any) -> Declared:
    found = declared({"source": source, **values}, {})
    assert found is not None
    return found


def said(wanted: Declared, found: dict[str, Any]) -> str:
    (only,) = failures(wanted, found)
    return only.sentence()


# ------------------------------------------------------------------------------------------------ declared


def test_what_the_knobs_declare() -> None:
    assert declared({}, {}) is None
    assert (share().fstype, share().what, share().is_share) == ("nfs", "nas:/models", True)
    assert share("[fd00::1]:/m=1/x").is_share
    label = share("LABEL=models", options="ro")
    assert (label.fstype, label.what, label.is_share) == ("", "/dev/disk/by-label/models", False)
    own = disk("S1", "xfs")
    assert (own.fstype, own.what) == ("xfs", f"/dev/disk/by-uuid/{uuid_of('S1')}")
    assert (disk("S1").key, share().key) == ("models_disk.serial = S1", "models_mount.source = nas:/models")


def test_the_uuid_of_a_serial_never_changes() -> None:
    # Else a disk that was formatted by a former version would be refused as somebody else's.
    assert uuid_of("VIRT-0001") == "40953c4d-8fcc-5f25-8e38-836079bac0dc"
    assert uuid_of("VIRT-0001") != uuid_of("VIRT-0002")


# ------------------------------------------------------------------------------------------------ which disk


@pytest.mark.parametrize("serial", ["SCSI0003", "VIRT-0001", "NVME0002"])
def test_an_empty_disk_is_found_by_its_serial_whatever_its_bus(serial: str) -> None:
    found = facts(recorded("empty"))
    assert failures(disk(serial), found) == []
    chosen = storage.to_format(disk(serial), found)
    assert chosen is not None
    assert chosen["serial"] == serial


def test_a_serial_that_no_disk_has_is_told_with_those_that_there_are() -> None:
    assert said(disk("S5XX"), facts(recorded("empty"))) == (
        "models_disk.serial = S5XX: no disk has this serial: the serials are SCSI0003 (/dev/sda, 2.0 GiB), "
        "VIRT-0001 (/dev/vda, 2.0 GiB), none (/dev/vdb, 2.0 GiB), none (/dev/vdc, 3.0 GiB), "
        "NVME0002 (/dev/nvme0n1, 2.0 GiB); declare one of them, as lsblk -d -o NAME,SERIAL shows it."
    )
    assert "the server shows no disk" in said(disk("S5XX"), facts([]))


def test_a_server_without_udev_shows_fewer_serials_and_none_is_guessed() -> None:
    serials = {one["name"]: one["serial"] for one in recorded("udevless")}
    assert (serials["nvme0n1"].strip(), serials["sda"], serials["vda"]) == ("NVME0002", None, None)
    for serial in ("", "None"):
        assert "no disk has this serial" in said(disk(serial or " "), facts(recorded("udevless")))


def test_a_padded_serial_is_the_same_one() -> None:
    assert failures(disk("WD-1"), facts([node(serial="  WD-1  ")])) == []


def test_a_partition_a_cdrom_and_a_disk_of_no_size_are_no_disks() -> None:
    blocks = [
        node("/dev/sr0", type="rom", serial="S1"),
        node("/dev/loop0", type="loop", serial="S1"),
        node("/dev/sdc", size=0, serial="S1"),
    ]
    assert "no disk has this serial: the server shows no disk" in said(disk("S1"), facts(blocks))


def test_namespaces_of_one_nvme_drive_have_one_serial_and_are_refused() -> None:
    assert said(disk("NVME-2NS"), facts(recorded("multipath"))) == (
        "models_disk.serial = NVME-2NS: 2 disks have this serial, /dev/nvme0n1, /dev/nvme0n2; gpuready formats a disk "
        "that is known by one name alone: format this one yourself and declare models_mount."
    )


def test_paths_of_one_multipath_disk_are_refused_with_its_name() -> None:
    sentence = said(disk("MPATH001"), facts(recorded("multipath")))
    assert (
        "2 disks have this serial, /dev/sda, /dev/sdb: they are paths to /dev/mapper/0QEMU_QEMU_HARDDISK_MPATH001; "
        in sentence
    )


# ------------------------------------------------------------------------------------------------ which content


def test_partitions_and_swap_in_use_are_named() -> None:
    found = facts(recorded("partitions_lvm_luks"))
    assert "/dev/sda, 2.0 GiB is in use (/mnt/a, [SWAP])" in said(disk("SCSI0003"), found)


def test_a_locked_luks_volume_is_content_and_an_open_one_a_holder() -> None:
    blocks = recorded("partitions_lvm_luks")
    assert "/dev/nvme0n1, 2.0 GiB is not empty: it has the signature of crypto_LUKS" in said(
        disk("NVME0002"), facts(blocks)
    )
    opened = node(serial="S1", fstype="crypto_LUKS", children=[node("/dev/mapper/c1", type="crypt")])
    assert "/dev/sdb, 4.0 GiB is in use by crypt /dev/mapper/c1" in said(disk("S1"), facts([opened]))


def test_a_physical_volume_is_held_by_its_logical_ones() -> None:
    blocks = recorded("partitions_lvm_luks")
    next(one for one in blocks if one["name"] == "vdb")["serial"] = "PV"
    assert "/dev/vdb, 2.0 GiB is in use by lvm /dev/mapper/vg0-models" in said(disk("PV"), facts(blocks))


def test_a_raid_member_is_held_by_its_array() -> None:
    assert "/dev/nvme0n1, 2.0 GiB is in use by raid1 /dev/md0" in said(disk("NVME0002"), facts(recorded("raid")))


@pytest.mark.parametrize("place", ["/", "/boot/efi", "/usr"])
def test_the_system_disk_is_called_so(place: str) -> None:
    part = node("/dev/sda1", type="part", mountpoints=[place])
    blocks = [node("/dev/sda", serial="S1", pttype="gpt", children=[part])]
    assert f"/dev/sda, 4.0 GiB is the system disk ({place})" in said(disk("S1"), facts(blocks))


def test_a_root_on_lvm_makes_a_system_disk_too() -> None:
    root = node("/dev/mapper/vg-root", type="lvm", mountpoints=["/"])
    part = node("/dev/sda2", type="part", children=[root])
    assert "is the system disk (/)" in said(disk("S1"), facts([node(serial="S1", children=[part])]))


@pytest.mark.parametrize(
    ("signatures", "words"),
    [
        (["ext4"], "has the signature of ext4"),
        (["gpt", "gpt", "PMBR"], "has the signature of gpt, PMBR"),
        (["zfs_member"], "has the signature of zfs_member"),
        (["linux_raid_member"], "has the signature of linux_raid_member"),
        (["LVM2_member"], "has the signature of LVM2_member"),
        (["crypto_LUKS"], "has the signature of crypto_LUKS"),
        (["ceph_bluestore"], "has the signature of ceph_bluestore"),
        (["swap"], "has the signature of swap"),
        (None, "could not be read, or something holds it open"),
    ],
)
def test_every_signature_keeps_a_disk_from_being_formatted(signatures: list[str] | None, words: str) -> None:
    found = facts([node(serial="S1")], signatures={"/dev/sdb": signatures})
    sentence = said(disk("S1"), found)
    assert f"models_disk.serial = S1: /dev/sdb, 4.0 GiB {'is not empty: it ' if signatures else ''}{words}" in sentence
    assert "declare an empty disk" in sentence
    assert storage.to_format(disk("S1"), found) is not None


def test_partitions_without_a_signature_are_partitions_still() -> None:
    blocks = [node(serial="S1", children=[node("/dev/sdb1", type="part"), node("/dev/sdb2", type="part")])]
    assert "has the partitions /dev/sdb1, /dev/sdb2" in said(disk("S1"), facts(blocks))


def test_what_lsblk_alone_knows_counts() -> None:
    assert "signature of dos" in said(disk("S1"), facts([node(serial="S1", pttype="dos")]))


def test_data_of_an_unknown_kind_is_not_empty_and_what_cannot_be_read_neither() -> None:
    used = facts([node(serial="S1")], blank={"/dev/sdb": False})
    assert "is not empty: there is data of an unknown kind at its start or end" in said(disk("S1"), used)
    held = facts([node(serial="S1")], blank={"/dev/sdb": None})
    assert "could not be read, or something holds it open" in said(disk("S1"), held)


def test_signatures_wiped_by_an_operator_leave_data_that_is_told() -> None:
    # wipefs takes away the magic bytes alone; /dev/nvme0n1 had a LUKS header.
    blocks = recorded("wiped")
    assert all(not one["fstype"] for one in blocks if one["name"] in ("sda", "vdb", "nvme0n1"))
    assert "blkdiscard /dev/nvme0n1" in said(disk("NVME0002"), facts(blocks, blank={"/dev/nvme0n1": False}))


def test_a_read_only_disk_is_refused() -> None:
    assert said(disk("S1"), facts([node(serial="S1", ro=True)])) == (
        "models_disk.serial = S1: /dev/sdb, 4.0 GiB is read-only; unlock it, or declare another disk."
    )


# ------------------------------------------------------------------------------------------------ ours


def ours(**values: Any) -> dict[str, Any]:
    return node(serial="S1", fstype="ext4", label="gpuready", uuid=uuid_of("S1"), **values)


def test_our_own_filesystem_is_never_formatted_again() -> None:
    for mountpoints in ([None], ["/srv/models"]):
        found = facts([ours(mountpoints=mountpoints)], signatures={"/dev/sdb": ["ext4"]}, blank={"/dev/sdb": False})
        assert failures(disk("S1"), found) == []
        assert storage.to_format(disk("S1"), found) is None


def test_a_copy_of_our_filesystem_on_another_disk_is_not_ours() -> None:
    copy = node(serial="S2", fstype="ext4", label="gpuready", uuid=uuid_of("S1"))
    assert "is not empty: it has the signature of ext4" in said(disk("S2"), facts([copy]))


def test_our_filesystem_mounted_elsewhere_or_of_another_kind_is_refused() -> None:
    assert "gpuready's own filesystem, which is mounted at /mnt" in said(
        disk("S1"), facts([ours(mountpoints=["/mnt"])])
    )
    assert said(disk("S1", "xfs"), facts([ours()])).endswith(
        "was formatted by gpuready with ext4, and models_disk.fstype is xfs; set models_disk.fstype: ext4."
    )


def test_an_interrupted_mkfs_is_gone_on_with_and_nothing_else() -> None:
    half = facts([node(serial="S1")], blank={"/dev/sdb": False}, begun=True)
    assert failures(disk("S1"), half) == []
    assert storage.to_format(disk("S1"), facts([ours()], begun=True)) is not None
    assert storage.to_format(disk("S1"), facts([ours(mountpoints=["/srv/models"])], mounted={}, begun=True)) is None
    foreign = facts([node(serial="S1", fstype="xfs")], signatures={"/dev/sdb": ["xfs"]}, begun=True)
    assert "is not empty: it has the signature of xfs" in said(disk("S1"), foreign)


# ------------------------------------------------------------------------------------------------ the mount point


def test_files_that_a_mount_would_hide_are_named() -> None:
    found = facts([], entries=["a@1", "b@2", "c@3", "d@4"])
    assert said(share(), found) == (
        "models_mount.source = nas:/models: /srv/models holds a@1, b@2, c@3 ... (4 in all), which the mount would "
        "hide; move it away, or into what is to be mounted; gpuready moves and erases nothing."
    )


def test_another_mount_is_refused_and_the_declared_one_adopted() -> None:
    mounted = {"source": "old:/models", "fstype": "nfs4"}
    assert "models_mount.source = nas:/models: old:/models (nfs4) is mounted at /srv/models; declare that" in said(
        share(), facts([], mounted=mounted)
    )
    assert failures(share("old:/models/"), facts([], mounted=mounted)) == []
    assert "old:/models (fuse) is mounted" in said(
        share("old:/models"), facts([], mounted={**mounted, "fstype": "fuse"})
    )


def test_a_device_is_adopted_where_it_is_the_one_that_is_mounted() -> None:
    blocks = [node(fstype="xfs", label="models", mountpoints=["/srv/models"])]
    mounted = {"source": "/dev/sdb", "fstype": "xfs"}
    assert failures(share("LABEL=models"), facts(blocks, mounted=mounted)) == []
    assert storage.is_mounted(share("LABEL=models"), facts(blocks, mounted=mounted))


def test_an_fstab_or_a_unit_that_says_something_else_is_refused() -> None:
    other = {"file": "/etc/fstab", "what": "old:/models", "ours": False}
    assert "/etc/fstab has /srv/models mounted from old:/models; declare that, or remove it there" in said(
        share(), facts([], arranged=other)
    )
    assert failures(share(), facts([], arranged={**other, "ours": True})) == []
    assert (
        failures(share("UUID=1-2"), facts([node(fstype="xfs", uuid="1-2")], arranged={**other, "what": "UUID=1-2"}))
        == []
    )


def test_a_symbolic_link_is_no_mount_point() -> None:
    assert "/srv/models leads to /data/models by a symbolic link" in said(share(), facts([], resolved="/data/models"))


# ------------------------------------------------------------------------------------------------ devices


def test_a_filesystem_is_found_on_any_device_and_members_are_none() -> None:
    blocks = recorded("partitions_lvm_luks")
    (found,) = storage.with_source(blocks, "LABEL=data")
    assert found["path"] == "/dev/sda1"
    for name in ("vdb", "nvme0n1"):
        member = next(one for one in blocks if one["name"] == name)
        assert storage.with_source(blocks, f"UUID={member['uuid']}") == []
    on_lvm = node(fstype="LVM2_member", children=[node("/dev/mapper/vg-m", type="lvm", fstype="xfs", label="m")])
    assert failures(share("LABEL=m"), facts([on_lvm])) == []


def test_a_device_that_is_not_there_is_told_with_those_that_are() -> None:
    assert said(share("LABEL=weights"), facts(recorded("partitions_lvm_luks"))) == (
        "models_mount.source = LABEL=weights: no filesystem has it: there are data (/dev/sda1), gpuready (/dev/vda), "
        "vmroot (/dev/vdc); correct it, or attach the device."
    )
    assert "no filesystem has it: no device has one" in said(share("LABEL=weights"), facts([]))


def test_two_filesystems_of_one_label_are_refused() -> None:
    blocks = [node("/dev/sdb", fstype="xfs", label="m"), node("/dev/sdc", fstype="xfs", label="m")]
    assert "/dev/sdb, /dev/sdc have it; name one by a UUID of its own" in said(share("LABEL=m"), facts(blocks))


def test_a_device_on_two_members_of_an_array_is_one_device() -> None:
    array = node("/dev/md0", type="raid1", fstype="xfs", label="m")
    blocks = [node(path, fstype="linux_raid_member", children=[array]) for path in ("/dev/sdb", "/dev/sdc")]
    assert failures(share("LABEL=m"), facts(blocks)) == []


@pytest.mark.parametrize(
    ("declared_type", "words"),
    [("xfs", "/dev/sdb holds ext4, and xfs is expected"), ("", "/dev/sdb holds vfat, and ext4 or xfs is expected")],
)
def test_a_filesystem_of_another_type_is_refused(declared_type: str, words: str) -> None:
    blocks = [node(fstype="ext4" if declared_type else "vfat", label="m")]
    assert words in said(share("LABEL=m", fstype=declared_type), facts(blocks))


def test_a_device_that_is_mounted_elsewhere_is_refused() -> None:
    blocks = [node(fstype="ext4", label="m", mountpoints=["/home"])]
    assert "/dev/sdb is mounted at /home; unmount it there" in said(share("LABEL=m"), facts(blocks))


# ------------------------------------------------------------------------------------------------ preflight


def test_a_disk_that_is_too_small_for_the_models_is_refused_with_its_serial() -> None:
    found = storage.filesystem_of(disk("S1"), facts([node(serial="S1")]))
    assert found is not None
    (only,) = preflight.disk_failures("h1", {"/srv/models": 5.0}, {"filesystems": {"/srv/models": found}})
    assert only.sentence() == (
        "host h1: /srv/models (the disk with serial S1) has 3.9 GiB free, and 7.0 GiB are needed for /srv/models; "
        "declare a greater disk, or smaller models."
    )
    assert preflight.disk_failures("h1", {"/srv/models": 1.0}, {"filesystems": {"/srv/models": found}}) == []
    # It is there to be written to, also where nothing is to be downloaded yet.
    tiny = {"filesystems": {"/srv/models": {**found, "free_bytes": GIB}}}
    assert len(preflight.disk_failures("h1", {"/srv/models": 0.0}, tiny)) == 1
    assert storage.filesystem_of(disk("S1"), facts([ours()])) is None


def test_a_full_share_that_is_only_read_needs_no_room() -> None:
    full = {"filesystems": {"/srv/models": {"mount": "/srv/models", "free_bytes": 0}}}
    assert preflight.disk_failures("h1", {"/srv/models": 0.0}, full) == []
    (only,) = preflight.disk_failures("h1", {"/srv/models": 1.0}, full)
    assert "/srv/models has 0.0 GiB free, and 3.0 GiB are needed" in only.sentence()


def test_a_store_that_could_not_be_looked_at_is_said_once() -> None:
    said_by_server = {
        "code": "storage.unseen",
        "what": "models_mount.source = nas:/m cannot be mounted",
        "why": "x",
        "fix": "y",
    }
    missing = {"failures": [{"code": "model.no_folder"}]}
    server = {"store": {"failures": [said_by_server]}, "models": {"/srv/models/a": missing, "/data/b": missing}}
    (only,) = storage.host_failures("h1", server)
    assert only.sentence() == "host h1, models_mount.source = nas:/m cannot be mounted: x; y."
    assert storage.without_unseen(server)["models"] == {"/srv/models/a": {"failures": []}, "/data/b": missing}
    assert storage.without_unseen({"store": None, "models": {"/srv/models/a": missing}})["models"] == {
        "/srv/models/a": missing
    }
