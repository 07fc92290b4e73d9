"""The gateway's configuration, asked as a client does: a real HAProxy in front of an engine that is played."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.gateway_door import (
    LIMIT_KIB,
    MODELS,
    PATH,
    Answer,
    Door,
    engine,
    free_port,
    haproxy,
    in_form,
    needs_haproxy,
    render,
)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with engine() as port, haproxy(tmp_path_factory.mktemp("gateway"), port) as made:
        yield made


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
    assert servers(render(8080, 18100)["haproxy.cfg"]) == ["chat.0", "hold"]
    assert servers(render(8080, 18100, 18101)["haproxy.cfg"]) == ["chat.0", "chat.1", "hold"]


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
