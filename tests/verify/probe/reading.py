"""How the probe reads: programs, files, units, sockets, HTTP. Nothing here changes anything."""

from __future__ import annotations

import functools
import hashlib
import json
import pwd
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

STATE = Path("/var/lib/gpuready")
RUN = Path("/run/gpuready")
OPT = Path("/opt/gpuready")
MODELS = Path("/srv/models")
ENGINE_USER = "gpuready-engine"
ANSWER_SECONDS = 25
METRICS_SECONDS = 5
BUSY = (429, 503, 504)
SILENT = f"no answer within {ANSWER_SECONDS} s"
PROGRAM_SECONDS = 60
STATES = ("LoadState", "ActiveState", "SubState", "UnitFileState", "MainPID", "ControlGroup", "NeedDaemonReload")
# A proxy that the environment names must not stand between.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def run(*words: str, user: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program, perhaps with a user's own rights; one that is not there has exit status 127."""
    identity: dict[str, Any] = {}
    if user:
        entry = pwd.getpwnam(user)
        identity = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [entry.pw_gid]}
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/"}
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            timeout=PROGRAM_SECONDS, env=environment, cwd="/", **identity,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"no answer within {PROGRAM_SECONDS} s")
    except OSError as error:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]}: {error.strerror}")


def demand(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose silence would mean that all is well; one that fails is unknown."""
    done = run(*words)
    if done.returncode:
        raise OSError(f"{' '.join(words[:2])}: {last_line(done.stderr) or f'exit {done.returncode}'}")
    return done


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def read_json(path: Path) -> Any:
    """Return what a file of JSON holds; None where there is none, or it is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_text(path: Path) -> str | None:
    """Return a file's text; None where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file; None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def unit(name: str, *more: str) -> dict[str, str]:
    """Return what systemd knows of a unit now."""
    shown = demand("systemctl", "show", name, *(f"--property={one}" for one in (*STATES, *more)))
    return dict(line.partition("=")[::2] for line in shown.stdout.splitlines() if "=" in line)


def files_digest(files: dict[str, str]) -> str:
    """Return the digest of named texts, as releases and the gateway's folders have it."""
    joined = "\0".join(f"{name}\0{text}" for name, text in sorted(files.items()))
    return hashlib.sha256(joined.encode()).hexdigest()


def folder_files(folder: Path) -> dict[str, str] | None:
    """Return the texts of a folder by name; None where there is none."""
    if not folder.is_dir():
        return None
    return {path.name: read_text(path) or "" for path in folder.iterdir() if path.is_file()}


def pids_of(group: str) -> set[int]:
    """Return the processes of a unit's control group."""
    pids: set[int] = set()
    for top in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"):
        folder = Path(f"{top}{group}")
        if group and folder.is_dir():
            for path in folder.rglob("cgroup.procs"):
                pids.update(map(int, path.read_text().split()))
    return pids


@functools.lru_cache(maxsize=1)
def listeners() -> list[tuple[str, int, int]]:
    """Return address, port and process of every socket that takes connections or datagrams."""
    found: list[tuple[str, int, int]] = []
    for line in run("ss", "-H", "-l", "-n", "-t", "-u", "-p").stdout.splitlines():
        fields = line.split()
        address, _, port = fields[4].rpartition(":")
        found += [(address.partition("%")[0], int(port), int(pid)) for pid in re.findall(r"pid=(\d+)", line)]
    return found


def text_of(url: str) -> str | None:
    """Return the text at an address; None where there is none at once."""
    try:
        with DIRECT.open(url, timeout=METRICS_SECONDS) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, ValueError):
        return None


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int | None, Any]:
    """Return HTTP status and JSON of an answer; no status and the reason where there is none."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - http only
    try:
        with DIRECT.open(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            return error.code, json.load(error)
        except ValueError:
            return error.code, None
    except TimeoutError:
        return None, SILENT
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return None, SILENT if isinstance(reason, TimeoutError) else str(reason)
