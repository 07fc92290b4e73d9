"""Writes files whole or not at all, with modes that no umask changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

KEEP = -1
"""As a group: leave it as it is."""


def beside(path: Path) -> Path:
    """Return where `path` is made before it appears: always the same, so that a run clears what a killed one left."""
    return path.with_name(f".{path.name}.new")


def write_text(path: Path, text: str, mode: int = 0o644, gid: int = KEEP) -> None:
    """Replace `path` by `text` in one step; a crash leaves the former or the new content, never a part."""
    temporary = beside(path)
    # The folder may belong to the engine's user: root must not write through a link that waits there.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if gid != KEEP:
                os.fchown(file.fileno(), -1, gid)
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # A full disk shows while writing, and Python does not name the file then.
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    keep_names(path.parent)


def keep_names(folder: Path) -> None:
    """Have the disk know what lies in a folder, as it knows what the files hold."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, mode: int = 0o755, gid: int = KEEP) -> None:
    """Make a folder with this mode, and those above it that are missing with 0755, whatever the umask is."""
    missing: list[Path] = []
    above = path
    while not above.is_dir():
        missing.append(above)
        above = above.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    if not has_access(path, mode, gid):
        set_access(path, mode, gid)


def has_access(path: Path, mode: int, gid: int = KEEP) -> bool:
    """Say whether a file or folder has this mode and group."""
    found = path.stat()
    return found.st_mode & 0o7777 == mode and gid in (KEEP, found.st_gid)


def set_access(path: Path, mode: int, gid: int = KEEP) -> None:
    """Give a file or folder this group and mode."""
    if gid != KEEP:
        os.chown(path, -1, gid)
    path.chmod(mode)


def link(path: Path, target: str) -> None:
    """Point the symbolic link `path` to `target` in one step, where it does not already."""
    if path.is_symlink() and str(path.readlink()) == target:
        return
    temporary = beside(path)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)
    keep_names(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None where there is no such file or it is not whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def as_json(value: Any) -> str:
    """Return `value` as the JSON text that we keep in files: stable, readable, newline at the end."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
