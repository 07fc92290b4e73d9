"""Small models that gpuready makes itself: named by their content, written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def revision(content: Mapping[str, bytes]) -> str:
    """Return the revision of a model that is given as content by file name."""
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def revision_of(folder: Path) -> str:
    """Return the revision of a small model that lies in a folder."""
    return revision({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})


def is_whole(folder: Path) -> bool:
    """Say whether a model that gpuready placed is what its name says, `<name>@<revision>`, and read-only."""
    if not folder.is_dir() or any(path.stat().st_mode & 0o222 for path in (folder, *folder.iterdir())):
        return False
    return revision_of(folder) == folder.name.rpartition("@")[2]


def place(content: Mapping[str, bytes], folder: Path) -> None:
    """Write a model beside its place and rename it there: whole or not at all; read-only for everyone."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    for name, data in content.items():
        path = beside / name
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
    if folder.exists():
        folder.chmod(0o755)
        shutil.rmtree(folder)
    beside.rename(folder)
    folder.chmod(0o555)
