"""The result of a run as one JSON document, and the folder in which it is kept.

The document's shape is a contract: `schema_version` rises when a name or a meaning changes. Unknown is null, and a
reason stands beside it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpuready.benchmark import measures
from gpuready.benchmark.load import BUSY_CPU_SHARE, BUSY_LAG_MS, LevelRun
from gpuready.benchmark.settings import Settings
from gpuready.outcome import Failure, Refusal

SCHEMA = "gpuready.benchmark"
SCHEMA_VERSION = 1
RESULT, ROWS, PAGE = "result.json", "requests.jsonl", "report.html"
BURSTS_NOTED = 0.1
CACHED_NOTED = 0.05
SIMULATED_MODELS = "gpuready-sim/"
SIMULATED_NOTE = (
    "This server is simulated (stack cpu): a tiny model on a CPU. Its numbers say that the path works, and nothing "
    "about a GPU."
)


@dataclass
class Measured:
    """Everything that a run brought: what the document holds, and the rows it was computed from."""

    settings: Settings
    model: str
    server: dict[str, Any]
    workload: dict[str, Any]
    started_at: datetime
    ended_at: datetime | None = None
    levels: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[int, list[measures.Row]] = field(default_factory=dict)
    """By concurrency."""
    notes: list[str] = field(default_factory=list)

    @property
    def simulated(self) -> bool:
        """Return whether the server is known to be a simulated one."""
        return self.settings.simulated or self.model.startswith(SIMULATED_MODELS)

    @property
    def interrupted(self) -> bool:
        """It ended before all levels were measured as asked."""
        return any(level["interrupted"] for level in self.levels) or len(self.levels) < len(self.settings.levels)

    def count(self, what: str) -> int:
        """Return a count of requests over all levels: asked, succeeded, failed, given_up."""
        return sum(level["requests"][what] for level in self.levels)

    @property
    def failed_percent(self) -> float:
        """Return the share of ended requests that failed, in percent."""
        ended = self.count("succeeded") + self.count("failed")
        return 100 * self.count("failed") / ended if ended else 0.0

    @property
    def verdict(self) -> str:
        """Return measured, or failed where more requests did than is allowed, or interrupted."""
        if self.failed_percent > self.settings.max_failed_percent:
            return "failed"
        return "interrupted" if self.interrupted else "measured"

    def as_dict(self) -> dict[str, Any]:
        """Return the document."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "server": {**self.server, "simulated": self.simulated},
            "started_at": utc(self.started_at),
            "ended_at": utc(self.ended_at) if self.ended_at else None,
            "verdict": self.verdict,
            "failed_percent": round(self.failed_percent, 3),
            "notes": [*([SIMULATED_NOTE] if self.simulated else []), *self.notes, *observations(self)],
            "arguments": self.settings.as_dict(),
            "workload": self.workload,
            "method": {
                "load": "closed loop",
                "percentiles": measures.PERCENTILE_METHOD,
                "times_of_rows": "seconds since the level began, by one monotonic clock",
            },
            "levels": self.levels,
            "rows": ROWS,
            "client": client_versions(),
        }


def level_page(run: LevelRun, started_at: datetime, output_tokens: int, warmup: Mapping[str, int]) -> dict[str, Any]:
    """Return the page of one level."""
    failed = sum(row.problem is not None for row in run.rows)
    return {
        "concurrency": run.concurrency,
        "started_at": utc(started_at),
        "interrupted": run.interrupted,
        "requests": {
            "asked": run.asked,
            "succeeded": len(run.rows) - failed,
            "failed": failed,
            "given_up": run.asked - len(run.rows),
        },
        "warmup": dict(warmup),
        "errors": measures.errors(run.rows),
        "throughput": measures.throughput(run.concurrency, run.rows, run.first_idle, run.interrupted),
        "first_idle_seconds": run.first_idle,
        **measures.latencies(run.rows),
        "tokens": measures.tokens(run.rows, output_tokens),
        "connections": {
            "reused": sum(row.reused_connection is True for row in run.rows),
            "new": sum(row.reused_connection is False for row in run.rows),
        },
        "client": run.client.as_dict(),
    }


