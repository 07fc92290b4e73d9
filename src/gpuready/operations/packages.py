"""Packages of the distribution: one call repairs, refreshes, installs and proves.

Ansible's own module needs python3-apt, which a blank server does not have, and without it refuses check mode.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuready.operations import sources
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Busy, Change, Failed, Failure, MachineCannot, Refusal, Result
from gpuready.planning import clock

_UNFINISHED = ("half-installed", "unpacked", "half-configured", "triggers-awaited", "triggers-pending")
PATIENCE_SECONDS = 3.0
"""Waited for here when another program works with packages."""
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]*")


@dataclass(frozen=True)
class Wanted:
    """What is to be installed."""

    names: Sequence[str]
    components: Sequence[str] = ()
    """Parts of the distribution's archive that have to be among the sources, e.g. contrib and non-free."""
    components_file: str = ""
    """Our own source file, written where no other source offers the components."""
    lists_max_age_seconds: int = 86400
    lock_seconds: int = 300
    remedy: str = "add a source that offers it"


def ensure(machine: Machine, wanted: Wanted, check: bool) -> Result:
    """Install what is missing, without recommended packages; packages that are there stay at their version."""
    bad = [name for name in wanted.names if not _NAME.fullmatch(name)]
    if bad:
        raise Refusal([Failure("packages.name", f"{name!r} is not a package's name") for name in bad])
    if machine.which("apt-get") is None:
        raise MachineCannot(Failure("packages.no_apt", "this machine has no apt-get", "", "use Debian or Ubuntu"))
    result = Result()
    broken = _unfinished(machine)
    if broken:
        result.diff.append(Change("dpkg", f"interrupted: {', '.join(broken)}\n", "complete\n"))
        if not check:
            _wait_for_locks(machine, wanted.lock_seconds)
            _repair(machine, wanted)
    if wanted.components:
        result.diff += sources.offer_components(machine, wanted.components_file, wanted.components, check)
    versions = _versions(machine)
    missing = [name for name in wanted.names if name not in versions]
    result.diff += [Change(f"package {name}", "absent\n", "installed\n") for name in missing]
    result.changed = bool(result.diff)
    if missing and not check:
        _install(machine, wanted, missing)
        versions = _versions(machine)
        lost = [name for name in missing if name not in versions]
        if lost:
            what = f"apt-get ended well, but {', '.join(lost)} cannot be seen as installed"
            raise Failed(Failure("packages.not_there", what, "", "see /var/log/apt/term.log"))
    result.data = {"versions": {name: versions.get(name) for name in wanted.names}, "installed": missing}
    done = "would install" if check else "installed"
    result.summary = f"{done} {', '.join(missing)}" if missing else "every package is installed"
    if broken:
        result.summary = f"{'would repair' if check else 'repaired'} an interrupted dpkg; {result.summary}"
    return result


# ------------------------------------------------------------------------------------------------ dpkg


def _status(machine: Machine) -> list[list[str]]:
    shape = "${Package}\t${db:Status-Status}\t${Version}\n"
    done = machine.run(["dpkg-query", "--show", f"--showformat={shape}"])
    return [fields for line in done.out.splitlines() if len(fields := line.split("\t")) == 3]


def _versions(machine: Machine) -> dict[str, str]:
    return {name: version for name, status, version in _status(machine) if status == "installed"}


def _unfinished(machine: Machine) -> list[str]:
    """Return what an interrupted dpkg left behind: packages in the middle, or its journal."""
    names = [name for name, status, _ in _status(machine) if status in _UNFINISHED]
    journal = machine.path("/var/lib/dpkg/updates")
    if not names and journal.is_dir() and any(entry.name.isdigit() for entry in journal.iterdir()):
        return ["its journal in /var/lib/dpkg/updates"]
    return names


def begun(machine: Machine) -> dict[str, int]:
    """Return what an interrupted installation has already written, in bytes below /usr and below /var/cache."""
    shape = "${db:Status-Status}\t${Installed-Size}\n"
    lines = machine.run(["dpkg-query", "--show", f"--showformat={shape}"]).out.splitlines()
    unpacked = [fields[1] for line in lines if len(fields := line.split("\t")) == 2 and fields[0] in _UNFINISHED]
    archives = machine.path("/var/cache/apt/archives")
    downloaded = 0
    for path in (*archives.glob("*.deb"), *archives.glob("partial/*.deb")):
        # A download that ends now is moved.
        with contextlib.suppress(FileNotFoundError):
            downloaded += path.stat().st_size
    return {"/usr": sum(int(kib) for kib in unpacked if kib.isdigit()) * 1024, "/var/cache": downloaded}


