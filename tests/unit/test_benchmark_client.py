"""The benchmark's client against a real HTTP server on loopback, which sends what the test wants and when it wants."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.unit.standin_openai import (
    DONE,
    MODEL,
    Answer,
    StandinClock,
    StandinServer,
    delta,
    event,
    refusal,
    standing_in,
    stream,
    usage,
)

from gpuready.benchmark.client import Client, Request
from gpuready.benchmark.measures import Row
from gpuready.benchmark.settings import Settings

ROLE, FINISH = delta(role="assistant", content=""), delta("length")


def send(answer: Answer, count: int = 1, **more: Any) -> tuple[list[Row], StandinServer]:
    """Send requests one after another to a server that gives this answer; return the rows."""

    async def run() -> tuple[list[Row], StandinServer]:
        clock = StandinClock()
        async with standing_in(lambda _: answer, clock) as server:
            found = replace(Settings(server.url, seed=1, model=MODEL), **more)
            async with Client(found, clock) as client:
                rows = [await client.send(Request(index, "one two", 5)) for index in range(count)]
        return rows, server

    return asyncio.run(run())


def one(answer: Answer, **more: Any) -> Row:
    return send(answer, **more)[0][0]


def problem(answer: Answer, **more: Any) -> tuple[str, str]:
    row = one(answer, **more)
    assert row.problem is not None
    return row.problem.kind, row.problem.message


def ms(seconds: float | None) -> float:
    assert seconds is not None
    return round(seconds * 1000, 3)


def test_times_of_a_well_behaved_stream() -> None:
    row = one(stream("a", "b", "c", prompt=7, output=5, gap=0.010))
    assert row.problem is None
    # The role came after 1 ms and is no token; the texts after 10 ms each; the last chunk right after.
    assert ms(row.ttft) == 11.0
    assert [ms(gap) for gap in row.gaps] == [10.0, 10.0]
    assert ms(row.e2el) == 31.0
    assert ms(row.tpot) == 5.0
    assert (row.prompt_tokens, row.output_tokens, row.cached_tokens) == (7, 5, None)
    assert row.finish_reason == "length"


def test_an_answer_ends_with_its_last_chunk_not_with_what_the_server_counts_afterwards() -> None:
    row = one(Answer([(0.010, delta(content="a")), (0.010, FINISH), (0.010, usage(1, 3)), (0.010, DONE)]))
    assert row.problem is None
    assert ms(row.e2el) == 20.0
    assert ms(row.tpot) == 5.0


def test_a_failed_answer_ends_when_it_fails() -> None:
    row = one(Answer([(0.010, delta(content="a")), (0.010, event({"error": {"message": "out of memory"}}))]))
    assert row.problem is not None
    assert ms(row.e2el) == 20.0


def test_what_is_asked_of_the_server() -> None:
    _, server = send(stream("a"), api_key="sk-1")
    assert server.asked == [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "one two"}],
            "max_tokens": 5,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]
    assert "Authorization: Bearer sk-1\r\n" in server.headers[0]
    # Compressed, several chunks would come as one.
    assert "Accept-Encoding: identity\r\n" in server.headers[0]


def test_connections_are_used_again_and_the_rows_say_so() -> None:
    rows, server = send(stream("a"), count=3)
    assert [row.reused_connection for row in rows] == [False, True, True]
    assert server.connections == 1


@pytest.mark.parametrize("size", [1, 3, 16])
def test_events_and_letters_torn_over_many_packets(size: int) -> None:
    whole = b": keep-alive\n\n" + ROLE + delta(content="é€𝄞") + delta(content="日本") + FINISH + usage(3, 4) + DONE
    pieces = [(0.001, whole[start : start + size]) for start in range(0, len(whole), size)]
    row = one(Answer(pieces))
    assert row.problem is None
    assert len(row.chunks) == 2
    # A chunk has come when its last byte has: the place of its end in the bytes says in which packet.
    first = whole.index("é€𝄞".encode())
    end = whole.index(b"\n\n", first) + 1
    assert ms(row.ttft) == end // size + 1
    assert row.output_tokens == 4


def test_events_that_come_in_one_packet_have_one_time() -> None:
    row = one(Answer([(0.002, ROLE + delta(content="a") + delta(content="b")), (0.003, FINISH + usage(1, 2) + DONE)]))
    assert [ms(gap) for gap in row.gaps] == [0.0]
    assert ms(row.ttft) == 2.0
    assert ms(row.e2el) == 5.0


def test_reasoning_is_text_and_empty_pieces_are_not() -> None:
    row = one(
        Answer(
            [
                (0.001, ROLE),
                (0.001, delta(content="")),
                (0.001, delta(reasoning_content="hm")),
                (0.001, delta(content=None)),
                (0.001, delta(content="a")),
                (0.001, FINISH + usage(1, 2) + DONE),
            ]
        )
    )
    assert ms(row.ttft) == 3.0
    assert [ms(gap) for gap in row.gaps] == [2.0]
    assert row.reasoning_chunks == 1


def test_keep_alive_comments_are_no_tokens() -> None:
    row = one(Answer([(0.5, b": wait\n\n"), (0.5, b":\n"), (0.5, delta(content="a")), (0, FINISH + DONE)]))
    assert ms(row.ttft) == 1500.0
    assert len(row.chunks) == 1


def test_without_usage_tokens_are_unknown() -> None:
    row = one(Answer([(0.001, delta(content="a")), (0.001, FINISH), (0.001, DONE)]))
    assert row.problem is None
    assert (row.prompt_tokens, row.output_tokens, row.tpot) == (None, None, None)


@pytest.mark.parametrize("last", [FINISH, FINISH.rstrip(b"\n")])
def test_a_finished_stream_without_done_is_whole(last: bytes) -> None:
    row = one(Answer([(0.001, delta(content="a")), (0.001, last)]))
    assert row.problem is None
    assert row.finish_reason == "length"
    assert ms(row.e2el) == 2.0


def test_a_stream_that_just_ends_is_cut() -> None:
    kind, message = problem(Answer([(0.001, delta(content="a")), (0.001, delta(content="b"))]))
    assert (kind, message) == ("cut", "the stream ended after 2 chunks, without finish_reason and [DONE]")


@pytest.mark.parametrize(
    ("pieces", "stage"),
    [([(0.001, delta(content="a"))], "in the middle of the answer"), ([(0.001, ROLE)], "before the first token")],
)
def test_a_connection_that_is_reset_is_cut(pieces: list[tuple[float, bytes]], stage: str) -> None:
    assert problem(Answer(pieces, end="cut")) == ("cut", f"the connection was cut {stage}")


def test_a_silent_server_runs_into_the_timeout() -> None:
    kind, message = problem(Answer([(0.001, delta(content="a"))], end="silent"), timeout_seconds=0.2)
    assert kind == "timeout"
    assert message == "no whole answer within 0.2 s; it ran out in the middle of the answer"


def test_an_engine_that_shuts_down_gives_no_measurement() -> None:
    # vLLM ends its streams so on SIGTERM: HTTP 200, finish_reason abort and [DONE].
    kind, message = problem(Answer([(0.001, delta(content="a")), (0.001, delta("abort") + DONE)]))
    assert kind == "aborted"
    assert "finish_reason abort" in message


def test_an_error_within_the_stream() -> None:
    broken = event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
    kind, message = problem(Answer([(0.001, delta(content="a")), (0.001, broken + DONE)]))
    assert (kind, message) == (
        "error_in_stream",
        "the server says within the stream: EngineCore encountered an issue",
    )


def test_an_answer_without_text_is_empty() -> None:
    assert problem(Answer([(0.001, ROLE + FINISH + usage(1, 0) + DONE)]))[0] == "empty"


def test_what_is_no_stream_is_said_with_its_beginning() -> None:
    page = Answer([(0.0, b"<html>hello</html>")], headers={"Content-Type": "text/html"})
    kind, message = problem(page)
    assert kind == "not_a_stream"
    assert message == "the answer is text/html, not text/event-stream: '<html>hello</html>'"
    assert problem(Answer([(0.0, event("nonsense"))])) == ("not_a_stream", "an event is not JSON: 'nonsense'")


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (refusal(429, "slow down", **{"Retry-After": "3"}), "http_429", "429: slow down (Retry-After: 3)"),
        (refusal(500, "it broke"), "http_500", "POST /v1/chat/completions is answered 500: it broke"),
        (refusal(404, "The model is not served here"), "http_404", "404: The model is not served here"),
        (Answer([(0.0, b"<h1>Bad\nGateway</h1>")], 502), "http_502", "502: <h1>Bad Gateway</h1>"),
        (
            Answer([(0.0, b'{"error": {"mess'), (0.0, b'age": "in two pieces"}}')], 500),
            "http_500",
            "500: in two pieces",
        ),
        (Answer([], 503), "http_503", "503: nothing"),
        (Answer([], 302, {"Location": "http://127.0.0.1:1/"}), "http_302", "302: nothing"),
    ],
)
def test_http_errors_are_counted_by_status_and_say_the_servers_words(answer: Answer, kind: str, words: str) -> None:
    found, message = problem(answer)
    assert found == kind
    assert words in message


def test_a_closed_port_is_no_connection() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def run() -> Row:
        async with Client(Settings(f"http://127.0.0.1:{port}", seed=1, model=MODEL)) as client:
            return await client.send(Request(0, "one", 1))

    row = asyncio.run(run())
    assert row.problem is not None
    assert row.problem.kind == "connect"
    assert f"no connection to 127.0.0.1:{port}: " in row.problem.message
    assert row.ended >= row.sent


def test_plain_http_behind_https_is_said() -> None:
    async def run() -> Row:
        async with standing_in(lambda _: stream("a")) as server:
            found = Settings(server.url.replace("http:", "https:"), seed=1, model=MODEL)
            async with Client(found) as client:
                return await client.send(Request(0, "one", 1))

    row = asyncio.run(run())
    assert row.problem is not None
    assert row.problem.kind == "tls"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stand-in")])
    now = datetime.now(timezone.utc)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + signed.public_bytes(Encoding.PEM))
    return path


@pytest.mark.parametrize(("how", "kind"), [({}, "tls"), ({"ca_file": True}, None), ({"insecure": True}, None)], ids=str)
def test_a_certificate_is_checked_unless_told_otherwise(
    certificate: Path, how: dict[str, Any], kind: str | None
) -> None:
    more = {**how, "ca_file": certificate} if "ca_file" in how else how

    async def run() -> Row:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        async with standing_in(lambda _: stream("a"), tls=tls) as server:
            found = replace(Settings(server.url, seed=1, model=MODEL), **more)
            async with Client(found) as client:
                return await client.send(Request(0, "one", 1))

    row = asyncio.run(run())
    assert (row.problem.kind if row.problem else None) == kind
    if row.problem:
        assert row.problem.message.startswith("the server's certificate is not trusted: ")


def test_a_host_name_with_an_underscore_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def resolve(host: str, *words: Any, **more: Any) -> Any:
        return known("127.0.0.1" if host == "gpu_node_01" else host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def run() -> tuple[Row, str]:
        async with standing_in(lambda _: stream("a")) as server:
            found = Settings(server.url.replace("127.0.0.1", "gpu_node_01"), seed=1, model=MODEL)
            async with Client(found) as client:
                return await client.send(Request(0, "one", 1)), server.headers[0]

    row, head = asyncio.run(run())
    assert row.problem is None
    assert "Host: gpu_node_01:" in head


def test_small_pages() -> None:
    async def run() -> None:
        async with standing_in(lambda _: stream("a")) as server, Client(Settings(server.url, seed=1)) as client:
            found = await client.get("/v1/models")
            assert (found.status, found.page["data"][0]["id"]) == (200, MODEL)
            assert (await client.get("/version")).status == 404
            (_, body), *_ = server.models.pieces
            server.models.pieces = [(0.0, body[:9]), (0.0, body[9:20]), (0.0, body[20:])]
            assert (await client.get("/v1/models")).page == found.page
            server.models = Answer([(0.0, b"<html>")], 200, {"Content-Type": "text/html"})
            found = await client.get("/v1/models")
            assert found.problem is not None
            assert found.problem.message == "/v1/models is not JSON: b'<html>'"

    asyncio.run(run())
