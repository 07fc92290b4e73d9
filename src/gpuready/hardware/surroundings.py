"""What surrounds our programs on this server: where they may write, and what language a login asks for.

Nothing is written and no command is run.
"""

from __future__ import annotations

import array
import fcntl
import locale
import os
from dataclasses import dataclass
from pathlib import Path

from gpuready.hardware.host import filesystem

_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS of linux/fs.h
_IMMUTABLE, _APPEND_ONLY = 0x10, 0x20  # FS_IMMUTABLE_FL, FS_APPEND_FL


@dataclass(frozen=True)
class Target:
    """A folder that we write to, or will make."""

    path: str
    mount_point: str | None
    """Of the filesystem that it is on; None where the kernel does not list its mounts."""
    problem: str
    """Empty, or why it cannot be written: `read-only`, `immutable`, `no folder` or `denied`."""
    place: str
    """What has the problem: the folder itself, or the nearest one above it that is there."""
    noexec: bool | None
    """Whether the filesystem refuses to run programs; None where it does not say."""


def target(path: str, root: str | Path = "/") -> Target:
    """Return whether an absolute path can be written, or made; like `test -w`, `findmnt -T` and `lsattr -d`."""
    wanted = Path(root, path.lstrip("/"))
    place = next(parent for parent in (wanted, *wanted.parents) if os.path.lexists(parent))
    found = filesystem(path, root)
    flags = _mount_flags(place)
    return Target(
        path=path,
        mount_point=found.mount_point if found else None,
        problem=_problem(place, flags),
        place=str(Path("/") / place.relative_to(root)),
        noexec=None if flags is None else bool(flags & os.ST_NOEXEC),
    )


def _problem(place: Path, flags: int | None) -> str:
    if not place.is_dir():
        return "no folder"
    if flags is not None and flags & os.ST_RDONLY:
        return "read-only"
    if _attributes(place) & (_IMMUTABLE | _APPEND_ONLY):
        return "immutable"
    return "" if os.access(place, os.W_OK | os.X_OK) else "denied"


def _mount_flags(place: Path) -> int | None:
    try:
        return os.statvfs(place).f_flag
    except OSError:
        return None


def _attributes(place: Path) -> int:
    """Return the attributes that chattr sets; none where the filesystem has no such thing."""
    try:
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return 0
    try:
        answer = array.array("L", [0])
        fcntl.ioctl(handle, _GET_FLAGS, answer)
        return answer[0]
    except OSError:
        return 0
    finally:
        os.close(handle)


def unknown_locales(environment: bytes | None = None) -> dict[str, str]:
    """Return the locales that the login names and this server does not have: `{variable: locale}`.

    `environment` is what the process was started with; our own main has made the present one plain.
    """
    text = Path("/proc/self/environ").read_bytes() if environment is None else environment
    pairs = (entry.partition("=") for entry in text.decode(errors="replace").split("\0"))
    named = {name: value for name, _, value in pairs if value and (name == "LANG" or name.startswith("LC_"))}
    return {name: value for name, value in sorted(named.items()) if not _is_known(value)}


def _is_known(name: str) -> bool:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except (locale.Error, ValueError):
        return False
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    return True
