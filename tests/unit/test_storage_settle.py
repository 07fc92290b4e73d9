"""How the store's filesystem comes about: real mkfs, lsblk and wipefs on loop devices; systemd and apt are played.

A loop device has no serial and is no disk to lsblk; `Played` tells both otherwise, and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuready.operations import storage
from gpuready.operations.machine import Done, Machine, run_program
from gpuready.outcome import Failed, MachineCannot, Refusal
from gpuready.planning.storage import Declared, declared, uuid_of

MIB = 1 << 20
SERIAL = "S5XXNA0R"
UUID = uuid_of(SERIAL)
UNIT = "/etc/systemd/system/srv-models.mount"


@dataclass
class Played:
    """A server below a folder, with one disk: a loop device."""

    root: Path
    device: Path
    answers: dict[str, Done] = field(default_factory=dict)
    """By the first two words of a program: what it answers instead of what is played."""
    ran: list[list[str]] = field(default_factory=list)

    @property
    def machine(self) -> Machine:
        return Machine(self.root, self.run)

    def run(self, argv: Sequence[str], stdin: str = "") -> Done:
        words = list(argv)
        self.ran.append(words)
        words = words[2:] if words[0] == "timeout" and words[2] == "systemctl" else words
        played = self.answers.get(" ".join(words[:2]))
        if played is not None:
            return played
        if words[0] == "lsblk":
            return self._lsblk(words)
        if words[0].startswith(("mkfs", "wipefs")):
            return run_program(words)
        if words[:2] == ["systemctl", "start"]:
            self._mounted(self.device if "by-uuid" in self.read(UNIT) else "nas:/models")
        if words[0] == "dpkg-query":
            names = ("e2fsprogs", "xfsprogs", "nfs-common")
            return Done(0, "".join(f"{name}\tinstalled\t1\n" for name in names), "")
        return Done(0, "", "")

    def read(self, path: str) -> str:
        return self.machine.read(path) or ""

    def lsblk(self) -> dict[str, Any]:
        words = ["lsblk", "--json", "--bytes", "--output", "NAME,PATH,TYPE,SIZE,RO,SERIAL,FSTYPE,LABEL,UUID,PTTYPE"]
        (found,) = json.loads(run_program([*words, str(self.device)]).out)["blockdevices"]
        # Without udev, as on a test machine, lsblk asks the device for none of these.
        said = run_program(["blkid", "--probe", "--output", "export", str(self.device)]).out
        values = dict(line.partition("=")[::2] for line in said.splitlines())
        kept = {"fstype": values.get("TYPE"), "uuid": values.get("UUID"), "pttype": values.get("PTTYPE")}
        place = "/srv/models" if str(self.device) in self.read("/proc/self/mountinfo") else None
        return {**found, **kept, "label": values.get("LABEL"), "type": "disk", "serial": SERIAL, "mountpoints": [place]}

    def _lsblk(self, words: list[str]) -> Done:
        return Done(0, json.dumps({"blockdevices": [self.lsblk()]}), "")

    def _mounted(self, source: object) -> None:
        fstype = "ext4" if isinstance(source, Path) else "nfs4"
        self.machine.write(
            "/proc/self/mountinfo",
            f"1 1 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / /srv/models rw - {fstype} {source} rw\n",
        )

    def words(self, program: str) -> list[list[str]]:
        return [one for one in self.ran if program in one[0] or program in one]


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    image = tmp_path / "disk.img"
    image.touch()
    os.truncate(image, 400 * MIB)
    done = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    device = Path(done.stdout.strip())
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    (root / "srv").mkdir()
    os.mknod(root / "dev" / device.name, 0o600 | 0o060000, device.stat().st_rdev)
    server = Played(root, device)
    server.machine.write("/usr/bin/apt-get", "")
    server.machine.write("/proc/self/mountinfo", "1 1 0:1 / / rw - ext4 /dev/vda rw\n")
    yield server
    subprocess.run(["losetup", "--detach", str(device)], check=True)


def disk(fstype: str = "ext4") -> Declared:
    found = declared({}, {"serial": SERIAL, "fstype": fstype})
    assert found is not None
    return found


def share(**values: Any) -> Declared:
    found = declared({"source": "nas:/models", **values}, {})
    assert found is not None
    return found


def refused(played: Played, wanted: Declared) -> str:
    with pytest.raises(Refusal) as caught:
        storage.settle(played.machine, wanted, check=False)
    assert played.words("mkfs") == []
    assert played.words("systemctl") == []
    (only,) = caught.value.failures
    return only.sentence()


# ------------------------------------------------------------------------------------------------ a disk


@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
def test_an_empty_disk_is_formatted_mounted_and_then_left_alone(played: Played, fstype: str) -> None:
    if shutil.which(f"mkfs.{fstype}", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip(f"mkfs.{fstype} is not installed")
    result = storage.settle(played.machine, disk(fstype), check=False)
    found = played.lsblk()
    assert (found["fstype"], found["label"], found["uuid"]) == (fstype, "gpuready", UUID)
    assert result.changed
    assert [change.header for change in result.diff] == [
        f"{played.device} (serial {SERIAL}, 0.4 GiB)",
        UNIT,
        "/srv/models",
    ]
    unit = played.read(UNIT).splitlines()
    assert unit[0].startswith("# Written by gpuready for models_disk.serial = S5XXNA0R.")
    assert unit[2:] == [
        "[Unit]",
        "Description=gpuready store of models",
        "",
        "[Mount]",
        f"What=/dev/disk/by-uuid/{UUID}",
        "Where=/srv/models",
        f"Type={fstype}",
        "Options=nofail",
        "TimeoutSec=60",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    assert played.words("enable") == [["systemctl", "--quiet", "enable", "srv-models.mount"]]
    assert not played.machine.path(storage.BEGUN).exists()
    played.ran.clear()
    for check in (False, True):
        again = storage.settle(played.machine, disk(fstype), check=check)
        assert (again.changed, again.diff) == (False, [])
    assert played.words("mkfs") == played.words("systemctl") == []


def test_a_check_says_the_same_and_touches_nothing(played: Played) -> None:
    before = played.device.read_bytes()[: 4 * MIB]
    said = storage.settle(played.machine, disk(), check=True)
    assert played.device.read_bytes()[: 4 * MIB] == before
    assert played.words("mkfs") == played.words("systemctl") == []
    assert not played.machine.path(UNIT).exists()
    assert said.diff == storage.settle(played.machine, disk(), check=False).diff
    assert "/srv/models would be mounted from /dev/disk/by-uuid/" in said.summary


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (["mkfs.ext4", "-q"], "it has the signature of ext4"),
        (["mkswap"], "it has the signature of swap"),
        ((510, b"\x55\xaa"), "it has the signature of dos"),
        ((-17, b"x"), "there is data of an unknown kind at its start or end"),
    ],
)
def test_what_has_anything_on_it_is_refused_and_stays(
    played: Played, content: list[str] | tuple[int, bytes], words: str
) -> None:
    if isinstance(content, list):
        subprocess.run([*content, str(played.device)], capture_output=True, check=True)
    else:
        with played.device.open("r+b") as file:
            file.seek(content[0], os.SEEK_END if content[0] < 0 else os.SEEK_SET)
            file.write(content[1])
    before = played.device.read_bytes()
    assert words in refused(played, disk())
    assert played.device.read_bytes() == before


def test_a_disk_that_another_program_holds_alone_is_refused(played: Played) -> None:
    holder = os.open(played.device, os.O_RDONLY | os.O_EXCL)
    try:
        assert "could not be read, or something holds it open" in refused(played, disk())
    finally:
        os.close(holder)


def test_an_mkfs_that_fails_is_gone_on_with(played: Played) -> None:
    played.answers["mkfs.ext4 -q"] = Done(1, "", "mkfs.ext4: Input/output error")
    with pytest.raises(Failed) as caught:
        storage.settle(played.machine, disk(), check=False)
    assert "could not be formatted: mkfs.ext4: Input/output error; see dmesg; the next run formats it again" in str(
        caught.value
    )
    assert played.read(storage.BEGUN).strip() == UUID
    # It had begun to write.
    with played.device.open("r+b") as file:
        file.write(b"half a filesystem")
    played.answers.clear()
    assert storage.settle(played.machine, disk(), check=False).diff[0].before == "half formatted\n"
    assert played.lsblk()["uuid"] == UUID
    assert not played.machine.path(storage.BEGUN).exists()


def test_the_record_of_an_interrupted_mkfs_is_for_its_own_disk_alone(played: Played) -> None:
    played.machine.write(storage.BEGUN, uuid_of("another") + "\n")
    with played.device.open("r+b") as file:
        file.write(b"somebody's data")
    assert "data of an unknown kind" in refused(played, disk())


def test_a_power_cut_between_mkfs_and_mount_is_gone_on_with(played: Played) -> None:
    played.answers["systemctl daemon-reload"] = Done(1, "", "no bus")
    with pytest.raises(Failed):
        storage.settle(played.machine, disk(), check=False)
    played.answers.clear()
    played.ran.clear()
    result = storage.settle(played.machine, disk(), check=False)
    assert played.words("mkfs") == []
    assert [change.header for change in result.diff][-1] == "/srv/models"
    assert storage.facts(played.machine, disk())["mounted"] == {"source": str(played.device), "fstype": "ext4"}


# ------------------------------------------------------------------------------------------------ a share


def test_a_share_is_mounted_by_a_unit_and_its_client_comes_first(played: Played) -> None:
    result = storage.settle(played.machine, share(options="ro,nconnect=8"), check=False)
    assert result.changed
    unit = played.read(UNIT)
    assert "What=nas:/models\nWhere=/srv/models\nType=nfs\nOptions=nofail,ro,nconnect=8\n" in unit
    names = [one[0] for one in played.ran]
    assert names.index("dpkg-query") < names.index("systemctl")
    assert not storage.settle(played.machine, share(options="ro,nconnect=8"), check=False).changed


def test_new_options_are_taken_on_by_a_remount(played: Played) -> None:
    storage.settle(played.machine, share(options="ro"), check=False)
    played.ran.clear()
    result = storage.settle(played.machine, share(), check=False)
    (change,) = result.diff
    assert "Options=nofail,ro\n" in change.before
    assert "Options=nofail\n" in change.after
    assert ["timeout", "120", "systemctl", "reload", "srv-models.mount"] in played.ran


def test_what_is_mounted_by_fstab_as_declared_is_used_and_nothing_is_written(played: Played) -> None:
    played.machine.write("/etc/fstab", "# old\nnas:/models /srv/models nfs4 ro 0 0\n")
    result = storage.settle(played.machine, share(), check=False)
    assert [change.header for change in result.diff] == ["/srv/models"]
    assert not played.machine.path(UNIT).exists()
    assert played.words("enable") == []
    assert not storage.settle(played.machine, share(), check=False).changed


def test_what_was_mounted_by_hand_as_declared_gets_a_unit_and_no_new_mount(played: Played) -> None:
    played._mounted("nas:/models")
    result = storage.settle(played.machine, share(), check=False)
    assert [change.header for change in result.diff] == [UNIT]
    assert played.words("start") == played.words("reload") == []


def test_another_mount_and_hidden_files_are_refused(played: Played) -> None:
    played._mounted("old:/models")
    assert "old:/models (nfs4) is mounted at /srv/models" in refused(played, share())
    played.machine.write("/proc/self/mountinfo", "")
    played.machine.write("/srv/models/mine/config.json", "{}")
    assert "/srv/models holds mine (1 in all), which the mount would hide" in refused(played, share())


def test_a_mount_that_does_not_come_is_one_sentence_with_systemds_words(played: Played) -> None:
    played.answers |= {
        "systemctl start": Done(1, "", "Job failed."),
        "journalctl --unit": Done(0, "mount.nfs: Connection refused for nas:/models\n", ""),
    }
    with pytest.raises(Failed) as caught:
        storage.settle(played.machine, share(), check=False)
    assert str(caught.value).startswith(
        "models_mount.source = nas:/models: nas:/models could not be mounted at /srv/models: mount.nfs: Connection "
        "refused for nas:/models; see systemctl status srv-models.mount"
    )
    played.answers["systemctl start"] = Done(124, "", "")
    with pytest.raises(Failed, match="no end within 120 s"):
        storage.settle(played.machine, share(), check=False)


@pytest.mark.parametrize("code", [137, -9])
def test_a_dead_share_is_found_within_a_limit_before_anything_touches_it(played: Played, code: int) -> None:
    played._mounted("nas:/models")
    played.answers["timeout --signal=KILL"] = Done(code, "", "")
    for wanted in (share(), None):
        with pytest.raises(MachineCannot) as caught:
            storage.settle(played.machine, wanted, check=False)
        assert str(caught.value) == (
            "/srv/models (nas:/models, nfs4) does not answer: no word within 15 s; see its server and the network, or "
            "unmount it."
        )
    assert [one[0] for one in played.ran] == ["timeout", "timeout"]


def test_an_automount_is_asked_before_it_is_judged(played: Played) -> None:
    def run(argv: Sequence[str], stdin: str = "") -> Done:
        if "stat" in argv:
            played.machine.write("/etc/fstab", "nas:/models /srv/models nfs x-systemd.automount 0 0\n")
            played._mounted("nas:/models")
        return played.run(argv, stdin)

    played.machine.write("/proc/self/mountinfo", "2 1 0:2 / /srv/models rw - autofs systemd-1 rw\n")
    assert not storage.settle(Machine(played.root, run), share(), check=False).changed


def test_what_is_declared_no_more_stays_and_is_told(played: Played) -> None:
    storage.settle(played.machine, share(), check=False)
    played.ran.clear()
    result = storage.settle(played.machine, None, check=False)
    assert not result.changed
    assert result.data["notes"] == [
        f"/srv/models stays mounted from nas:/models, declared no more; {UNIT} says how it ends"
    ]
    assert played.words("systemctl") == []
    played.machine.write(UNIT, "[Mount]\nWhat=theirs:/m\n")
    assert storage.settle(played.machine, None, check=False).data == {}
