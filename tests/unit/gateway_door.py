"""A real HAProxy with the gateway's configuration, in front of an engine that is played, asked as a client does."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuready.operations.machine import SEARCH_PATH
from gpuready.rendering.templates import Renderer, render_gateway

ROOT = Path(__file__).resolve().parents[2]
HAPROXY = shutil.which("haproxy", path=SEARCH_PATH) or ""
LIMIT_KIB = 64
MODELS = {"chat": "meta-llama/Llama-3.3", "two": "Qwen/a+b@c:d_e-1.0", "three": "3x"}
PATH = "/v1/chat/completions"

needs_haproxy = pytest.mark.skipif(not HAPROXY, reason="HAProxy is not installed here; booted machines test it too")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def render(port: int, *engines: int, refused: Sequence[dict[str, Any]] = (), **knobs: Any) -> dict[str, str]:
    """Render the gateway's files; every deployment but "three" has a replica at each engine's port."""
    deployments = [
        {
            "name": name,
            "model": model,
            "task": "generate",
            "refused_requests": list(refused),
            "settings": {"max_num_seqs": 4, "max_model_len": 128},
            "replicas": [
                {"index": index, "port": one} for index, one in enumerate([1] if name == "three" else engines)
            ],
        }
        for name, model in MODELS.items()
    ]
    gateway = {
        "port": port,
        "bind": "127.0.0.1",
        "request_timeout_seconds": 1,
        "hold_seconds": 1,
        "body_limit_kib": LIMIT_KIB,
        "body_limit_bytes": LIMIT_KIB * 1024,
        "buffer_bytes": LIMIT_KIB * 1024 + 16384,
        "max_connections": 50,
        **knobs,
    }
    plan = {"deployments": deployments, "gateway": gateway}
    return render_gateway(Renderer([ROOT / "templates"]), {}, plan, {})


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers with what it got; on request says nothing, or hangs up."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        got = json.loads(self.rfile.read(size) if size else self.chunks())
        if got.get("play") == "silent":
            time.sleep(2)
        if "play" in got:
            self.close_connection = True
            return
        body = json.dumps({"model": got["model"], "port": self.server.server_port}).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Seen-Host", self.headers.get("Host", ""))
        self.send_header("X-Seen-Key", self.headers.get("Authorization", "none"))
        self.end_headers()
        self.wfile.write(body)

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class has it
        pass


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: dict[str, Any]


@dataclass
class Door:
    port: int

    def ask(
        self,
        body: bytes | str | Iterator[bytes],
        chunked: bool = False,
        headers: dict[str, str] | None = None,
        path: str = PATH,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        data = body.encode() if isinstance(body, str) else body
        connection.request("POST", path, data, headers or {}, encode_chunked=chunked)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, json.loads(answer.read()))

    def raw(self, *texts: bytes) -> Answer:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as one:
            for text in texts:
                one.sendall(text)
                # Headers that came alone are a request already; what is wrong from the start never becomes one.
                time.sleep(0.2)
            said = b""
            while part := one.recv(65536):
                said += part
        head, _, body = said.partition(b"\r\n\r\n")
        return Answer(int(head.split()[1]), http.client.HTTPMessage(), json.loads(body))


@contextlib.contextmanager
def haproxy(folder: Path, *engines: int, **knobs: Any) -> Iterator[Door]:
    port = free_port()
    for name, text in render(port, *engines, **knobs).items():
        # Its own user and the socket's folder belong to the server.
        lines = [line for line in text.splitlines() if line.split()[:1] not in (["user"], ["group"], ["stats"])]
        (folder / name).write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([HAPROXY, "-q", "-db", "-f", str(folder / "haproxy.cfg")], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield Door(port)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def engine(port: int = 0) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def in_form(answer: Answer) -> tuple[int, str]:
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "server_error")
    return answer.status, error["code"]
