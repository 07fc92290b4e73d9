"""The gateway's configuration, asked as a client does: a real HAProxy in front of an engine that is played."""

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuready.operations.machine import SEARCH_PATH
from gpuready.rendering.templates import Renderer

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


def render(port: int, *engines: int, **knobs: Any) -> dict[str, str]:
    """Render the gateway's files; every deployment but "three" has a replica at each engine's port."""
    deployments = [
        {
            "name": name,
            "model": model,
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
    values = {"plan": {"deployments": deployments, "gateway": gateway}, "spec": {}, "server": {}}
    renderer = Renderer([ROOT / "templates"])
    names = ("haproxy.cfg", "models.json", "models.map")
    return {name: renderer.render(f"gateway/{name}.j2", values) for name in names}


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
        self, body: bytes | str | Iterator[bytes], chunked: bool = False, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        data = body.encode() if isinstance(body, str) else body
        connection.request("POST", PATH, data, headers or {}, encode_chunked=chunked)
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


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with engine() as port, haproxy(tmp_path_factory.mktemp("gateway"), port) as made:
        yield made


def in_form(answer: Answer) -> tuple[int, str]:
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "server_error")
    return answer.status, error["code"]


@needs_haproxy
@pytest.mark.parametrize("model", [MODELS["chat"], MODELS["two"]])
@pytest.mark.parametrize("slash", ["/", r"\/", r"\u002f"])
def test_model_is_found_however_its_slash_is_written(door: Door, model: str, slash: str) -> None:
    answer = door.ask('{"messages": "a\\\\/b \\" \\/ ü", "model": "MODEL"}'.replace("MODEL", model.replace("/", slash)))
    assert (answer.status, answer.body.get("model")) == (200, model)


@needs_haproxy
def test_model_that_is_not_served_is_404(door: Door) -> None:
    assert in_form(door.ask('{"model": "meta-llama\\/Other"}')) == (404, "model_not_found")


def pieces(size: int, of: int) -> Iterator[bytes]:
    body = b'{"model": "meta-llama/Llama-3.3", "messages": "' + b"x" * size
    body = body[: size - 2] + b'"}'
    for start in range(0, size, of):
        yield body[start : start + of]


@needs_haproxy
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 413), (5000, 413), (10 * LIMIT_KIB * 1024, 413)])
def test_body_limit_holds_for_every_kind_of_body(door: Door, chunked: bool, more: int, status: int) -> None:
    size = LIMIT_KIB * 1024 + more
    try:
        answer = door.ask(pieces(size, 3000) if chunked else b"".join(pieces(size, 3000)), chunked)
    except (BrokenPipeError, ConnectionResetError):
        # The answer came before everything was sent; it is read by clients that look before they write on.
        assert more >= 5000
        return
    assert answer.status == status
    if status == 413:
        assert in_form(answer) == (413, "body_too_large")


@needs_haproxy
def test_large_headers_leave_the_buffer_to_the_body(door: Door) -> None:
    assert in_form(door.ask("{}", headers={"X-Large": "x" * 13000})) == (431, "headers_too_large")
    assert door.ask(pieces(LIMIT_KIB * 1024, 100), True, {"X-Large": "x" * 11000}).status == 200


@needs_haproxy
def test_what_haproxy_says_itself_has_openais_form(door: Door) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert in_form(door.raw(head, b"no size\r\n")) == (400, "bad_request")
    assert in_form(door.ask('{"model": "meta-llama/Llama-3.3", "play": "hang up"}')) == (502, "bad_gateway")
    assert in_form(door.ask('{"model": "meta-llama/Llama-3.3", "play": "silent"}')) == (504, "gateway_timeout")
    absent = door.ask('{"model": "3x"}')
    assert in_form(absent) == (503, "service_unavailable")
    assert int(absent.headers["Retry-After"]) > 0


@pytest.mark.parametrize("status", [400, 408, 413, 500, 502, 503, 504])
def test_each_error_of_haproxy_is_json(status: int) -> None:
    lines = [line.strip() for line in render(8080, 18100)["haproxy.cfg"].splitlines()]
    line = next(line for line in lines if line.startswith(f"http-error status {status} "))
    error = json.loads(line.partition(" string '")[2].partition("'")[0])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert ("hdr Retry-After" in line) == (status == 503)


def test_map_names_a_backend_for_every_model() -> None:
    files = render(8080, 18100)
    pairs = [line.split() for line in files["models.map"].splitlines() if not line.startswith("#")]
    assert pairs == [[model, f"deployment_{name}"] for name, model in MODELS.items()]
    assert [one["id"] for one in json.loads(files["models.json"])["data"]] == list(MODELS.values())


# Several replicas ------------------------------------------------------------------------------------------------

CHAT = '{"model": "meta-llama/Llama-3.3"}'


def servers(text: str) -> list[str]:
    found = text.partition("backend deployment_chat\n")[2].partition("backend")[0]
    return [line.split()[1] for line in found.splitlines() if line.split()[:1] == ["server"]]


def test_every_replica_has_a_line_and_several_one_that_holds() -> None:
    assert servers(render(8080, 18100)["haproxy.cfg"]) == ["chat.0"]
    assert servers(render(8080, 18100, 18101)["haproxy.cfg"]) == ["chat.0", "chat.1", "chat.hold"]


@needs_haproxy
def test_requests_go_to_the_replicas_that_serve(tmp_path: Path) -> None:
    with engine() as first, contextlib.ExitStack() as second:
        other = second.enter_context(engine())
        with haproxy(tmp_path, first, other, hold_seconds=5) as door:
            assert {door.ask(CHAT).body["port"] for _ in range(6)} == {first, other}
            second.close()
            # None of them is lost on the one that is away.
            assert {door.ask(CHAT).body.get("port") for _ in range(6)} == {first}
            with engine(other):
                end = time.monotonic() + 5
                while door.ask(CHAT).body["port"] != other:
                    assert time.monotonic() < end, "a replica that is back gets no requests"


@needs_haproxy
def test_requests_are_held_while_no_replica_serves(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    with haproxy(tmp_path, *ports, hold_seconds=10) as door:
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(door.ask(CHAT)))
        asking.start()
        time.sleep(1.5)
        assert answers == []
        with engine(ports[1]):
            asking.join()
    assert [(one.status, one.body.get("port")) for one in answers] == [(200, ports[1])]