def _repair(machine: Machine, wanted: Wanted) -> None:
    keep = ["--force-confdef", "--force-confold"]
    done = _locked_run(machine, wanted, ["dpkg", *keep, "--configure", "-a"])
    left = _unfinished(machine)
    if left:
        # Configuring is not enough where dependencies or half of a package's files are missing.
        if _lists_are_old(machine, wanted.lists_max_age_seconds):
            _refresh(machine, wanted)
        done = _run_apt(machine, wanted, ["--fix-broken", "install"])
        left = _unfinished(machine)
    if left:
        what = f"dpkg was interrupted on this machine and cannot be repaired: {', '.join(left)}"
        fix = "repair it by hand with `dpkg --configure -a` and `apt-get --fix-broken install`"
        raise Failed(Failure("packages.dpkg_broken", what, _reason(done), fix))


# ------------------------------------------------------------------------------------------------ locks

_LOCKS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)
_LOCKED = re.compile(r"could not get lock|lock was locked|is locked by another", re.IGNORECASE)
_HOLDER = re.compile(r"(?:process|with pid) (\d+)")
_FLOCK = "hhqqi4x"
"""struct flock of Linux on 64 bits: type, whence, start, length, pid."""


def _wait_for_locks(machine: Machine, lock_seconds: int) -> None:
    """Wait a little while another program, such as unattended-upgrades, works with packages.

    Raises:
        Busy: when it goes on; whoever asked tells the operator and asks again, for `lock_seconds` in all.
    """
    end = time.monotonic() + min(PATIENCE_SECONDS, lock_seconds)
    while holders := [pid for lock in _LOCKS if (pid := _locked_by(machine.path(lock))) is not None]:
        if time.monotonic() > end:
            raise _busy(machine, max(holders), lock_seconds)
        time.sleep(0.5)


def _locked_by(path: Path) -> int | None:
    """Return the process that holds a lock file, 0 for one that cannot be seen from here; None where nobody does."""
    try:
        with path.open("rb+") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except FileNotFoundError:
        return None
    return None if kind == fcntl.F_UNLCK else int(pid)


def _busy(machine: Machine, pid: int, lock_seconds: int) -> Busy:
    """Return who holds the lock, as far as that is known: a pid of 0 or less is none that may be named or ended."""
    who, fix = "another program", "wait for its end, then run again"
    if pid > 0:
        name = (machine.read(f"/proc/{pid}/comm") or "").strip()
        who = f"{name or 'a program that has ended'} (pid {pid})"
        fix = f"wait for its end, or end it (kill {pid}), then run again" if name else "run again"
    return Busy(Failure("packages.locked", f"the package lock of this server is held by {who}", "", fix), lock_seconds)


def _locked_run(machine: Machine, wanted: Wanted, argv: Sequence[str]) -> Done:
    """Run a program that wants the package lock, which somebody may have taken since we looked."""
    done = machine.run(argv)
    if done.code and _LOCKED.search(done.err):
        holder = _HOLDER.search(done.err)
        raise _busy(machine, int(holder.group(1)) if holder else 0, wanted.lock_seconds)
    return done


# ------------------------------------------------------------------------------------------------ apt

_APT = (
    "apt-get", "--yes", "--quiet", "--no-install-recommends",
    "--option=DPkg::Lock::Timeout=10",
    "--option=Dpkg::Options::=--force-confdef", "--option=Dpkg::Options::=--force-confold",
    "--option=Dpkg::Use-Pty=0",
)  # fmt: skip
_ARCHIVE = re.compile(r"error processing archive (/\S+\.deb)")
_SPOILED = re.compile(r"dpkg-deb: error|corrupt|unexpected end of file", re.IGNORECASE)
_FULL = "No space left on device"
_UNREAD = re.compile(r"Failed to fetch|Some index files failed")


