"""Asks a server over HTTP: which models it lists, and one streamed chat completion with its timings.

aiohttp, whose parser is compiled: the client must not be the slow part. Nothing is tried again and no redirect is
followed, so that each row is one request.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Protocol

import aiohttp

from gpuready.benchmark.events import DONE, EventReader, StreamProblem, error_sentence, read_chunk
from gpuready.benchmark.measures import Problem, Row
from gpuready.benchmark.settings import Settings

CONNECT_SECONDS = 10.0
SMALL_REQUEST_SECONDS = 30.0
# How long a server may take to close an answer after its last event; then its connection is given up.
END_SECONDS = 1.0
_MAX_PAGE_BYTES = 1024 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_UNREADABLE = "the answer is not HTTP as it should be"


@dataclass(frozen=True)
class Request:
    """What is asked of the server once."""

    index: int
    prompt: str
    output_tokens: int


class Sender(Protocol):
    """Sends one request and returns its row, whatever becomes of it."""

    async def __call__(self, request: Request) -> Row:
        """Send it."""


@dataclass(frozen=True)
class Reply:
    """A small answer: its status, its JSON, or why there is none."""

    status: int | None
    page: Any = None
    problem: Problem | None = None


class Client:
    """A pool of connections to one server, as many as there are requests in flight."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.perf_counter) -> None:
        self.settings = settings
        self.clock = clock
        self.model = settings.model or ""
        self.ignore_eos = True
        """vLLM's and SGLang's extension for answers of a fixed length; off where the server refuses it."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reused)
        tracing.on_connection_create_end.append(_note_new)
        # Compressed, several chunks would come as one.
        headers = {"Accept-Encoding": "identity"}
        if self.settings.api_key:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=_tls(self.settings)),
            headers=headers,
            trace_configs=[tracing],
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session:
            await self._session.close()

    async def get(self, path: str) -> Reply:
        """Ask for a small JSON page."""
        timeout = aiohttp.ClientTimeout(total=min(SMALL_REQUEST_SECONDS, self.settings.timeout_seconds))
        try:
            async with self._open.get(self.settings.url + path, timeout=timeout, allow_redirects=False) as response:
                body = await _beginning(response, _MAX_PAGE_BYTES)
                try:
                    return Reply(response.status, json.loads(body))
                except ValueError:
                    return Reply(response.status, problem=Problem("not_json", f"{path} is not JSON: {body[:80]!r}"))
        except (aiohttp.ClientError, OSError) as error:
            return Reply(None, problem=_transport_problem(error, timeout.total or 0, "before the answer"))

    async def send(self, request: Request) -> Row:
        """Ask for one streamed completion; every failure is a row with a problem."""
        trace = SimpleNamespace(reused=None)
        row = Row(request.index, sent=self.clock(), ended=0.0)
        try:
            async with self._open.post(
                f"{self.settings.url}/v1/chat/completions",
                json=self._body(request),
                timeout=aiohttp.ClientTimeout(total=self.settings.timeout_seconds, sock_connect=CONNECT_SECONDS),
                allow_redirects=False,
                trace_request_ctx=trace,
            ) as response:
                row.problem = await self._read(response, row)
        except StreamProblem as problem:
            row.problem = Problem("not_a_stream", str(problem))
        except (aiohttp.ClientError, OSError) as error:
            stage = "in the middle of the answer" if row.chunks else "before the first token"
            row.problem = _transport_problem(error, self.settings.timeout_seconds, stage)
        if row.problem or not row.ended:
            row.ended = self.clock()
        row.reused_connection = trace.reused
        return row

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is used outside its `async with`"  # noqa: S101 - our own mistake
        return self._session

    def _body(self, request: Request) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {**body, "ignore_eos": True} if self.ignore_eos else body

    async def _read(self, response: aiohttp.ClientResponse, row: Row) -> Problem | None:
        """Read the answer into the row; return what is wrong with it."""
        if response.status != 200:
            return await _http_problem(response)
        if response.content_type != "text/event-stream":
            start = (await _beginning(response, 120)).decode(errors="replace")
            return Problem("not_a_stream", f"the answer is {response.content_type}, not text/event-stream: {start!r}")
        reader = EventReader()
        async for piece in response.content.iter_any():
            now = self.clock()
            for data in reader.feed(piece):
                if data == DONE:
                    await _read_to_the_end(response)
                    return _judge(row, done=True)
                if problem := _take(row, data, now):
                    return problem
        for data in reader.close():
            if data != DONE and (problem := _take(row, data, self.clock())):
                return problem
        return _judge(row, done=False)


def _take(row: Row, data: str, now: float) -> Problem | None:
    """Enter one event into the row."""
    chunk = read_chunk(data)
    if chunk.error:
        return Problem("error_in_stream", f"the server says within the stream: {chunk.error}")
    if chunk.has_choice:
        row.ended = now
    if chunk.has_text:
        row.chunks.append(now)
        row.reasoning_chunks += chunk.is_reasoning
    row.finish_reason = chunk.finish_reason or row.finish_reason
    if chunk.usage:
        row.prompt_tokens = chunk.usage.prompt_tokens
        row.output_tokens = chunk.usage.output_tokens
        row.cached_tokens = chunk.usage.cached_tokens
    return None


def _judge(row: Row, done: bool) -> Problem | None:
    """Return why a stream that ended is no whole answer; None when it is one."""
    if row.finish_reason == "abort":
        return Problem(
            "aborted", "the server ended the answer early (finish_reason abort), as an engine that shuts down"
        )
    if not done and row.finish_reason is None:
        return Problem("cut", f"the stream ended after {len(row.chunks)} chunks, without finish_reason and [DONE]")
    if not row.chunks:
        return Problem("empty", "the stream ended well but held no generated text")
    return None


async def _beginning(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return an answer's body, but no more than `most` bytes of it."""
    body = b""
    async for piece in response.content.iter_any():
        body += piece
        if len(body) >= most:
            break
    return body[:most]


