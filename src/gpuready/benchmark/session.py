"""One run from beginning to end: find the model, fit the prompts, warm up, measure level after level."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping
from datetime import datetime, timezone
from typing import Any, Protocol, TypeVar

from gpuready.benchmark import report
from gpuready.benchmark.client import Client, Reply, Request
from gpuready.benchmark.load import LevelRun, closed_loop
from gpuready.benchmark.measures import Problem, Row
from gpuready.benchmark.report import Measured
from gpuready.benchmark.settings import Settings
from gpuready.benchmark.workload import Calibration, Workload, calibrate, prompt
from gpuready.outcome import Failed, Failure, MachineCannot, Refusal

PROBE_WORDS = (8, 72)
WARMUP_OUTPUT_TOKENS = 16
_UNREACHABLE = ("connect", "timeout", "tls", "address", "transport", "cut")
T = TypeVar("T")


class Interrupted(Exception):
    """It was stopped before anything was measured."""


class Progress(Protocol):
    """Where a run tells how far it is."""

    def say(self, sentence: str) -> None:
        """Take one sentence."""

    def begin(self, level: int, requests: int) -> None:
        """Take that a level begins."""

    def advance(self) -> None:
        """Take that a request ended."""

    def end(self, page: Mapping[str, Any]) -> None:
        """Take that a level ended, with its page."""


async def measure(client: Client, progress: Progress, stop: asyncio.Event) -> Measured:
    """Run a benchmark. After `stop` is set, what was measured until then is returned.

    Raises:
        Interrupted: when it was stopped before the first level.
        Refusal: when the server cannot be measured so; MachineCannot: when it cannot be reached or lacks the model.
    """
    settings = client.settings
    started_at = datetime.now(timezone.utc)
    served, notes = await _unless_stopped(find_model(client), stop)
    client.model = served["id"]
    refuse_if_too_long(settings, served)
    version = await _unless_stopped(client.get("/version"), stop)
    calibration = await _unless_stopped(fit_prompts(client, notes), stop)
    workload = Workload(settings.seed, calibration.words_for(settings.prompt_tokens), settings.output_tokens)
    alone = await _unless_stopped(ask_once(client, workload.prompt("alone", 0), settings.output_tokens), stop)
    progress.say(estimate(settings, alone.e2el))
    server = {
        "url": settings.url,
        "max_model_len": served.get("max_model_len"),
        "owned_by": served.get("owned_by"),
        "version": _version(version),
    }
    measured = Measured(settings, client.model, server, _workload_page(client, workload, calibration), started_at)
    measured.notes = notes
    for level in settings.levels:
        if stop.is_set():
            break
        run = await measure_level(client, workload, level, measured, progress, stop)
        if run.rows and all(row.problem for row in run.rows) and not run.interrupted and level != settings.levels[-1]:
            notes.append(f"At concurrency {level} every request failed, so higher levels were not tried.")
            break
    measured.ended_at = datetime.now(timezone.utc)
    return measured


async def measure_level(
    client: Client, workload: Workload, level: int, measured: Measured, progress: Progress, stop: asyncio.Event
) -> LevelRun:
    """Warm up for one level, then measure it; enter it into `measured`."""
    settings = client.settings
    asked = settings.requests_at(level)
    progress.begin(level, asked)
    warm_tokens = min(WARMUP_OUTPUT_TOKENS, settings.output_tokens)
    warmups = [
        Request(index, workload.prompt(f"warm-up {level}", index), warm_tokens)
        for index in range(settings.warmup_at(level))
    ]
    warm = await closed_loop(level, warmups, client.send, stop)
    requests = [
        Request(index, workload.prompt(f"level {level}", index), settings.output_tokens) for index in range(asked)
    ]
    began, started_at = client.clock(), datetime.now(timezone.utc)
    run = await closed_loop(level, requests, client.send, stop, lambda _: progress.advance(), client.clock)
    _count_from(began, run)
    counts = {"requests": len(warm.rows), "failed": sum(row.problem is not None for row in warm.rows)}
    page = report.level_page(run, started_at, settings.output_tokens, counts)
    measured.levels.append(page)
    measured.rows[level] = run.rows
    progress.end(page)
    return run


def _count_from(began: float, run: LevelRun) -> None:
    """Make the times of a level count from its beginning, in microseconds: a monotonic clock's zero says nothing."""

    def since(moment: float) -> float:
        return round(moment - began, 6)

    run.first_idle = None if run.first_idle is None else since(run.first_idle)
    for row in run.rows:
        row.sent, row.ended = since(row.sent), since(row.ended)
        row.chunks = [since(chunk) for chunk in row.chunks]


async def find_model(client: Client) -> tuple[dict[str, Any], list[str]]:
    """Return the entry of the model to measure from the server's list, and notes on the way to it."""
    settings = client.settings
    reply = await client.get("/v1/models")
    if reply.status is None or reply.status in (401, 403):
        raise _cannot(client, _problem(reply))
    data = reply.page.get("data") if isinstance(reply.page, dict) else None
    listed = [
        one
        for one in (data if isinstance(data, list) else [])
        if isinstance(one, dict) and isinstance(one.get("id"), str)
    ]
    if reply.status != 200 or reply.problem or not listed:
        seen = _problem(reply).message if reply.status != 200 or reply.problem else "the list is empty"
        if settings.model is None or reply.status == 200:
            raise MachineCannot(
                Failure(
                    "benchmark.no_models", f"{settings.url}/v1/models lists no model", seen, "see that it serves one"
                )
            )
        return {"id": settings.model}, [f"The server lists no models ({seen}); the model was asked for by its name."]
    names = ", ".join(repr(one["id"]) for one in listed[:8])
    if settings.model is None and len(listed) > 1:
        raise Refusal(
            Failure(
                "benchmark.model", f"{settings.url} lists {len(listed)} models", "", f"name one with --model: {names}"
            )
        )
    for one in listed:
        if settings.model in (None, one["id"]):
            return one, []
    raise MachineCannot(
        Failure("benchmark.model", f"{settings.url} lists no model {settings.model!r}", "", f"it lists {names}")
    )