def _run_apt(machine: Machine, wanted: Wanted, words: Sequence[str]) -> Done:
    """Run apt-get; once more where what it downloaded turns out to be spoiled, or could not be downloaded.

    apt compares what lies in its cache by size alone, and a power cut can leave the size without the content. An
    archive drops a version that is superseded, and lists that name it are too old then, whatever their age.
    """
    done = _locked_run(machine, wanted, [*_APT, *words])
    if done.code == 0 or _FULL in done.err:
        return done
    spoiled = _ARCHIVE.findall(done.err) if _SPOILED.search(done.err) else []
    for archive in spoiled:
        machine.remove(archive)
    unfetched = "Failed to fetch" in done.err
    if unfetched:
        _refresh(machine, wanted)
    return _locked_run(machine, wanted, [*_APT, *words]) if spoiled or unfetched else done


def _reason(done: Done) -> str:
    """Return what apt-get says about its failure."""
    if _FULL in done.err:
        return next(line.strip() for line in done.err.splitlines() if _FULL in line)
    errors = [line for line in done.err.splitlines() if line.startswith("E:")] or [done.complaint]
    return " ".join(errors[:4])


def _install(machine: Machine, wanted: Wanted, missing: Sequence[str]) -> None:
    _wait_for_locks(machine, wanted.lock_seconds)
    said = _refresh(machine, wanted) if _lists_are_old(machine, wanted.lists_max_age_seconds) else ""
    unknown = _without_candidate(machine, missing)
    if unknown:
        # The lists may be fresh and still older than a source that was just published.
        said = _refresh(machine, wanted)
        unknown = _without_candidate(machine, missing)
    if said and (unknown or _FULL in said):
        raise _unread(said)
    if unknown:
        what = "no apt source of this server offers the package"
        raise MachineCannot([Failure("packages.unknown", f"{what} {name}", "", wanted.remedy) for name in unknown])
    done = _run_apt(machine, wanted, ["install", *missing])
    if done.code:
        what = f"apt-get could not install {', '.join(missing)}"
        reason = f"{_reason(done)} {said}".strip()
        fix = "nothing has to be undone: the next run repairs what was interrupted and goes on"
        if _FULL in done.err:
            fix = f"free space and run again; {fix}"
        raise Failed(Failure("packages.install", what, reason, clock.hint(reason, time.time()) or fix))


LISTS_READ = "/var/lib/gpuready/package-lists-read"
"""Written after every list was read. The folder of the lists is younger after an attempt that was cut, and apt's own
stamp of success after one that read some of them."""


def _refresh(machine: Machine, wanted: Wanted) -> str:
    """Read the package lists; return what kept apt-get from reading some, which it often takes lightly."""
    done = _locked_run(machine, wanted, [*_APT, "update"])
    unread = [line[3:] for line in done.err.splitlines() if line.startswith("W: ") and _UNREAD.search(line)]
    if done.code or unread:
        return _reason(done) if done.code or _FULL in done.err else unread[0]
    machine.write(LISTS_READ, "")
    return ""


def _unread(reason: str) -> Failed:
    fix = clock.hint(reason, time.time()) or "repair the source, or the network (gpuready_proxy), and run again"
    return Failed(Failure("packages.update", "apt-get could not read the package lists", reason, fix))


def _lists_are_old(machine: Machine, max_age: int) -> bool:
    """Return whether the lists are older than allowed, or than the sources."""
    read = _mtime(machine.path(LISTS_READ))
    lists = machine.path("/var/lib/apt/lists")
    empty = not lists.is_dir() or not any(
        re.search(r"_(Packages|InRelease|Release)", entry.name) for entry in lists.iterdir()
    )
    folder = machine.path("/etc/apt/sources.list.d")
    files = [machine.path("/etc/apt/sources.list"), folder, *(folder.iterdir() if folder.is_dir() else ())]
    # A stamp of the future is one of a clock that was wrong.
    return empty or not 0 <= time.time() - read <= max_age or any(_mtime(file) > read for file in files)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _without_candidate(machine: Machine, names: Sequence[str]) -> list[str]:
    out = machine.run(["apt-cache", "policy", *names]).out
    known = set()
    for block in re.split(r"\n(?=\S)", out):
        candidate = re.search(r"^  Candidate: (.+)$", block, re.MULTILINE)
        if candidate and candidate.group(1) != "(none)":
            known.add(block.split(":", 1)[0].strip())
    return [name for name in names if name not in known]
