"""A hub of models that is not one: Hugging Face's and ModelScope's interface over real HTTP, with faults on order.

What it answers is read from huggingface_hub (hf_api.py, file_download.py, utils/_http.py, utils/_pagination.py) and
modelscope-hub (_legacy_api.py). With `--serve FOLDER REPOSITORY` it serves a folder to a machine until it is ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = 200
"""Files up to this many bytes lie in Git itself, larger ones in LFS."""
LARGE = 1000
"""Answers with more bytes are cut and damaged on order."""


@dataclass
class Repository:
    """One repository: files by commit, and what branches and tags are."""

    commits: dict[str, dict[str, bytes]]
    names: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """Gated: only who sends it gets anything."""


@dataclass
class Asked:
    """One request, as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0


@dataclass
class Faults:
    """What goes wrong, and how often; `match` is a part of the request's path."""

    match: str = "resolve"
    status: int | None = None
    times: int = 0
    only_resumed: bool = False
    """The status is the answer to requests for the rest of a file alone."""
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: float | None = None
    cuts: int = 0
    """The connection ends at this part of the answer, so many times."""
    corrupt: int = 0
    """So many answers have one wrong byte."""
    ignores_ranges: bool = False
    bytes_per_second: float | None = None


class StandinHub:
    """The hub's state, and every request that it got; a second server is the storage that it redirects to."""

    def __init__(self, repositories: dict[str, Repository], page: int = 1000) -> None:
        self.repositories = repositories
        self.page = page
        self.faults = Faults()
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self.redirects = False
        self.address = ""
        self.storage = ""

    def take(self, name: str) -> bool:
        """Return whether a fault still has to happen, and count it."""
        with self.lock:
            left = getattr(self.faults, name)
            if left > 0:
                setattr(self.faults, name, left - 1)
            return bool(left > 0)

    def files_asked(self) -> list[str]:
        """Return the paths of files that were asked for."""
        return [one.path for one in self.asked if "/resolve/" in one.path or "FilePath=" in one.path]

    @contextlib.contextmanager
    def running(self, host: str = "127.0.0.1", port: int = 0) -> Iterator[StandinHub]:
        """Serve until the block ends."""
        servers = [_Server((host, port), self), _Server((host, 0), self)]
        for server in servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.address = f"http://{host}:{servers[0].server_address[1]}"
        self.storage = f"http://{host}:{servers[1].server_address[1]}"
        try:
            yield self
        finally:
            for server in servers:
                server.shutdown()
                server.server_close()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
    if len(content) > SMALL:
        entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
    return entry


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], hub: StandinHub) -> None:
        self.hub = hub
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> StandinHub:
        return self.server.hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.one = Asked("GET", self.path, {key.lower(): value for key, value in self.headers.items()})
        self.hub.asked.append(self.one)
        if self._has_fault() and self.hub.take("times"):
            return self._say(self.hub.faults.status or 500, b"{}", self.hub.faults.headers)
        path, query = unquote(parts.path), {key: one[0] for key, one in parse_qs(parts.query).items()}
        if path.startswith("/storage/"):
            _, _, digest = path.rpartition("/")
            return self._file(self._by_digest(digest))
        for pattern, answer in (
            (r"/api/models/(.+?)/revision/(.+)", self._revision),
            (r"/api/models/(.+?)/tree/([0-9a-f]+)", self._tree),
            (r"/api/v1/models/(.+?)/repo/files", self._scope_files),
            (r"/api/v1/models/(.+?)/repo", self._scope_file),
            (r"/(.+?)/resolve/([^/]+)/(.+)", self._resolve),
        ):
            found = re.fullmatch(pattern, path)
            if found:
                repository = self.hub.repositories.get(found[1])
                if repository is None:
                    return self._say(401, b"{}", {"X-Error-Message": "Invalid username or password."})
                if not self._may(repository):
                    return self._say(401 if "Authorization" not in self.headers else 403, b"{}", _GATED)
                return answer(repository, query, *found.groups()[1:])
        return self._say(404, b"{}")

    def _has_fault(self) -> bool:
        faults = self.hub.faults
        is_resumed = not self.headers.get("Range", "bytes=0-").startswith("bytes=0-")
        return faults.status is not None and faults.match in self.path and (is_resumed or not faults.only_resumed)

    def _may(self, repository: Repository) -> bool:
        said = self.headers.get("Authorization"), self.headers.get("Cookie")
        wanted = repository.token
        return wanted is None or said[0] == f"Bearer {wanted}" or said[1] == f"m_session_id={wanted}"

    def _commit(self, repository: Repository, name: str) -> str:
        return repository.names.get(name, name)

    def _revision(self, repository: Repository, query: dict[str, str], name: str) -> None:
        commit = self._commit(repository, name)
        if commit not in repository.commits:
            return self._say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return self._say(200, json.dumps({"sha": commit}).encode())

    def _tree(self, repository: Repository, query: dict[str, str], commit: str) -> None:
        files = sorted(repository.commits[commit].items())
        begin = int(query.get("cursor", 0))
        page = files[begin : begin + self.hub.page]
        headers = {}
        if begin + self.hub.page < len(files):
            following = f"{self.hub.address}{urlsplit(self.path).path}?recursive=true&cursor={begin + self.hub.page}"
            headers["Link"] = f'<{following}>; rel="next"'
        entries = [_entry(path, content) for path, content in page]
        folders = sorted({path.rpartition("/")[0] for path, _ in page if "/" in path})
        entries += [{"type": "directory", "path": one, "size": 0, "oid": "0" * 40} for one in folders]
        return self._say(200, json.dumps(entries).encode(), headers)

    def _scope_files(self, repository: Repository, query: dict[str, str]) -> None:
        commit = self._commit(repository, query["Revision"])
        if commit not in repository.commits:
            return self._say(404, b"{}")
        entries: list[dict[str, Any]] = [
            {"Path": path, "Name": path.rpartition("/")[2], "Type": "blob", "Size": len(content),
             "Sha256": sha256(content), "Revision": commit, "CommittedDate": 1}
            for path, content in repository.commits[commit].items()
        ]  # fmt: skip
        entries.append({"Path": "folder", "Name": "folder", "Type": "tree", "Size": 0, "Sha256": ""})
        return self._say(200, json.dumps({"Success": True, "Code": 200, "Data": {"Files": entries}}).encode())

    def _scope_file(self, repository: Repository, query: dict[str, str]) -> None:
        self._given(repository.commits[self._commit(repository, query["Revision"])].get(query["FilePath"]))

    def _resolve(self, repository: Repository, query: dict[str, str], commit: str, path: str) -> None:
        self._given(repository.commits[commit].get(path))

    def _given(self, content: bytes | None) -> None:
        if content is None:
            return self._say(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.hub.redirects and len(content) > SMALL:
            location = f"{self.hub.storage}/storage/{sha256(content)}?Signature=very-secret"
            return self._say(302, b"", {"Location": location, "X-Linked-Size": str(len(content))})
        return self._file(content)

    def _by_digest(self, digest: str) -> bytes:
        return next(
            content
            for repository in self.hub.repositories.values()
            for files in repository.commits.values()
            for content in files.values()
            if sha256(content) == digest
        )

    def _file(self, content: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        total, headers, status = len(content), {}, 200
        if wanted and not self.hub.faults.ignores_ranges:
            begin, end = int(wanted[1]), int(wanted[2] or total - 1)
            if begin >= total:
                return self._say(416, b"", {"Content-Range": f"bytes */{total}"})
            end = min(end, total - 1)
            content, status = content[begin : end + 1], 206
            headers["Content-Range"] = f"bytes {begin}-{end}/{total}"
        return self._say(status, content, headers, is_file=True)

    def _say(self, status: int, content: bytes, headers: dict[str, str] | None = None, is_file: bool = False) -> None:
        self.one.status = status
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        with contextlib.suppress(OSError):
            self._send(content, is_file)

    def _send(self, content: bytes, is_file: bool) -> None:
        faults = self.hub.faults
        if is_file and len(content) > LARGE:
            if self.hub.take("corrupt"):
                content = content[:-1] + bytes([content[-1] ^ 1])
            if faults.cut_at is not None and self.hub.take("cuts"):
                content = content[: int(len(content) * faults.cut_at)]
        rate = faults.bytes_per_second if is_file else None
        if rate is None:
            self.wfile.write(content)
            return
        piece = max(1, int(rate / 50))
        for begin in range(0, len(content), piece):
            self.wfile.write(content[begin : begin + piece])
            time.sleep(0.02)


_GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."}


def main() -> None:
    """Serve a folder as one repository at one commit, until it is ended: --serve FOLDER REPOSITORY HOST PORT."""
    folder, name, host, port = sys.argv[2:6]
    files = {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()
    }
    hub = StandinHub({name: Repository({COMMIT: files}, {"main": COMMIT})})
    with hub.running(host, int(port)):
        print(hub.address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