def refuse_if_too_long(settings: Settings, served: Mapping[str, Any]) -> None:
    """Refuse prompts and answers that together are longer than the server allows, where it says so."""
    limit, wanted = served.get("max_model_len"), settings.prompt_tokens + settings.output_tokens
    if isinstance(limit, int) and wanted > limit:
        raise Refusal(
            Failure(
                "benchmark.too_long",
                f"--prompt-tokens {settings.prompt_tokens} and --output-tokens {settings.output_tokens} are {wanted}",
                f"the server's max_model_len is {limit}",
                "ask for less",
            )
        )


async def fit_prompts(client: Client, notes: list[str]) -> Calibration:
    """Learn from two short requests how many tokens a word is, and whether the server takes ignore_eos."""
    counted = []
    for words in PROBE_WORDS:
        row = await ask_once(client, prompt(client.settings.seed, f"probe/{words}", words), 1)
        counted.append((words, row.prompt_tokens))
    if not client.ignore_eos:
        notes.append("The server refused ignore_eos, so answers may be shorter than asked for.")
    found = calibrate(counted)
    wanted = client.settings.prompt_tokens
    if not found.measured:
        notes.append(
            f"The server does not say how long prompts are; {found.tokens_per_word} tokens per word are assumed."
        )
    elif wanted < found.overhead_tokens + found.tokens_per_word:
        notes.append(
            f"Prompts are longer than {wanted} tokens: the chat template alone is about {found.overhead_tokens:.0f}."
        )
    return found


async def ask_once(client: Client, text: str, output_tokens: int) -> Row:
    """Ask for one answer that must succeed; where the server refuses ignore_eos go on without it."""
    row = await client.send(Request(0, text, output_tokens))
    refused = row.problem is not None and row.problem.kind in ("http_400", "http_422")
    if refused and client.ignore_eos and "ignore_eos" in (row.problem.message if row.problem else ""):
        client.ignore_eos = False
        row = await client.send(Request(0, text, output_tokens))
    # One token may be half a letter, which an engine keeps back.
    if row.problem and not (row.problem.kind == "empty" and output_tokens == 1):
        raise _cannot(client, row.problem)
    return row


def estimate(settings: Settings, alone_seconds: float) -> str:
    """Return how long the run will take at least, from one request alone."""
    rounds = sum(math.ceil(settings.requests_at(level) / level) for level in settings.levels)
    total = sum(settings.requests_at(level) for level in settings.levels)
    return (
        f"{total} requests at concurrency {', '.join(map(str, settings.levels))}: one alone took "
        f"{alone_seconds:.2f} s, so this takes at least {spoken(rounds * alone_seconds)}, "
        "more where the server slows down under load."
    )


def spoken(seconds: float) -> str:
    """Return a duration as people say it."""
    return f"{max(1, round(seconds))} s" if seconds < 120 else f"{round(seconds / 60)} min"


def _workload_page(client: Client, workload: Workload, calibration: Calibration) -> dict[str, Any]:
    return {
        "prompt_tokens_wanted": client.settings.prompt_tokens,
        "output_tokens_wanted": client.settings.output_tokens,
        "words_per_prompt": workload.words,
        "tokens_per_word": calibration.tokens_per_word,
        "template_tokens": calibration.overhead_tokens if calibration.measured else None,
        "calibrated": calibration.measured,
        "ignore_eos": client.ignore_eos,
        "temperature": 0,
        "warmup_output_tokens": min(WARMUP_OUTPUT_TOKENS, client.settings.output_tokens),
    }


def _version(reply: Reply) -> str | None:
    page = reply.page if reply.status == 200 and isinstance(reply.page, dict) else {}
    return page["version"] if isinstance(page.get("version"), str) else None


def _problem(reply: Reply) -> Problem:
    return reply.problem or Problem(f"http_{reply.status}", f"it is answered {reply.status}")


def _cannot(client: Client, problem: Problem) -> Refusal:
    """Return why a server cannot be measured, as the refusal with the right exit code."""
    url = client.settings.url
    if problem.kind in ("http_401", "http_403"):
        fix = "give the right one with --api-key-file" if client.settings.api_key else "give one with --api-key-file"
        return MachineCannot(Failure("benchmark.key", f"{url} wants an API key", problem.message, fix))
    if problem.kind in _UNREACHABLE:
        return MachineCannot(Failure("benchmark.unreachable", f"{url} cannot be measured", problem.message))
    if problem.kind == "http_404":
        return MachineCannot(Failure("benchmark.model", f"{url} does not serve {client.model!r}", problem.message))
    return Failed(Failure("benchmark.first_request", f"the first request to {url} failed", problem.message))


async def _unless_stopped(work: Awaitable[T], stop: asyncio.Event) -> T:
    """Return what the work returns.

    Raises:
        Interrupted: when `stop` is set before.
    """
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted
        return task.result()
    finally:
        task.cancel()
        stopping.cancel()
