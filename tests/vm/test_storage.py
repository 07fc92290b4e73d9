"""The store's filesystem on a whole machine: real disks with serials, a real NFS server, systemd, udev and a boot.

The tests build on each other in their order: what one leaves is the next one's server.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sim.machine.common import CHECKOUT
from tests.vm.machine import VirtualMachine
from tests.vm.nfs import Server

from gpuready.outcome import Failure
from gpuready.planning.storage import uuid_of
from gpuready.rendering import zipapp

pytestmark = [pytest.mark.machine, pytest.mark.long]
Play = Callable[..., tuple[str, dict[str, int]]]
PYZ = "/root/gpuready.pyz"
MODEL = "/srv/models/mine"


@pytest.fixture(scope="module", autouse=True)
def server_part(vm: VirtualMachine, tmp_path_factory: pytest.TempPathFactory) -> None:
    vm.put(zipapp.build().write_to(tmp_path_factory.mktemp("part")), PYZ)


@pytest.fixture(scope="module")
def tiny(share: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model on the share, which an operator put there."""
    store = tmp_path_factory.mktemp("models")
    words = [sys.executable, str(CHECKOUT / "sim/tiny_model.py"), "--store", str(store), "gpuready-sim/tiny-qwen2"]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    folder = share.folder / "mine"
    shutil.copytree(made.stdout.strip().splitlines()[-1], folder)
    return folder


@pytest.fixture
def thawed(share: Server) -> Iterator[Server]:
    yield share
    share.thaw()


def ask(vm: VirtualMachine, noun: str, verb: str, given: dict[str, Any], *words: str) -> dict[str, Any]:
    done = vm.ssh(f"python3 {PYZ} {noun} {verb} --json {' '.join(words)}", json.dumps(given), check=False)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def facts(vm: VirtualMachine, store: dict[str, Any], *models: str) -> dict[str, Any]:
    asked = [
        {"path": path, "model": "m", "kind": "model", "source": None, "trust_remote_code": None, "allow_pickle": False}
        for path in models
    ]
    given = {"store": store, "paths": ["/srv/models"], "targets": ["/srv/models"], "models": asked}
    return ask(vm, "facts", "show", given)


def bring(vm: VirtualMachine, store: dict[str, Any], *words: str) -> dict[str, Any]:
    return ask(vm, "model", "bring", {"models": [], "store": store}, *words)


def disk(serial: str, fstype: str = "ext4") -> dict[str, Any]:
    return {"disk": {"serial": serial, "fstype": fstype}}


def nfs(share: Server, **values: Any) -> dict[str, Any]:
    return {"mount": {"source": "10.0.2.2:/models", "options": f"port={share.port}", **values}}


def said(answer: dict[str, Any]) -> str:
    return " ".join(Failure(**one).sentence() for one in answer["failures"])


def digest(vm: VirtualMachine, serial: str) -> str:
    """Return the hash of all that a disk holds."""
    with vm.file(serial).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mounted(vm: VirtualMachine) -> str:
    return vm.ssh("findmnt --noheadings --output SOURCE,FSTYPE /srv/models", check=False).stdout.strip()


# ------------------------------------------------------------------------------------------------ refusals


def test_a_disk_that_holds_anything_is_refused_and_stays_as_it_is(vm: VirtualMachine) -> None:
    before = digest(vm, "SCSI0003")
    answer = bring(vm, disk("SCSI0003"))
    assert "models_disk.serial = SCSI0003: /dev/sda, 4.0 GiB is not empty: it has the signature of ext4" in said(answer)
    assert facts(vm, disk("SCSI0003"))["data"]["store"]["failures"] == answer["failures"]
    assert not vm.ssh("ls /etc/systemd/system/srv-models.mount /var/lib/gpuready/formatting", check=False).stdout
    assert digest(vm, "SCSI0003") == before
    vm.ssh("mkdir -p /mnt/theirs; mount /dev/sda /mnt/theirs")
    assert "/dev/sda, 4.0 GiB is in use (/mnt/theirs)" in said(bring(vm, disk("SCSI0003")))
    vm.ssh("umount /mnt/theirs")


