"""Installs Python packages from a lock, by uv, which is itself pinned by hash.

Everything here is given where packages may come from; credentials travel in the environment, never in
argv, and never reach a message.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuready.outcome import Failed, Failure, mask
from gpuready.planning import clock
from gpuready.serving import turn
from gpuready.serving.files import write_text
from gpuready.serving.locks import Lock

_CERTIFICATES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
_TOOL_MARKER = "gpuready-tool.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Source:
    """Where packages come from; nothing given means the tools' own default."""

    index_url: str = ""
    extra_index_urls: list[str] = field(default_factory=list)
    find_links: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """Return the settings of uv and pip for this source."""
        # Every file is pinned by hash, so the best version may come from whichever index holds it.
        settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
        if self.index_url:
            settings |= {"UV_DEFAULT_INDEX": self.index_url, "PIP_INDEX_URL": self.index_url}
        if self.extra_index_urls:
            extra = " ".join(self.extra_index_urls)
            settings |= {"UV_INDEX": extra, "PIP_EXTRA_INDEX_URL": extra}
        if self.find_links:
            settings |= {"UV_FIND_LINKS": ",".join(self.find_links), "PIP_FIND_LINKS": " ".join(self.find_links)}
        return settings


@dataclass(frozen=True)
class Workshop:
    """What an installation works with: its folders on a real disk, its source, the server's Python."""

    root: Path
    source: Source
    python: str

    @property
    def cache(self) -> Path:
        """Return the folder for downloads: beside the engines, so that files are linked, not copied."""
        return self.root / "cache"

    @property
    def wheels(self) -> Path:
        """Return the folder for wheels that the controller sent along."""
        return self.cache / "wheels"

    def open_cache(self) -> None:
        """Make the folder for downloads; what was there before the last boot is thrown away.

        A power cut leaves files with a name and without their content, and uv takes an unpacked wheel for whole.
        """
        self.cache.mkdir(parents=True, exist_ok=True)
        self.cache.chmod(0o700)
        stamp, boot = self.cache / "boot-id", BOOT_ID.read_text(encoding="ascii").strip()
        if not stamp.exists() or stamp.read_text(encoding="ascii", errors="replace") != boot:
            self.forget_downloads()
            stamp.write_text(boot, encoding="ascii")

    def forget_downloads(self) -> None:
        """Throw away what the tools downloaded and unpacked; wheels that the controller sent are compared by it."""
        for name in ("uv", "tmp"):
            shutil.rmtree(self.cache / name, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return the environment of the tools."""
        settings = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        certificates = next((one for one in _CERTIFICATES if Path(one).exists()), None)
        if certificates:
            settings.setdefault("SSL_CERT_FILE", certificates)
            settings.setdefault("PIP_CERT", certificates)
        # /tmp is often a small tmpfs, and a package may have gigabytes.
        temporary = self.cache / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        settings |= {
            "TMPDIR": str(temporary),
            "UV_CACHE_DIR": str(self.cache / "uv"),
            "UV_NO_PROGRESS": "1",
            "UV_HTTP_TIMEOUT": settings.get("UV_HTTP_TIMEOUT", "120"),
            "PIP_NO_CACHE_DIR": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "LC_ALL": "C.UTF-8",
        }
        return settings | self.source.environment()


def make_room(python: str, folder: Path, *options: str) -> None:
    """Make a virtual environment in a folder that is not there yet."""
    words = [python, "-m", "venv", *options, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, pass_fds=turn.descriptors())
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise Failed(
            Failure(
                "engine.venv",
                f"{python} cannot make the virtual environment {folder}",
                last_line(done.stdout + done.stderr),
                "install the package python3-venv on the server",
            )
        )


def provide_uv(workshop: Workshop, lock: Lock) -> Path:
    """Return uv, installed from its own lock; a half-made one is made anew."""
    home = workshop.root / "tools" / f"uv-{lock.requirements[0].version}"
    marker = home / _TOOL_MARKER
    program = home / "bin/uv"
    wanted = {"lock_sha256": lock.sha256}
    try:
        whole = json.loads(marker.read_text(encoding="utf-8")) == wanted and os.access(program, os.X_OK)
    except (OSError, ValueError):
        whole = False
    if whole:
        return program
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    make_room(workshop.python, home)
    requirements = home / "requirements.txt"
    requirements.write_text(lock.text(), encoding="utf-8")
    pip = [str(home / "bin/python"), "-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
    command = [*pip, "--only-binary", ":all:", "-r", str(requirements)]
    _run(command, workshop, f"uv {lock.requirements[0].version}")
    # A power cut must not leave the marker without the program.
    os.sync()
    write_text(marker, json.dumps(wanted))
    return program


def install(uv: Path, workshop: Workshop, folder: Path, requirements: str, what: str) -> None:
    """Install a lock's text into a virtual environment, byte code compiled."""
    listed = workshop.cache / "requirements.txt"
    listed.write_text(requirements, encoding="utf-8")
    command = [str(uv), "pip", "install", "--python", str(folder / "bin/python"), "--no-python-downloads"]
    command += ["--no-deps", "--require-hashes", "--no-build", "--compile-bytecode", "--system-certs"]
    if any(workshop.wheels.glob("*.whl")):
        command += ["--find-links", str(workshop.wheels)]
    _run([*command, "-r", str(listed)], workshop, what)


def _run(command: Sequence[str], workshop: Workshop, what: str) -> None:
    # Where we are killed alone, this child goes on writing: then it still holds the server for itself.
    done = subprocess.run(
        command,
        env=workshop.environment(),
        capture_output=True,
        text=True,
        check=False,
        pass_fds=turn.descriptors(),
    )
    if done.returncode:
        raise Failed(explain(what, done.stderr or done.stdout))


def explain(what: str, said: str) -> Failure:
    """Put what uv or pip said into one sentence: which package, what is wrong with it, what to do."""
    text = mask(said)
    package = _first(
        text,
        r"Failed to download `([^`]+)`",
        r"because you require ([\w.-]+==\S+)",
        r"you require ([\w.-]+==[^\s,]+)",
        r"requirement ([\w.-]+==\S+)",
        r"/([\w.-]+)/`?(?:\s|$)",
    )
    subject = f"{what} could not be installed" + (f", {package.rstrip('.,')} is missing" if package else "")
    for pattern, why, fix in _KNOWN:
        if found := re.search(pattern, text):
            named = {key: value or "" for key, value in found.groupdict().items()}
            address = _first(text, r"(https?://[^\s)`]+)") or "the package index"
            in_time = clock.hint(text, time.time())
            return Failure("engine.download", subject, why.format(address=address, **named), in_time or fix)
    return Failure("engine.download", subject, last_line(text), "repair that and run the stage again")


_REACH = "see that the server reaches its package index, or name a mirror in engines_index_url"
_KNOWN: list[tuple[str, str, str]] = [
    (
        r"No space left on device|os error 28",
        "the disk is full",
        "free space under /opt/gpuready and run the stage again",
    ),
    (
        r"(?i)hash mismatch|DO NOT MATCH THE HASHES",
        "the file that the index offers is not the one that the lock names by hash",
        "do not use it: see what the mirror in engines_index_url serves under this name",
    ),
    (
        r"(?i)unexpected header|invalid (?:zip|gzip|archive)|corrupt|CRC32? (?:mismatch|check)|unexpected end of file",
        "what arrived is corrupt",
        "run the stage again; where that stays so, see what the mirror in engines_index_url serves",
    ),
    (
        r"(?P<code>401|403) (?:Unauthorized|Forbidden)",
        "{address} answers {code}",
        "put the index's credentials into engines_index_url",
    ),
    (
        r"dns error|failed to lookup address|Name or service not known|name resolution",
        "the name of {address} is not known to the server",
        _REACH,
    ),
    (
        r"(?i)invalid peer certificate|CERTIFICATE_VERIFY_FAILED|UnknownIssuer",
        "the server does not trust the certificate of {address}",
        "put its authority into /usr/local/share/ca-certificates and run update-ca-certificates",
    ),
    (
        r"HTTP status (?:server|client) error \((?P<code>\d+ [^)]*)\)",
        "{address} answers {code}",
        _REACH,
    ),
    (
        r"(?i)connection refused|tcp connect error|timed? ?out|error sending request|Failed to establish",
        "{address} does not answer",
        _REACH,
    ),
    (
        r"no usable wheels|no wheels|No matching distribution|Wheels are required",
        "the index offers no wheel that fits this server's Python and C library",
        "use a system that the stack names in catalog/stacks.yaml",
    ),
    (
        r"was not found in the package registry|There is no version|there is no version|No solution found",
        "the index does not hold it",
        "complete the mirror, or name one in engines_index_url that does",
    ),
]


def _first(text: str, *patterns: str) -> str | None:
    for pattern in patterns:
        if found := re.search(pattern, text):
            return found[1]
    return None


def last_line(text: str) -> str:
    """Return the last line that says something, without credentials."""
    lines = [line.strip() for line in mask(text).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
