"""Reads the hash-pinned locks that engines are installed from, and finds local wheels that a lock names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from gpuready.outcome import Failure, Refusal

CUDA_LIBRARIES = "cuda-libraries"
"""Section of a lock: what torch's CUDA build alone needs."""
_SECTION = re.compile(r"^# section: (\S+)$")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+?)(?:\s*;\s*(.*?))?\s*\\?$")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})\b")
_DIGEST_DIGITS = 12


@dataclass
class Requirement:
    """One pinned package."""

    name: str
    version: str
    section: str
    hashes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lock:
    """One lock: every package of an engine, each with its version and the hashes of its files."""

    name: str
    sha256: str
    requirements: list[Requirement]

    @property
    def digest(self) -> str:
        """Return the digits of the lock's hash that name the engine's folder."""
        return self.sha256[:_DIGEST_DIGITS]

    @property
    def python(self) -> str | None:
        """Return the Python that the lock is for, e.g. `3.13`; None when its name does not say."""
        found = re.search(r"-py(\d)(\d+)$", self.name)
        return f"{found[1]}.{found[2]}" if found else None

    def text(self, without: Iterable[str] = (), local: Mapping[str, str] | None = None) -> str:
        """Return the lock as a requirements file, without the named sections.

        `local` names packages whose wheel of a local version (`2.13.0+cpu`) is at hand and shall be taken; for
        all others only the very version of the lock is, because a hash belongs to it alone.
        """
        left_out = set(without)
        lines: list[str] = []
        for one in self.requirements:
            if one.section not in left_out:
                version = (local or {}).get(one.name, one.version)
                lines.append(one.lines[0].replace(f"=={one.version}", f"==={version}", 1))
                lines += one.lines[1:]
        return "".join(f"{line}\n" for line in lines)

    def count(self, without: Iterable[str] = ()) -> int:
        """Return how many packages the lock holds, without the named sections."""
        left_out = set(without)
        return sum(one.section not in left_out for one in self.requirements)


def parse(name: str, text: str) -> Lock:
    """Read a lock; refuse one that is not complete or not pinned by hash."""
    requirements: list[Requirement] = []
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _SECTION.match(line):
            section = found[1]
        if not line.strip() or line.startswith("#"):
            continue
        if not line[0].isspace():
            found = _REQUIREMENT.match(line.split("--hash=")[0].rstrip())
            if not found:
                raise Refusal(
                    Failure(
                        "engine.lock",
                        f"Lock {name}, line {number}, is not a pinned requirement",
                        line.strip()[:80],
                        "make the lock again with scripts/lock",
                    )
                )
            requirements.append(Requirement(found[1].lower(), found[2], section))
        elif not requirements:
            continue
        requirements[-1].lines.append(line)
        requirements[-1].hashes += _HASH.findall(line)
    bare = [one.name for one in requirements if not one.hashes]
    if bare or not requirements:
        what = f"Lock {name} names {', '.join(bare)} without a hash" if bare else f"Lock {name} is empty"
        raise Refusal(Failure("engine.lock", what, "", "make the lock again with scripts/lock"))
    return Lock(name, hashlib.sha256(text.encode()).hexdigest(), requirements)


@dataclass(frozen=True)
class Wheel:
    """A wheel's file name, taken apart."""

    name: str
    version: str
    pythons: list[str]
    abis: list[str]
    platforms: list[str]

    @property
    def local(self) -> str:
        """Return the version's local part, e.g. `cpu` of `2.13.0+cpu`."""
        return self.version.partition("+")[2]

    def fits(self, python: str | None) -> bool:
        """Say whether the wheel runs under this Python on x86_64 Linux."""
        if not any(one == "any" or one.endswith("_x86_64") for one in self.platforms):
            return False
        if python is None or "py3" in self.pythons:
            return True
        own = f"cp{python.replace('.', '')}"
        return own in self.pythons or "abi3" in self.abis


def wheel_of(path: Path) -> Wheel | None:
    """Take a wheel's file name apart; None when it is not a wheel's."""
    if path.suffix != ".whl":
        return None
    parts = unquote(path.name)[: -len(".whl")].split("-")
    if len(parts) not in (5, 6):
        return None
    pythons, abis, platforms = (part.split(".") for part in parts[-3:])
    name = re.sub(r"[-_.]+", "-", parts[0]).lower()
    return Wheel(name, parts[1], pythons, abis, platforms)


def wheels_in(folders: Iterable[Path], lock: Lock) -> list[Path]:
    """Return the wheels in these folders that the lock names by hash and that fit its Python."""
    pinned = {one.name: one for one in lock.requirements}
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.whl")) if folder.is_dir() else []:
            wheel = wheel_of(path)
            if wheel is None or wheel.name not in pinned or not wheel.fits(lock.python) or not path.is_file():
                continue
            wanted = pinned[wheel.name]
            # The hash is looked at last: a wheel of torch is large, and most wheels differ by name already.
            same = wheel.version.partition("+")[0] == wanted.version.partition("+")[0]
            if same and f"sha256:{file_sha256(path)}" in wanted.hashes:
                found.setdefault(path.name, path)
    return list(found.values())


def file_sha256(path: Path) -> str:
    """Return a file's SHA-256 without reading it whole into memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
