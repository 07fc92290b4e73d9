"""Builds gpuready.pyz, the part of gpuready that runs on servers.

One file, nothing compiled: our rooms but the controller's, pynvml, and the catalog as JSON. The
same sources give the same bytes, so the file's digest says whether a server's copy is this checkout's.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import json
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gpuready import catalog

CONTROLLER_ROOMS = ("spec", "rendering", "benchmark")
CARRIED_MODULES = ("pynvml",)
ENGINE_PROGRAMS = "gpuready_engine"
"""Carried as text: an engine's own Python runs them, never ours."""
# The earliest date that a zip entry can hold: the build must not depend on the clock.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SHEBANG = b"#!/usr/bin/python3\n"
DAMAGED = " is a damaged server part: run the stage agent again"
# The link gpuready.pyz may be switched while this runs: modules that are read later must come from the same file. And a
# damaged one that is read late would show in a command that has begun already, so the whole file is looked at first.
_MAIN = f"""import hashlib, os, re, sys
sys.argv[0] = sys.path[0] = os.path.realpath(sys.argv[0])
named = re.search("gpuready-([0-9a-f]{{16}})[.]pyz$", sys.argv[0])
with open(sys.argv[0], "rb") as file:
    if named and hashlib.sha256(file.read()).hexdigest()[:16] != named.group(1):
        sys.exit(sys.argv[0] + "{DAMAGED}")
from gpuready.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True)
class ServerPart:
    """The built file and its identity."""

    content: bytes
    digest: str
    """First 16 hexadecimal digits of the SHA-256 of the content."""

    def write_to(self, folder: Path) -> Path:
        """Write the file as `gpuready-<digest>.pyz`, whole or not at all; return its path."""
        path = folder / f"gpuready-{self.digest}.pyz"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(self.content)
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        return path


def _members() -> dict[str, bytes]:
    package = Path(__file__).resolve().parent.parent
    members = {"__main__.py": _MAIN.encode()}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if inside.parts[0] not in CONTROLLER_ROOMS:
            members[f"gpuready/{inside.as_posix()}"] = path.read_bytes()
    for path in sorted((package.parent / ENGINE_PROGRAMS).glob("*.py")):
        members[f"{ENGINE_PROGRAMS}/{path.name}"] = path.read_bytes()
    for name in catalog.names():
        members[f"gpuready/catalog/{name}.json"] = json.dumps(catalog.load(name), sort_keys=True).encode()
    for name in CARRIED_MODULES:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(name)
        members[f"{name}.py"] = Path(found.origin).read_bytes()
    return members


@functools.cache
def build() -> ServerPart:
    """Build the server part from this checkout, once per process."""
    buffer = io.BytesIO(_SHEBANG)
    buffer.seek(0, io.SEEK_END)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(_members().items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    content = buffer.getvalue()
    return ServerPart(content, hashlib.sha256(content).hexdigest()[:16])
