"""The folders of engines on the server: which are whole, which gpuready made, which may go.

An engine's folder has its marker, written last, so a folder without the right marker is never taken for an engine.
While it is built it has another file, by which what was left half-built is known to be ours.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpuready.outcome import Change, MachineCannot
from gpuready.planning.engines import SYSTEM_PYTHON, folder_name
from gpuready.serving import pythons
from gpuready.serving.files import as_json, read_json, write_text
from gpuready.serving.layout import Layout
from gpuready.serving.packages import Source, Workshop

ROOT = Path("/opt/gpuready")
MARKER = "gpuready-engine.json"
BEGUN = "gpuready-building.json"


def why_not_whole(folder: Path, marker_must: Mapping[str, str]) -> str | None:
    """Return why the engine in a folder cannot be used; None when it is whole."""
    if not folder.is_dir():
        return "not installed"
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"half-built, {MARKER} is missing"
    except (OSError, ValueError):
        return f"damaged, {MARKER} cannot be read"
    if not isinstance(marker, dict):
        return f"damaged, {MARKER} is not an object"
    for key, value in marker_must.items():
        if marker.get(key) != value:
            return f"not what its name says, {MARKER} names {key} {marker.get(key)!r} instead of {value!r}"
    return _why_not_running(folder, marker)


def _why_not_running(folder: Path, marker: Mapping[str, Any]) -> str | None:
    """Return why an engine's Python does not run it any more: an environment holds a link to the server's own."""
    base, built_for = str(marker.get("python_path") or SYSTEM_PYTHON), pythons.minor(str(marker.get("python")))
    try:
        now = pythons.minor(_version(base))
    except MachineCannot as gone:
        return f"built on {base}: {gone.failures[0].why}"
    if built_for != now:
        return f"built for Python {built_for}, the server's {base} is now {now}"
    return None if os.access(folder / "bin/python", os.X_OK) else "without a working bin/python"


@functools.cache
def _version(python: str) -> str:
    return pythons.version(python)


def listing(place: Path) -> list[dict[str, Any]]:
    """Return every folder in a place, with what its marker says, whether it is whole, and whether gpuready made it."""
    entries: list[dict[str, Any]] = []
    for folder in sorted(place.glob("[!.]*")) if place.is_dir() else []:
        reason = why_not_whole(folder, {})
        marker = read_json(folder / MARKER) or {}
        parts = [str(marker.get(key)) for key in ("engine", "version", "lock_sha256")]
        named = folder.name == folder_name(*parts)
        if reason is None and not named:
            reason = f"not what its name says, {MARKER} is another engine's"
        ours = not folder.is_symlink() and (named or (not marker and (folder / BEGUN).is_file()))
        entries.append({**marker, "folder": str(folder), "whole": reason is None, "why": reason, "ours": ours})
    return entries


def size_of(*folders: Path) -> int:
    """Return what folders hold on the disk, in bytes, a file with several names once; nothing when they are absent."""
    sizes: dict[int, int] = {}
    for place, _, names in (found for folder in folders for found in os.walk(folder)):
        for name in names:
            # Somebody may be at work there.
            with contextlib.suppress(FileNotFoundError):
                entry = os.lstat(Path(place, name))
                sizes[entry.st_ino] = entry.st_blocks * 512
    return sum(sizes.values())


def begun(root: Path) -> int:
    """Return what an interrupted installation has already brought, in bytes: the next one uses or replaces it."""
    half = [Path(entry["folder"]) for entry in listing(root / "engines") if not entry["whole"]]
    return size_of(root / "cache", *half)


def begin(folder: Path, marker: Mapping[str, Any]) -> None:
    """Make an engine's folder, known as ours from its first moment on."""
    folder.mkdir()
    write_text(folder / BEGUN, as_json(marker))


def finish(folder: Path, marker: Mapping[str, Any]) -> None:
    """Write an engine's marker, after everything else is on the disk for sure, and close the folder."""
    built = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    os.sync()
    folder.chmod(0o755)
    write_text(folder / MARKER, as_json({**marker, "built_at": built}), 0o444)
    (folder / BEGUN).unlink(missing_ok=True)
    folder.chmod(0o555)


def remove(folder: Path) -> None:
    """Remove an engine's folder, read-only or not; its marker goes first."""
    if not folder.exists():
        return
    folder.chmod(0o755)
    (folder / MARKER).unlink(missing_ok=True)
    for place, names, _ in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if not path.is_symlink():
                path.chmod(0o755)
    shutil.rmtree(folder)


def seal(folder: Path) -> None:
    """Make an engine read-only, and readable and runnable by every user."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(place, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                path.chmod(0o555 if mode & stat.S_IXUSR else 0o444)
        Path(place).chmod(0o555)


def tidy(root: Path, check: bool) -> list[Change]:
    """Remove what an installation that was killed after its last step has left; call it when no engine is missing."""
    left = [path for path in (Workshop(root, Source(), "").cache, *sorted(root.glob(".smoke-*"))) if path.exists()]
    if not check:
        for path in left:
            shutil.rmtree(path)
    return [Change(str(path), "left by an interrupted installation\n", "absent\n") for path in left]


def prunable(root: Path, layout: Layout, planned: Iterable[str], keep: int) -> list[dict[str, Any]]:
    """Return the engines that nobody needs.

    `planned` are the folders of the plan. Needed as well are those that a release on the disk names, whether a replica
    runs on it or may go back to it, and of each engine's former versions the newest `keep`. What gpuready did not make
    is nobody's to take away.
    """
    needed = {*planned, *named_by_releases(layout)}
    left: dict[str, int] = {}
    found = []
    made = [entry for entry in listing(root / "engines") if entry["ours"] and entry["folder"] not in set(planned)]
    for entry in sorted(made, key=lambda one: str(one.get("built_at", "")), reverse=True):
        name = str(entry.get("engine", ""))
        if entry["whole"] and left.get(name, 0) < keep:
            left[name] = left.get(name, 0) + 1
        elif entry["folder"] not in needed:
            found.append(entry)
    return found


def named_by_releases(layout: Layout) -> set[str]:
    """Return the engine folders that the releases on the disk name."""
    plans = [read_json(path) or {} for path in (layout.state / "releases").glob("*/*/plan.json")]
    return {str(plan["engine_folder"]) for plan in plans if plan.get("engine_folder")}


def prune(entries: Iterable[Mapping[str, Any]], check: bool) -> list[Change]:
    """Remove engines; return the differences."""
    changes = []
    for entry in entries:
        title = f"{entry['engine']} {entry['version']}" if entry["whole"] else f"{entry['why']}"
        changes.append(Change(str(entry["folder"]), f"{title}\n", "absent\n"))
        if not check:
            remove(Path(entry["folder"]))
    return changes
