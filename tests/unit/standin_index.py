"""A stand-in of package indexes on loopback: one that dates its files (JSON, as PyPI), one that does not (HTML)."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def wheel(name: str, version: str, requires: tuple[str, ...] = ()) -> tuple[str, bytes]:
    """Return the file name and the content of a wheel with one module."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl", held.getvalue()


def source(name: str, version: str) -> tuple[str, bytes]:
    """Return the file name and the content of a source distribution."""
    setup = f"from setuptools import setup\nsetup(name={name!r}, version={version!r}, py_modules=[])\n"
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for path, text in {"setup.py": setup, "PKG-INFO": f"Name: {name}\nVersion: {version}\n"}.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return f"{name}-{version}.tar.gz", held.getvalue()


@dataclass
class Index:
    """One index: files by package, each with the day on which it came where the index dates its files."""

    dated: bool
    files: dict[str, list[tuple[str, bytes, str]]] = field(default_factory=dict)
    spoiled: dict[str, bytes] = field(default_factory=dict)
    """What is served instead of a file, whose hash is named all the same."""
    address: str = ""

    def add(self, file: tuple[str, bytes], day: str = "2026-01-01") -> str:
        """Offer a file; return its hash as a lock names it."""
        package = file[0].split("-")[0]
        self.files.setdefault(package, []).append((*file, day))
        return f"sha256:{hashlib.sha256(file[1]).hexdigest()}"

    def page(self, package: str) -> tuple[str, str] | None:
        """Return a package's page and its kind; None where there is no such package."""
        found = self.files.get(package)
        if found is None:
            return None
        hashes = [hashlib.sha256(content).hexdigest() for _, content, _ in found]
        if not self.dated:
            links = [f'<a href="/f/{one[0]}#sha256={sha}">{one[0]}</a>' for one, sha in zip(found, hashes, strict=True)]
            return f"<html><body>{''.join(links)}</body></html>", "text/html"
        entries = [
            {"filename": name, "url": f"/f/{name}", "hashes": {"sha256": sha}, "upload-time": f"{day}T00:00:00Z"}
            for (name, _, day), sha in zip(found, hashes, strict=True)
        ]
        answer = {"meta": {"api-version": "1.1"}, "name": package, "files": entries}
        return json.dumps(answer), "application/vnd.pypi.simple.v1+json"

    def content(self, name: str) -> bytes | None:
        """Return what is served as a file."""
        for found in self.files.values():
            for file, content, _ in found:
                if file == name:
                    return self.spoiled.get(name, content)
        return None


@contextmanager
def served(index: Index) -> Iterator[Index]:
    """Serve an index on loopback as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = self.path.replace("%2B", "+").strip("/").split("/")
            if place == ["simple"]:
                answer: tuple[str | bytes, str] | None = ("<html></html>", "text/html")
            elif place[0] == "f":
                content = index.content(place[1])
                answer = None if content is None else (content, "application/octet-stream")
            else:
                answer = index.page(place[1])
            body, kind = answer or (b"", "text/plain")
            raw = body.encode() if isinstance(body, str) else body
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(raw)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.address = f"http://127.0.0.1:{server.server_port}/simple"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