async def _read_to_the_end(response: aiohttp.ClientResponse) -> None:
    """Let the server close its answer, so that the connection can be used again."""
    try:
        await asyncio.wait_for(response.content.read(), END_SECONDS)
    except (aiohttp.ClientError, OSError):
        response.close()


async def _http_problem(response: aiohttp.ClientResponse) -> Problem:
    body = (await _beginning(response, _MAX_ERROR_BYTES)).decode(errors="replace")
    try:
        said = error_sentence(json.loads(body))
    except ValueError:
        said = " ".join(body.split())[:120]
    wait = response.headers.get("Retry-After")
    later = f" (Retry-After: {wait[:40]})" if wait else ""
    where = f"{response.method} {response.url.path}"
    return Problem(f"http_{response.status}", f"{where} is answered {response.status}: {said or 'nothing'}{later}")


def _transport_problem(error: Exception, timeout_seconds: float, stage: str) -> Problem:
    # aiohttp's connection time-out is a ServerTimeoutError, which is a TimeoutError as well.
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Problem("connect", f"no connection within {min(CONNECT_SECONDS, timeout_seconds):g} s")
    if isinstance(error, TimeoutError):
        return Problem("timeout", f"no whole answer within {timeout_seconds:g} s; it ran out {stage}")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return Problem("tls", f"the server's certificate is not trusted: {error.certificate_error}")
    if isinstance(error, aiohttp.ClientSSLError):
        return Problem("tls", f"TLS cannot be agreed on: {error}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Problem("connect", f"no connection to {error.host}:{error.port}: {error.os_error.strerror or error}")
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionError):
        return Problem("cut", f"the connection was cut {stage}")
    if isinstance(error, aiohttp.InvalidURL):
        return Problem("address", f"{error} is not an address that can be asked")
    return Problem("transport", f"{_UNREADABLE}, {stage}: {' '.join(str(error).split())[:200] or type(error).__name__}")


def _tls(settings: Settings) -> ssl.SSLContext | bool:
    if not settings.url.startswith("https:"):
        return True
    if settings.insecure:
        return False
    return ssl.create_default_context(cafile=settings.ca_file) if settings.ca_file else True


async def _note_reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:  # noqa: ARG001
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


async def _note_new(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:  # noqa: ARG001
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = False