def test_a_serial_that_is_not_there_is_told_with_all_that_are(vm: VirtualMachine) -> None:
    sentence = said(bring(vm, disk("S5XXNA0R")))
    for serial in ("VIRT-0001", "NVME0002", "SCSI0003", "TINY-0004", "none"):
        assert f"{serial} (/dev/" in sentence


# ------------------------------------------------------------------------------------------------ a disk


def test_the_stage_formats_a_declared_empty_disk_once(vm: VirtualMachine, play: Play) -> None:
    declared = {"models_disk": {"serial": "VIRT-0001"}}
    blank = vm.file("VIRT-0001").read_bytes()[: 1 << 20]
    said_before, recap = play("models", "--check", "--diff", **declared)
    assert recap["rc"] == 0, said_before
    uuid = uuid_of("VIRT-0001")
    assert f"+ext4, label gpuready, UUID {uuid}" in said_before
    assert f"+What=/dev/disk/by-uuid/{uuid}" in said_before
    assert vm.file("VIRT-0001").read_bytes()[: 1 << 20] == blank == bytes(1 << 20)
    assert mounted(vm) == ""
    output, recap = play("models", **declared)
    assert (recap["rc"], recap["failed"]) == (0, 0), output
    assert mounted(vm).split()[1] == "ext4"
    assert "tiny-qwen2" in vm.ssh("ls /srv/models").stdout
    again, recap = play("models", "--diff", **declared)
    assert (recap["rc"], recap["changed"]) == (0, 0), again


def test_it_is_mounted_again_by_a_boot_after_a_power_cut(vm: VirtualMachine) -> None:
    # Not in the next instant, when a disk may lack what the kernel was told moments before.
    vm.ssh("sync")
    vm.pull_the_plug()
    vm.start()
    assert mounted(vm).split()[1] == "ext4"
    assert "tiny-qwen2" in vm.ssh("ls /srv/models").stdout
    assert bring(vm, disk("VIRT-0001"))["changed"] is False


def test_declared_no_more_it_stays_and_is_told_and_another_disk_is_refused(vm: VirtualMachine) -> None:
    answer = bring(vm, {})
    assert "declared no more" in answer["data"]["notes"][0]
    assert "is mounted at /srv/models; declare that, or unmount it" in said(bring(vm, disk("NVME0002", "xfs")))
    assert mounted(vm).split()[1] == "ext4"


def test_a_power_cut_between_mkfs_and_mount_is_gone_on_with(vm: VirtualMachine) -> None:
    vm.ssh("systemctl disable --now srv-models.mount; rm /etc/systemd/system/srv-models.mount")
    # What comes after mkfs fails until the next boot.
    vm.ssh("mount --bind /bin/false /usr/bin/systemctl")
    answer = bring(vm, disk("NVME0002", "xfs"))
    assert "could not be mounted" in said(answer)
    vm.ssh("sync")
    vm.pull_the_plug()
    vm.start()
    assert mounted(vm) == ""
    made = vm.ssh("blkid -p -o value -s UUID /dev/nvme0n1").stdout.strip()
    assert made == uuid_of("NVME0002")
    answer = bring(vm, disk("NVME0002", "xfs"))
    assert answer["failures"] == []
    assert "/dev/nvme0n1 (serial" not in json.dumps(answer["diff"])
    assert mounted(vm).split() == ["/dev/nvme0n1", "xfs"]
    vm.ssh("systemctl disable --now srv-models.mount; rm /etc/systemd/system/srv-models.mount; systemctl daemon-reload")


def test_a_disk_that_is_too_small_is_refused_by_preflight(vm: VirtualMachine, play: Play) -> None:
    output, recap = play("models", models_disk={"serial": "TINY-0004"})
    assert recap["rc"] == 2
    assert "/srv/models (the disk with serial TINY-0004) has 1.0 GiB free" in output
    assert vm.ssh("blkid -p $(lsblk -npo NAME,SERIAL | awk '/TINY-0004/ {print $1}')", check=False).stdout == ""


