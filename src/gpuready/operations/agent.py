"""Installs the running server part as the one that units and people call, with its folders and the engines' user."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Failed, Failure, MachineCannot, Result
from gpuready.serving.files import beside, link
from gpuready.serving.layout import ENGINE_USER

FOLDER = "/opt/gpuready"
COMMAND = "/usr/local/bin/gpuready"
KEPT = 2
"""Server parts kept: the current one and the one before, which a unit's step may still be running from."""

HOME = "/var/lib/gpuready"
MODELS = "/srv/models"
FOLDERS = ("/etc/gpuready", FOLDER, f"{FOLDER}/engines", MODELS, "/var/cache/gpuready", HOME)
FOLDER_MODE = 0o755
NO_LOGIN = "/usr/sbin/nologin"


def install(machine: Machine, check: bool, source: Path | None = None) -> Result:
    """Bring the engines' user, the folders of gpuready, the server part and the command that calls it."""
    result = Result()
    result.include(_user(machine, check))
    result.include(_folders(machine, check))
    part = _part(machine, source or Path(sys.argv[0]).resolve(), check)
    result.include(part)
    result.summary = part.summary
    return result


# ------------------------------------------------------------------------------------------------ user


def _user(machine: Machine, check: bool) -> Result:
    """Bring the user without login; each half of it by itself, since an interrupted useradd may leave one alone."""
    result = Result()
    group = machine.run(["getent", "group", ENGINE_USER]).code == 0
    entry = machine.run(["getent", "passwd", ENGINE_USER]).out.strip().split(":")
    known = len(entry) == 7
    if not group:
        result.diff.append(Change(f"group {ENGINE_USER}", "absent\n", "a system group\n"))
    if not known:
        result.diff.append(Change(f"user {ENGINE_USER}", "absent\n", f"a system user, shell {NO_LOGIN}\n"))
    elif entry[6] != NO_LOGIN:
        result.diff.append(Change(f"user {ENGINE_USER}", f"shell {entry[6]}\n", f"shell {NO_LOGIN}\n"))
    result.changed = bool(result.diff)
    if check or not result.changed:
        return result
    if not group:
        number = ["--gid", entry[3]] if known else []
        _must(machine, ["groupadd", "--system", *number, ENGINE_USER])
    if not known:
        about = ["--comment", "gpuready inference engines", "--home-dir", HOME, "--no-create-home", "--shell", NO_LOGIN]
        _must(machine, ["useradd", "--system", "--gid", ENGINE_USER, *about, ENGINE_USER])
    elif entry[6] != NO_LOGIN:
        _must(machine, ["usermod", "--shell", NO_LOGIN, ENGINE_USER])
    return result


def _must(machine: Machine, argv: list[str]) -> None:
    done = machine.run(argv)
    if done.code:
        what = f"the engines' user {ENGINE_USER} could not be made: {argv[0]} failed"
        raise Failed(Failure("agent.user", what, done.complaint, "repair that and run again; what was made stays"))


# ------------------------------------------------------------------------------------------------ folders


def _folders(machine: Machine, check: bool) -> Result:
    """Bring the folders, owned by root and readable by everybody."""
    result = Result()
    for name in FOLDERS:
        path = machine.path(name)
        if path.exists() and not path.is_dir():
            what = f"{name} on this server is not a folder"
            raise MachineCannot(Failure("agent.folder", what, "", "move it away and run again"))
        if name == MODELS and path.exists() and _is_read_only(path):
            continue  # a share of weights, which nobody changes from here
        now = "absent" if not path.exists() else _access(path)
        wanted = f"{os.geteuid()}:{os.getegid()} {FOLDER_MODE:04o}"
        if now == wanted:
            continue
        result.diff.append(Change(name, f"{now}\n", f"{wanted}\n"))
        if not check:
            path.mkdir(parents=True, exist_ok=True)
            os.chown(path, os.geteuid(), os.getegid())
            path.chmod(FOLDER_MODE)
    result.changed = bool(result.diff)
    return result


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _access(path: Path) -> str:
    now = path.stat()
    return f"{now.st_uid}:{now.st_gid} {stat.S_IMODE(now.st_mode):04o}"


# ------------------------------------------------------------------------------------------------ server part


def _part(machine: Machine, source: Path, check: bool) -> Result:
    """Copy the running zipapp beside the others, point gpuready.pyz and the command to it, prune older ones."""
    if source.suffix != ".pyz":
        what = f"{source} is not a server part"
        raise MachineCannot(Failure("agent.not_a_zipapp", what, "", "call it through the module gpuready"))
    folder, command = machine.path(FOLDER), machine.path(COMMAND)
    target, current = folder / source.name, folder / "gpuready.pyz"
    before = current.readlink().name if current.is_symlink() else "nothing"
    whole = target.exists() and target.read_bytes() == source.read_bytes()
    linked = command.is_symlink() and str(command.readlink()) == f"{FOLDER}/gpuready.pyz"
    if whole and linked and before == source.name:
        return Result(summary=f"{source.name} is installed")
    result = Result(changed=True, summary=f"{source.name} installed, before it was {before}")
    result.diff.append(Change(f"{FOLDER}/gpuready.pyz", f"{before}\n", f"{source.name}\n"))
    if not check:
        if not whole:
            _copy(source, target)
        link(current, source.name)
        command.parent.mkdir(parents=True, exist_ok=True)
        link(command, f"{FOLDER}/gpuready.pyz")
        _prune(folder, target)
    return result


def _copy(source: Path, target: Path) -> None:
    """Write the copy beside its place, and let it appear there whole."""
    temporary = beside(target)
    with temporary.open("wb") as file:
        file.write(source.read_bytes())
        file.flush()
        os.fsync(file.fileno())
    temporary.chmod(0o755)
    temporary.replace(target)


def _prune(folder: Path, current: Path) -> None:
    others = sorted(
        (path for path in folder.glob("gpuready-*.pyz") if path != current), key=lambda path: path.stat().st_mtime
    )
    for path in others[: -(KEPT - 1)]:
        path.unlink()
    for half in folder.glob(".gpuready-*.new"):
        half.unlink()
