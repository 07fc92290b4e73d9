"""Installs the running server part as the one that units and people call."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpuready.outcome import Change, Failure, MachineCannot, Result
from gpuready.serving.files import link

FOLDER = Path("/opt/gpuready")
COMMAND = Path("/usr/local/bin/gpuready")
KEPT = 2
"""Server parts kept: the current one and the one before, which a unit's step may still be running from."""


def install(check: bool, source: Path | None = None, folder: Path = FOLDER, command: Path = COMMAND) -> Result:
    """Copy the running zipapp to `folder`, point gpuready.pyz and the command to it, prune older ones."""
    source = source or Path(sys.argv[0]).resolve()
    if source.suffix != ".pyz":
        what = f"{source} is not a server part"
        raise MachineCannot(Failure("agent.not_a_zipapp", what, "", "call it through the module gpuready"))
    target = folder / source.name
    current = folder / "gpuready.pyz"
    before = current.readlink().name if current.is_symlink() else "nothing"
    whole = target.exists() and target.read_bytes() == source.read_bytes()
    linked = command.is_symlink() and command.resolve() == target.resolve()
    if whole and linked and before == source.name:
        return Result(summary=f"{source.name} is installed")
    result = Result(changed=True, summary=f"{source.name} installed, before it was {before}")
    result.diff.append(Change(str(current), f"{before}\n", f"{source.name}\n"))
    if not check:
        folder.mkdir(parents=True, exist_ok=True)
        if not whole:
            temporary = folder / f".{source.name}.{os.getpid()}.new"
            with temporary.open("wb") as file:
                file.write(source.read_bytes())
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o755)
            temporary.replace(target)
        link(current, source.name)
        command.parent.mkdir(parents=True, exist_ok=True)
        link(command, str(current))
        _prune(folder, target)
    return result


def _prune(folder: Path, current: Path) -> None:
    others = sorted(
        (path for path in folder.glob("gpuready-*.pyz") if path != current), key=lambda path: path.stat().st_mtime
    )
    for path in others[: -(KEPT - 1)]:
        path.unlink()
