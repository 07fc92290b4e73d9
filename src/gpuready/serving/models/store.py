"""The store of models that gpuready downloads: one read-only folder for each commit, with a manifest of hashes in it.

A folder appears by a rename once every file was compared by hash. What is half fetched lies beside it under one fixed
hidden name. Servers may share a store: a lock beside the folder, which NFS keeps too, has one of them at work.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuready.outcome import Busy, Failed, Failure
from gpuready.serving.files import beside

MANIFEST = "gpuready-model.json"
PART = ".part"
WAIT_SECONDS = 6 * 3600
"""How long another server's download is waited for."""
_CHUNK = 1 << 20
_REPAIR = "run the stage models with -e models_verify=true: it downloads what is damaged, and nothing else"


def manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder; None where there is none that can be read."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = [int(one["size"]) for one in found["files"].values()]
        return found if isinstance(found["source"], dict) and sizes is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def same_commit(said: Mapping[str, Any], source: Mapping[str, str]) -> bool:
    """Return whether a manifest is of a source."""
    return all(said["source"].get(key) == source[key] for key in ("hub", "repository", "revision"))


def damage(folder: Path, files: Mapping[str, Mapping[str, Any]], *, full: bool = False) -> dict[str, str]:
    """Return what is wrong with the files of a folder, by name: missing, another size, and with `full` another hash."""
    wrong = {}
    for name, one in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != one["size"]:
                wrong[name] = f"it has {size} bytes instead of {one['size']}"
        except OSError as error:
            wrong[name] = str(error.strerror)
    if full:
        rest = [name for name in files if name not in wrong]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            problems = pool.map(lambda name: _hash_problem(folder / name, files[name]), rest)
            wrong |= {name: why for name, why in zip(rest, problems, strict=True) if why}
    return wrong


def _hash_problem(path: Path, said: Mapping[str, Any]) -> str:
    """Return why a file is not the one of its manifest; empty where its hash is that one."""
    digest = hashlib.sha256()
    if not said.get("sha256"):
        digest = hashlib.sha1(f"blob {said['size']}\0".encode(), usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        return str(error.strerror)
    return "" if digest.hexdigest() == (said.get("sha256") or said.get("git_sha1")) else "its hash is another one"


def why_not_whole(folder: Path, source: Mapping[str, str], *, code: bool = False) -> str | None:
    """Return why a folder is not to be taken for the whole commit; None where it is. Compares sizes, not hashes."""
    if not folder.is_dir():
        return "absent"
    said = manifest(folder)
    if said is None:
        return f"without a {MANIFEST} that can be read"
    if not same_commit(said, source):
        return "of another commit"
    if code and not said.get("code"):
        return "without the repository's Python code"
    wrong = damage(folder, said["files"])
    return "; ".join(f"{name}: {why}" for name, why in list(wrong.items())[:3]) or None


def verify(folder: Path) -> list[Failure]:
    """Return every file of a folder whose content is not what its manifest says; reads all of it."""
    said = manifest(folder)
    if said is None:
        return [Failure("model.manifest", f"{folder} has no {MANIFEST} that can be read", "", _REPAIR)]
    wrong = damage(folder, said["files"], full=True)
    return [
        Failure("model.damaged", f"{folder / name} is damaged", why, _REPAIR) for name, why in sorted(wrong.items())
    ]


@contextlib.contextmanager
def alone(folder: Path, title: str) -> Iterator[None]:
    """Work on one folder of the store alone, among all servers that share the store.

    Raises:
        Busy: when another one is at work there, with who and since when.
    """
    path = folder.with_name(f".{folder.name}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            # Of the kinds of lock this is the one that NFS takes to its server.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another server"
            have = bytes_below(beside(folder))
            what = f"{holder} is downloading {title} into {folder.parent}, {have / 2**30:.1f} GiB so far"
            raise Busy(
                Failure("model.busy", what, "", "wait for its end: this server uses what it brings"), WAIT_SECONDS
            ) from None
        except OSError as error:
            what = f"{folder.parent} cannot be locked"
            fix = "mount it with locks: NFS version 4, or version 3 with lockd and without nolock"
            raise Failed(Failure("model.lock", what, str(error.strerror), fix)) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()} (pid {os.getpid()})\n".encode(), 0)
        yield
    finally:
        # It stays: another server may already wait with this very file open.
        os.close(descriptor)


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder; nothing where it is absent."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(Path(place, name)).st_size
    return total


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a folder that is being filled."""
    temporary = folder / f"{MANIFEST}{PART}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def publish(filled: Path, folder: Path) -> None:
    """Make a filled folder read-only and give it its name, in place of a damaged one where there is one."""
    for place, _, names in os.walk(filled, topdown=False):
        for name in names:
            Path(place, name).chmod(0o444)
        Path(place).chmod(0o555)
    os.sync()
    old = folder.with_name(f".{folder.name}.old")
    remove(old)
    if folder.exists():
        folder.rename(old)
    filled.rename(folder)
    _sync_folder(folder.parent)
    remove(old)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some shared filesystems sync no folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder of ours, read-only or not."""
    if not folder.exists():
        return
    for place, _, _ in os.walk(folder):
        Path(place).chmod(0o755)
    shutil.rmtree(folder)
