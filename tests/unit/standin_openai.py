"""A stand-in of an OpenAI server: it sends exactly the bytes that a test asks for, piece by piece, by the test's clock.

Before each piece the clock moves on by the piece's delay, and the next piece is sent only after the client has looked
at the clock, so every time that the client sees is known beforehand and nothing depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "standin/model"


class StandinClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._looked = asyncio.Event()

    def __call__(self) -> float:
        self._looked.set()
        return self.now

    async def move(self, seconds: float) -> None:
        self.now += seconds
        self._looked.clear()

    async def until_looked_at(self) -> None:
        await asyncio.wait_for(self._looked.wait(), 10)


@dataclass
class Answer:
    """What is sent back: pieces of the body, each with the seconds before it."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream; charset=utf-8"})
    end: str = "whole"
    """whole: as HTTP says; cut: the connection is reset after the last piece; silent: nothing more is ever sent."""


def event(page: Any) -> bytes:
    return f"data: {page if isinstance(page, str) else json.dumps(page, ensure_ascii=False)}\n\n".encode()


def delta(finish_reason: str | None = None, **what: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": what, "finish_reason": finish_reason}], "usage": None})


def usage(prompt: int, output: int, **more: Any) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **more}})


DONE = event("[DONE]")


def stream(*texts: str, prompt: int = 7, output: int | None = None, gap: float = 0.010) -> Answer:
    """A well-behaved answer as vLLM sends it: the role alone, the texts, the reason, the usage, [DONE]."""
    pieces = [(0.001, delta(role="assistant", content=""))]
    pieces += [(gap, delta(content=text)) for text in texts]
    pieces += [(0.0, delta("length")), (0.0, usage(prompt, len(texts) if output is None else output)), (0.0, DONE)]
    return Answer(pieces)


def refusal(status: int, message: str, **headers: str) -> Answer:
    body = json.dumps({"error": {"message": message, "type": "x", "code": status}}).encode()
    return Answer([(0.0, body)], status, {"Content-Type": "application/json", **headers})


def listing(*names: str, **more: Any) -> Answer:
    body = json.dumps({"object": "list", "data": [{"id": name, "object": "model", **more} for name in names]})
    return Answer([(0.0, body.encode())], 200, {"Content-Type": "application/json"})


class StandinServer:
    """Answers by what `chat` returns for a request's body; `models` is what /v1/models says."""

    def __init__(self, chat: Callable[[dict[str, Any]], Answer], clock: StandinClock | None = None) -> None:
        self.chat = chat
        self.clock = clock
        self.models = listing(MODEL)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.connections = 0
        self.url = ""
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client, or the test, is done
        finally:
            self._open.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first = await reader.readexactly(1)
        if first == b"\x16":  # the beginning of a TLS handshake
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            return False
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        method, path, _ = head.split("\r\n", 1)[0].split(" ")
        if method == "GET":
            answer = self.models if path == "/v1/models" else refusal(404, "no such path")
            return await self._send(writer, answer, by_clock=False)
        lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
        body = json.loads(await reader.readexactly(int(lengths[0])))
        self.asked.append(body)
        return await self._send(writer, self.chat(body), by_clock=True)

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer, *, by_clock: bool) -> bool:
        headers = {**answer.headers, "Transfer-Encoding": "chunked"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {answer.status} Stand-in\r\n{lines}\r\n".encode())
        is_stream = answer.status == 200 and "event-stream" in headers.get("Content-Type", "")
        for delay, piece in answer.pieces:
            if self.clock and by_clock:
                await self.clock.move(delay)
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            if self.clock and by_clock and is_stream:
                await self.clock.until_looked_at()
        if answer.end == "cut":
            writer.transport.abort()
            return False
        if answer.end == "silent":
            await asyncio.Event().wait()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def hang_up(self) -> None:
        for writer in self._open:
            writer.transport.abort()


@asynccontextmanager
async def standing_in(
    chat: Callable[[dict[str, Any]], Answer], clock: StandinClock | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[StandinServer]:
    """A stand-in that listens on loopback."""
    server = StandinServer(chat, clock)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        server.hang_up()