# ------------------------------------------------------------------------------------------------ a share


def test_models_on_a_share_are_read_before_the_first_change(vm: VirtualMachine, share: Server, tiny: Path) -> None:
    assert vm.ssh("ls /sbin/mount.nfs", check=False).returncode, "the server is to be without the client's programs"
    answer = facts(vm, nfs(share), MODEL)
    data = answer["data"]
    assert answer["failures"] == data["store"]["failures"] == []
    assert data["models"][MODEL]["config"]["architectures"] == ["Qwen2ForCausalLM"]
    assert data["models"][MODEL]["failures"] == []
    assert data["filesystems"]["/srv/models"]["mount"] == "/srv/models"
    # NFS counts in blocks of its own size.
    told, real = data["filesystems"]["/srv/models"]["total_bytes"], shutil.disk_usage(share.folder).total
    assert 0 <= told - real < 1 << 20
    assert data["targets"]["/srv/models"]["problem"] == ""
    # Only the process that asked has seen it.
    assert mounted(vm) == ""
    assert vm.ssh("ls -A /srv/models", check=False).stdout == ""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("10.0.2.2:/nothing", "10.0.2.2:/nothing cannot be mounted: "),
        ("10.0.2.99:/models", "10.0.2.99:/models cannot be mounted: 10.0.2.99, port "),
        ("nas.invalid:/models", "nas.invalid:/models cannot be mounted: nas.invalid has no address"),
    ],
)
def test_a_share_that_cannot_be_mounted_is_refused_before_the_first_change(
    vm: VirtualMachine, share: Server, source: str, words: str
) -> None:
    (one,) = facts(vm, nfs(share, source=source))["data"]["store"]["failures"]
    assert f"models_mount.source = {words}" in f"{one['what']}: {one['why']}"


def test_a_server_that_hangs_ends_in_a_sentence_within_a_limit(vm: VirtualMachine, thawed: Server) -> None:
    thawed.freeze()
    started = time.monotonic()
    (one,) = facts(vm, nfs(thawed))["data"]["store"]["failures"]
    assert re.fullmatch(r"no answer within \d\d s", one["why"])
    assert time.monotonic() - started < 120


def test_the_stage_brings_the_client_and_mounts_the_share_once(
    vm: VirtualMachine, share: Server, tiny: Path, play: Play
) -> None:
    declared = {"models_mount": nfs(share)["mount"]}
    output, recap = play("models", **declared)
    assert (recap["rc"], recap["failed"]) == (0, 0), output
    assert mounted(vm).split() == ["10.0.2.2:/models", "nfs4"]
    assert [one.name for one in share.folder.glob("*tiny-qwen2@*")] != []
    again, recap = play("models", "--diff", **declared)
    assert (recap["rc"], recap["changed"]) == (0, 0), again


def test_a_mounted_share_whose_server_hangs_is_told_and_not_waited_for(vm: VirtualMachine, thawed: Server) -> None:
    thawed.freeze()
    # What is known of it a moment ago is not asked for again.
    time.sleep(5)
    started = time.monotonic()
    for answer in (facts(vm, {}), bring(vm, nfs(thawed))):
        assert "/srv/models (10.0.2.2:/models, nfs4) does not answer: no word within 15 s" in said(answer)
    assert time.monotonic() - started < 180


def test_a_share_that_a_boot_does_not_find_does_not_keep_the_server_from_booting(
    vm: VirtualMachine, share: Server
) -> None:
    vm.ssh("sync", check=False)
    vm.pull_the_plug()
    share.freeze()
    try:
        vm.start()
    finally:
        share.thaw()
    vm.ssh("systemctl start srv-models.mount")
    assert mounted(vm).split() == ["10.0.2.2:/models", "nfs4"]
