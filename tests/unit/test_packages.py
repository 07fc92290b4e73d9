"""Packages: what is installed and when, and the repair of an interrupted dpkg."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuready.operations import packages
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Busy, Failed, MachineCannot


class Apt:
    """dpkg and apt-get as far as one call needs them."""

    def __init__(self, installed: dict[str, str], offered: Sequence[str] = (), *, repairs: bool = True) -> None:
        self.status = dict(installed)
        self.offered = offered
        self.repairs = repairs
        self.calls: list[str] = []

    def __call__(self, argv: Sequence[str]) -> Done:
        self.calls.append(" ".join(argv))
        if argv[0] == "dpkg-query":
            return Done(0, "".join(f"{name}\t{status}\t1.0\n" for name, status in self.status.items()), "")
        if argv[0] == "dpkg" and self.repairs:
            self.status = dict.fromkeys(self.status, "installed")
        if argv[0] == "apt-cache":
            known = [name for name in argv[2:] if name in self.offered]
            return Done(0, "".join(f"{name}:\n  Installed: (none)\n  Candidate: 1.0\n" for name in known), "")
        if "install" in argv and "--fix-broken" not in argv:
            self.status |= dict.fromkeys(argv[argv.index("install") + 1 :], "installed")
        return Done(0, "", "")


def machine_with(tmp_path: Path, apt: Apt) -> Machine:
    machine = Machine(tmp_path, apt)
    machine.write("/usr/bin/apt-get", "")
    machine.write("/etc/os-release", 'ID=debian\nVERSION_CODENAME=trixie\nVERSION_ID="13"\n')
    return machine


def test_nothing_is_asked_of_apt_when_all_is_there(tmp_path: Path) -> None:
    apt = Apt({"nftables": "installed"})
    result = packages.ensure(machine_with(tmp_path, apt), packages.Wanted(["nftables"]), check=False)
    assert not result.changed
    assert len(apt.calls) == 2
    assert all(call.startswith("dpkg-query") for call in apt.calls)


def test_missing_packages_are_installed_without_recommended_ones(tmp_path: Path) -> None:
    apt = Apt({"a": "installed"}, offered=["b"])
    result = packages.ensure(machine_with(tmp_path, apt), packages.Wanted(["a", "b"]), check=False)
    assert result.data == {"versions": {"a": "1.0", "b": "1.0"}, "installed": ["b"]}
    install = next(call for call in apt.calls if call.endswith("install b"))
    assert "--no-install-recommends" in install


def test_check_says_what_would_be_installed(tmp_path: Path) -> None:
    apt = Apt({})
    result = packages.ensure(machine_with(tmp_path, apt), packages.Wanted(["b"]), check=True)
    assert result.summary == "would install b"
    assert all(call.startswith("dpkg-query") for call in apt.calls)


def test_a_package_that_no_source_offers_is_named_with_the_remedy(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, Apt({}))
    with pytest.raises(MachineCannot, match="offers the package cuda-toolkit-12-8; add the repository"):
        packages.ensure(machine, packages.Wanted(["cuda-toolkit-12-8"], remedy="add the repository"), check=False)


def test_lists_that_apt_took_lightly_not_to_read_are_named_and_not_the_package(tmp_path: Path) -> None:
    said = "W: Failed to fetch http://m/debian/InRelease  Connection refused\nW: Some index files failed to download."
    apt = Apt({})
    machine = machine_with(tmp_path, apt)
    quiet = Machine(tmp_path, lambda argv: Done(0, "", said) if argv[-1] == "update" else machine.run(argv))
    with pytest.raises(Failed, match=r"not read the package lists: Failed to fetch http://m/.*refused; repair the"):
        packages.ensure(quiet, packages.Wanted(["b"], remedy="add a source"), check=False)


# ------------------------------------------------------------------------------------------------ lists

LIST = "/var/lib/apt/lists/m_debian_Packages"
CUT = (
    "W: Failed to fetch http://m/Packages.xz  Connection closed\nW: Some index files failed to download. They have been"
    " ignored, or old ones used instead.\n"
)
GONE = (
    "E: Failed to fetch http://m/b_1.0_amd64.deb  404  Not Found\nE: Unable to fetch some archives, maybe run apt-get"
)


class Mirror(Apt):
    """Apt with a mirror that answers `update`, then `install`, with what stands in these lists, and well after that."""

    def __init__(self, offered: Sequence[str], updates: Sequence[Done] = (), installs: Sequence[Done] = ()) -> None:
        super().__init__({}, offered)
        self.answers = {"update": list(updates), "install": list(installs)}

    def __call__(self, argv: Sequence[str]) -> Done:
        answers = next((self.answers[word] for word in self.answers if word in argv), [])
        if answers:
            self.calls.append(" ".join(argv))
            return answers.pop(0)
        return super().__call__(argv)

    def order(self) -> list[str]:
        words = ("update", "install")
        return [word for call in self.calls for word in words if word in call.split() and call.startswith("apt-get")]


def machine_with_lists(tmp_path: Path, apt: Apt) -> Machine:
    machine = machine_with(tmp_path, apt)
    machine.write(LIST, "")
    machine.write("/etc/apt/sources.list", "")
    return machine


def install_again(machine: Machine, apt: Mirror) -> list[str]:
    """Return what a second run asks of apt-get."""
    apt.status.clear()
    apt.calls.clear()
    packages.ensure(machine, packages.Wanted(["b"]), check=False)
    return apt.order()


def test_lists_that_were_read_whole_are_not_read_again(tmp_path: Path) -> None:
    apt = Mirror(["b"])
    machine = machine_with_lists(tmp_path, apt)
    packages.ensure(machine, packages.Wanted(["b"]), check=False)
    assert apt.order() == ["update", "install"]
    assert install_again(machine, apt) == ["install"]


@pytest.mark.parametrize("answer", [Done(0, "", CUT), Done(100, "", "E: The repository 'http://x' is not signed.")])
def test_a_reading_that_was_cut_refuses_no_package_on_offer_and_does_not_count(tmp_path: Path, answer: Done) -> None:
    apt = Mirror(["b"], updates=[answer])
    machine = machine_with_lists(tmp_path, apt)
    machine.path("/var/lib/apt/lists/partial").mkdir()
    assert packages.ensure(machine, packages.Wanted(["b"]), check=False).data["installed"] == ["b"]
    assert install_again(machine, apt) == ["update", "install"]


@pytest.mark.parametrize("seconds", [-90_000, 90_000])
def test_a_stamp_that_is_too_old_or_of_the_future_does_not_count(tmp_path: Path, seconds: int) -> None:
    apt = Mirror(["b"])
    machine = machine_with_lists(tmp_path, apt)
    packages.ensure(machine, packages.Wanted(["b"]), check=False)
    then = time.time() + seconds
    os.utime(machine.path("/etc/apt/sources.list"), (0, 0))
    os.utime(machine.path(packages.LISTS_READ), (then, then))
    assert install_again(machine, apt) == ["update", "install"]


def test_sources_that_are_newer_than_the_lists_have_them_read(tmp_path: Path) -> None:
    apt = Mirror(["b"])
    machine = machine_with_lists(tmp_path, apt)
    packages.ensure(machine, packages.Wanted(["b"]), check=False)
    os.utime(machine.path(packages.LISTS_READ), (time.time() - 60,) * 2)
    assert install_again(machine, apt) == ["update", "install"]


def test_a_version_that_the_archive_has_dropped_is_looked_up_once_more(tmp_path: Path) -> None:
    apt = Mirror(["b"], installs=[Done(100, "", GONE)])
    machine = machine_with_lists(tmp_path, apt)
    machine.write(packages.LISTS_READ, "")
    assert packages.ensure(machine, packages.Wanted(["b"]), check=False).data["installed"] == ["b"]
    assert apt.order() == ["install", "update", "install"]


def test_what_cannot_be_downloaded_twice_is_said_with_what_was_wrong_with_the_lists(tmp_path: Path) -> None:
    apt = Mirror(["b"], updates=[Done(0, "", CUT)] * 2, installs=[Done(100, "", GONE)] * 2)
    words = r"could not install b: E: Failed to fetch .*404.* Failed to fetch http://m/Packages.xz  Connection closed;"
    with pytest.raises(Failed, match=words):
        packages.ensure(machine_with_lists(tmp_path, apt), packages.Wanted(["b"]), check=False)
    assert apt.order() == ["update", "install", "update", "install"]


def test_lists_that_do_not_fit_on_the_disk_stop_the_installation(tmp_path: Path) -> None:
    full = "W: Failed to fetch http://m/Packages  Write error - write (28: No space left on device)\n"
    apt = Mirror(["b"], updates=[Done(0, "", full)])
    with pytest.raises(Failed, match=r"not read the package lists: W: Failed to fetch .*No space left on device"):
        packages.ensure(machine_with_lists(tmp_path, apt), packages.Wanted(["b"]), check=False)
    assert apt.order() == ["update"]


# ------------------------------------------------------------------------------------------------ dpkg and locks


@pytest.mark.parametrize("state", ["unpacked", "half-configured", "triggers-pending"])
def test_an_interrupted_dpkg_is_repaired_first(tmp_path: Path, state: str) -> None:
    apt = Apt({"a": state}, offered=["b"])
    result = packages.ensure(machine_with(tmp_path, apt), packages.Wanted(["b"]), check=False)
    order = [call for call in apt.calls if "--configure -a" in call or call.endswith("install b")]
    assert len(order) == 2
    assert "--configure -a" in order[0]
    assert result.summary.startswith("repaired an interrupted dpkg")


def test_the_journal_of_an_interrupted_dpkg_is_seen(tmp_path: Path) -> None:
    apt = Apt({"a": "installed"})
    machine = machine_with(tmp_path, apt)
    machine.write("/var/lib/dpkg/updates/0001", "Package: a\n")
    result = packages.ensure(machine, packages.Wanted(["a"]), check=True)
    assert result.changed
    assert "its journal" in result.diff[0].before


def test_a_dpkg_that_cannot_be_repaired_is_said(tmp_path: Path) -> None:
    apt = Apt({"a": "half-configured"}, repairs=False)
    with pytest.raises(Failed, match="cannot be repaired: a"):
        packages.ensure(machine_with(tmp_path, apt), packages.Wanted(["a"]), check=False)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PATIENCE_SECONDS", 0.0)


LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_program_that_keeps_the_lock_is_named(tmp_path: Path, impatient: None) -> None:
    machine = machine_with(tmp_path, Apt({}, offered=["b"]))
    machine.write("/var/lib/dpkg/lock-frontend", "")
    words = [sys.executable, "-c", LOCKER, str(machine.path("/var/lib/dpkg/lock-frontend"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        machine.write(f"/proc/{holder.pid}/comm", "unattended-upgr\n")
        with pytest.raises(Busy) as busy:
            packages.ensure(machine, packages.Wanted(["b"], lock_seconds=40), check=False)
    assert str(busy.value) == (
        f"the package lock of this server is held by unattended-upgr (pid {holder.pid}); "
        f"wait for its end, or end it (kill {holder.pid}), then run again."
    )
    assert busy.value.wait_seconds == 40
    # It has ended: the kernel has taken its lock away.
    assert packages.ensure(machine, packages.Wanted(["b"]), check=False).changed


@pytest.mark.parametrize(
    "said",
    [
        "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)",
        "dpkg: error: dpkg frontend lock was locked by another process with pid 7",
    ],
)
def test_a_lock_that_is_taken_meanwhile_is_waited_for_too(tmp_path: Path, said: str) -> None:
    machine = Machine(tmp_path, lambda _: Done(100, "", said))
    with pytest.raises(Busy, match=r"held by a program that has ended \(pid 7\); run again\.$"):
        packages._locked_run(machine, packages.Wanted([]), ["apt-get", "update"])


def test_a_holder_without_a_pid_is_not_named_and_nobody_is_to_be_killed(tmp_path: Path) -> None:
    said = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by another process"
    machine = Machine(tmp_path, lambda _: Done(100, "", said))
    with pytest.raises(Busy) as busy:
        packages._locked_run(machine, packages.Wanted([]), ["apt-get", "update"])
    words = "the package lock of this server is held by another program; wait for its end, then run again."
    assert str(busy.value) == words


@pytest.mark.parametrize("pid", [0, -1])
def test_a_holder_that_cannot_be_seen_from_here_is_waited_for(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    # So the kernel answers for a process of another pid namespace, and for a lock of an open file description.
    monkeypatch.setattr(packages, "_locked_by", lambda _: pid)
    with pytest.raises(Busy, match="held by another program; wait for its end, then run again"):
        packages.ensure(machine_with(tmp_path, Apt({}, offered=["b"])), packages.Wanted(["b"]), check=False)


def test_what_an_interrupted_installation_has_written_is_counted(tmp_path: Path) -> None:
    shown = "installed\t900\nunpacked\t100\nhalf-installed\t20\nnot-installed\t\n"
    machine = Machine(tmp_path, lambda _: Done(0, shown, ""))
    machine.write("/var/cache/apt/archives/a.deb", "12345")
    machine.write("/var/cache/apt/archives/partial/b.deb", "123")
    machine.write("/var/cache/apt/archives/lock", "1")
    assert packages.begun(machine) == {"/usr": 120 * 1024, "/var/cache": 8}


def test_a_spoiled_download_is_fetched_again(tmp_path: Path) -> None:
    archive = "/var/cache/apt/archives/b_1.0_amd64.deb"
    said = (
        f"dpkg-deb: error: '{archive}' is not a Debian format archive\n"
        f"dpkg: error processing archive {archive} (--unpack):\n dpkg-deb --control subprocess returned error 2\n"
    )
    apt = Apt({}, offered=["b"])

    def run(argv: Sequence[str]) -> Done:
        spoiled = "install" in argv and machine.path(archive).exists()
        return Done(100, "", said) if spoiled else apt(argv)

    machine = Machine(tmp_path, run)
    machine_with(tmp_path, apt)
    machine.write(archive, "zeros")
    assert packages.ensure(machine, packages.Wanted(["b"]), check=False).data["installed"] == ["b"]


def test_a_full_disk_is_named_and_nothing_is_fetched_again(tmp_path: Path) -> None:
    archive = "/var/cache/apt/archives/b_1.0_amd64.deb"
    said = (
        f"dpkg: error processing archive {archive} (--unpack):\n"
        " cannot copy extracted data for './usr/b' to '/usr/b.dpkg-new': failed to write (No space left on device)\n"
        "dpkg-deb: error: paste subprocess was killed by signal (Broken pipe)\n"
    )
    apt = Apt({}, offered=["b"])
    machine = Machine(tmp_path, lambda argv: Done(100, "", said) if "install" in argv else apt(argv))
    machine_with(tmp_path, apt)
    machine.write(archive, "whole")
    with pytest.raises(Failed, match=r"'/usr/b.dpkg-new'.*\(No space left on device\); free space and run again"):
        packages.ensure(machine, packages.Wanted(["b"]), check=False)
    assert machine.read(archive) == "whole"
