"""The table at the end of a run: host, stage, changed, seconds, problem, next step."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuready.outcome import Failure, mask, visible

GO_ON = "repair that and run the same command again: it goes on where it stopped"
STAGES_SHOWN_UP_TO = 4
"""Up to so many hosts every stage has a row of its own; beyond, a host has one."""
QUIET_HOSTS_SHOWN_UP_TO = 20
"""Beyond so many, hosts without a change or a problem share one row."""
CELL = 160
"""Characters of a problem, and of what to do, that the table shows."""
WIDE = 4000
"""Not on a terminal: wide enough that no line is broken."""


@dataclass
class Row:
    """One stage on one host."""

    host: str
    stage: str
    changed: int = 0
    undecided: int = 0
    """What `--check` cannot know before something is installed."""
    tasks: int = 0
    seconds: float = 0.0
    problem: str = ""
    next_step: str = ""


@dataclass
class Summary:
    """What a run came to; tasks are told in the order in which they end."""

    check: bool = False
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def row(self, host: str, stage: str) -> Row:
        """Return the row of a stage on a host."""
        return self.rows.setdefault((host, stage), Row(host, stage))

    def ended(self, host: str, stage: str, seconds: float, result: Mapping[str, Any]) -> None:
        """Count a task that ended well."""
        row = self.row(host, stage)
        row.tasks += 1
        row.seconds += seconds
        row.changed += bool(result.get("changed"))
        row.undecided += len(result.get("undecided") or [])

    def failed(self, host: str, stage: str, seconds: float, result: Mapping[str, Any]) -> None:
        """Count a task that failed, with its problem and what to do."""
        self.ended(host, stage, seconds, result)
        row = self.row(host, stage)
        row.problem, row.next_step = problem_of(result)

    def recovered(self, host: str, stage: str) -> None:
        """Forget a problem that the play itself dealt with."""
        row = self.row(host, stage)
        row.problem = row.next_step = ""

    def next_command(self) -> str:
        """Return the command that proves what this run changed; empty where there is nothing to prove."""
        hosts = dict.fromkeys(row.host for row in self.rows.values())
        bad = {row.host for row in self.rows.values() if row.problem}
        changed = {row.host for row in self.rows.values() if row.changed} - bad
        if self.check or not changed:
            return ""
        limit = "" if changed == set(hosts) else f" -l {','.join(host for host in hosts if host in changed)}"
        return f"ansible-playbook playbooks/verify.yml{limit}"

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for machines."""
        return {"check": self.check, "rows": [asdict(row) for row in self.rows.values()]}


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Return what a failed task says, one sentence each."""
    loop = [one for one in result.get("results") or [] if one.get("failed") or one.get("unreachable")]
    if loop:
        return sentences(loop[0])
    said = str(result.get("msg") or result.get("reason") or "").strip().removeprefix("Task failed: ")
    return [line.strip() for line in said.splitlines() if line.strip()] or ["failed without a word"]


def problem_of(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the first problem that a failed task names, and what to do about it."""
    failures = result.get("failures") or []
    if not failures:
        said = sentences(result)
        # Our sentences end with what to do: see Failure.sentence.
        what, _, to_do = said[0].rpartition("; ")
        return _and_more(what or to_do, len(said)), (to_do.rstrip(".") if what else GO_ON)
    first = failures[0]
    what = Failure(first["code"], first["what"], first.get("why", "")).sentence().rstrip(".")
    return _and_more(what, len(failures)), visible(mask(first.get("fix") or GO_ON))


def _and_more(text: str, count: int) -> str:
    return f"{text} (and {count - 1} more, above)" if count > 1 else text


def table_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are shown: every stage for few hosts, one row per host for many."""
    by_host: dict[str, list[Row]] = {}
    for row in rows:
        by_host.setdefault(row.host, []).append(row)
    if len(by_host) <= STAGES_SHOWN_UP_TO:
        return [row for stages in by_host.values() for row in stages]
    hosts = [_of_host(stages) for stages in by_host.values()]
    quiet = [row for row in hosts if not row.problem and not row.changed and not row.undecided]
    if len(quiet) <= QUIET_HOSTS_SHOWN_UP_TO:
        return hosts
    together = Row(f"{len(quiet)} others", quiet[0].stage, seconds=max(row.seconds for row in quiet))
    return [*(row for row in hosts if row not in quiet), together]


def _of_host(stages: Sequence[Row]) -> Row:
    """Return one row for a host: the stage that failed, or how many there were."""
    bad = next((row for row in stages if row.problem), None)
    word = bad.stage if bad else stages[0].stage if len(stages) == 1 else f"all {len(stages)}"
    return Row(
        stages[0].host,
        word,
        sum(row.changed for row in stages),
        sum(row.undecided for row in stages),
        sum(row.tasks for row in stages),
        sum(row.seconds for row in stages),
        bad.problem if bad else "",
        bad.next_step if bad else "",
    )


def short(text: str) -> str:
    """Return a text that leaves the table readable; the whole sentence stands above it."""
    return text if len(text) <= CELL else f"{text[: CELL - 1]}\u2026"


def render(summary: Summary, width: int | None, colour: bool) -> str:
    """Return the table as text; `width` is the terminal's, None where there is none."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("host", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("would change" if summary.check else "changed", justify="right", no_wrap=True)
    if summary.check:
        table.add_column("unknown", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("problem", overflow="fold")
    table.add_column("next step", overflow="fold")
    for row in table_rows(summary.rows.values()):
        style = "red" if row.problem else "yellow" if row.changed else "green"
        numbers = [str(row.changed), *([str(row.undecided)] if summary.check else []), f"{row.seconds:.1f}"]
        # Text, not str: rich reads brackets in strings as mark-up.
        cells = [row.host, row.stage, *numbers, short(row.problem) or "-", short(row.next_step) or "-"]
        table.add_row(*(Text(cell, style=style if colour else "") for cell in cells))
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or WIDE,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