def observations(measured: Measured) -> list[str]:
    """Return in sentences what a reader must know before believing the numbers."""
    levels, found = measured.levels, []
    if failed := measured.count("failed"):
        kinds = ", ".join(sorted({error["kind"] for level in levels for error in level["errors"]}))
        found.append(
            f"{failed} of {measured.count('succeeded') + failed} requests failed ({kinds}); latencies and rates are "
            "those of the others."
        )
    if measured.verdict == "failed":
        found.append(
            f"This run counts as failed: {measured.failed_percent:.1f} % of its requests failed, "
            f"{measured.settings.max_failed_percent:g} % are allowed."
        )
    if measured.interrupted:
        found.append(
            f"The run ended early: {len(levels)} of {len(measured.settings.levels)} levels were begun, "
            f"{measured.count('succeeded') + failed} of {measured.count('asked')} requests of these ended."
        )
    if without := sum(level["tokens"]["requests_without_usage"] for level in levels):
        found.append(f"The server reported no usage for {without} requests: their output tokens are unknown, not 0.")
    for holds, sentence in _level_remarks(measured.settings.output_tokens):
        if at := ", ".join(str(level["concurrency"]) for level in levels if holds(level)):
            found.append(f"At concurrency {at} {sentence}.")
    if measured.settings.insecure:
        found.append("The server's certificate was not checked (--insecure).")
    return found


def _level_remarks(output_tokens: int) -> list[tuple[Callable[[Mapping[str, Any]], bool], str]]:
    """Return what can be remarked on a level: when it holds, and the sentence that follows where."""
    return [
        (
            lambda level: bool({level["tokens"]["output_min"], level["tokens"]["output_max"]} - {None, output_tokens}),
            f"not every answer has the {output_tokens} tokens that were asked for",
        ),
        (
            lambda level: (level["tokens"]["cached_share"] or 0) > CACHED_NOTED,
            "the server took part of the prompts from its prefix cache: time to first token is flattered",
        ),
        (
            lambda level: (level["tokens"]["chunks_together_share"] or 0) > BURSTS_NOTED,
            f"over {BURSTS_NOTED * 100:.0f} % of the chunks came together with the one before: they were sent in "
            "bursts, or read late by a busy client, so time per output token says more than inter-token latency",
        ),
        (
            lambda level: bool(level["client"]["busy"]),
            f"this client was busy (over {BUSY_CPU_SHARE * 100:.0f} % of a core, or its event loop over "
            f"{BUSY_LAG_MS:g} ms late): these latencies may be its own",
        ),
    ]


def client_versions() -> dict[str, str]:
    """Return what measured: versions and the machine's kind."""
    packages = {name: importlib.metadata.version(name) for name in ("gpuready", "aiohttp")}
    return {**packages, "python": platform.python_version(), "system": platform.platform()}


def utc(moment: datetime) -> str:
    """Return a time as the report writes it."""
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Folder:
    """The folder of one run. It is made before anything is measured, so that no measurement is lost to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        taken = [name for name in (RESULT, ROWS, PAGE) if (path / name).exists()]
        if taken:
            raise Refusal(_folder_failure(path, f"holds a result already ({taken[0]})", "name another folder"))
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise Refusal(
                _folder_failure(path, f"cannot be written: {error.strerror}", "name a folder of yours")
            ) from error

    def write(self, measured: Measured, page: str) -> None:
        """Write the rows, the page and, last, the document; each whole or not at all.

        Raises:
            Refusal: naming what the system says.
        """
        rows = "".join(
            json.dumps({"concurrency": level, **row.as_dict()}) + "\n"
            for level, rows in measured.rows.items()
            for row in rows
        )
        document = json.dumps(measured.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            for name, text in ((ROWS, rows), (PAGE, page), (RESULT, document)):
                _write_whole(self.path / name, text)
        except OSError as error:
            raise Refusal(
                _folder_failure(self.path, f"cannot be written: {error.strerror}", "make room and measure again")
            ) from error

    def remove_if_empty(self) -> None:
        """Leave no empty folder behind a run that measured nothing."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def read_rows(path: Path) -> Iterator[tuple[int, measures.Row]]:
    """Yield concurrency and row of every request in a requests.jsonl."""
    for line in path.read_text(encoding="utf-8").splitlines():
        page = json.loads(line)
        yield page.pop("concurrency"), measures.Row.from_dict(page)


def _write_whole(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        temporary = Path(file.name)
    try:
        # A server's text may hold half a surrogate pair, which UTF-8 cannot.
        temporary.write_bytes(text.encode("utf-8", errors="replace"))
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _folder_failure(path: Path, why: str, fix: str) -> Failure:
    return Failure("benchmark.folder", f"--out {path}", why, fix)
