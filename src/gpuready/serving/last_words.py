"""What an engine said itself before it ended: its own lines of the journal, and the line that tells the cause.

systemd and the steps of the unit speak in the same journal; a reader wants the engine's exception, and of several the
first: vLLM's server only repeats that its engine core failed.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from gpuready.serving import units

LINES = 400
SHOWN = 6
LONGEST_LINE = 400
STEPS = ("replica.", "internal: ", "machine.", "GPU ", "interrupted;")
NOT_READY = "replica.not_ready: "
_PREFIX = re.compile(
    r"^(\x1b\[[0-9;]*m)*(\([^()]*pid=\d+\)\s*)?(\x1b\[[0-9;]*m)*\s?"
    r"((ERROR|INFO|WARNING|CRITICAL|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?|\[\d{4}-\d\d-\d\d[^\]]*\] ?)?"
)
"""What vLLM ("(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:842] ") and SGLang ("[2026-11-30 10:00:00 TP0] ") set
before a line."""
_EXCEPTION = re.compile(
    r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Refused|NotFound|Unavailable|Warning)\b(: .*)?$"
)
_USAGE = re.compile(r"^[\w.-]+: error: .+")
_REPEATS = ("See root cause above", "See stack trace (above)", "initialization failed")
"""Said by a process that watches another one."""
_STEP = re.compile(r"^[a-z0-9-]+\.\d+ (starts on release|ended without a token|gave its first token)\b")


@dataclass(frozen=True)
class Words:
    """What was said."""

    cause: str
    """The line that tells the cause; empty where none does."""
    last: tuple[str, ...]
    """The engine's last lines."""
    verdict: str
    """What the step of the unit that waits for a token found; empty where it never came to that."""
    all: str = ""
    """All of the engine's lines."""

    def sentence(self) -> str:
        """Return the cause first, then the last lines."""
        ended = "its last lines: " + " | ".join(self.last) if self.last else ""
        return "; ".join(part for part in (self.cause and f"the engine says: {self.cause}", ended) if part)


def of_unit(unit: str, since: float) -> Words:
    """Return what the engine said that a unit started since then, in seconds of the epoch.

    The former engine, which a restart ends, speaks first.
    """
    units.sync_journal()
    words = ["journalctl", f"_SYSTEMD_UNIT={unit}", f"--since=@{since:.0f}", "--no-pager", "--output=json"]
    answer = subprocess.run([*words, f"--lines={LINES * 5}"], capture_output=True, text=True, check=False)
    lines = list(_messages(answer.stdout))
    begun = next((number for number, line in enumerate(lines) if _STEP.match(line) and "starts on" in line), 0)
    return of_lines(lines[begun:])


def _messages(text: str) -> Iterable[str]:
    for line in text.splitlines():
        try:
            message = json.loads(line).get("MESSAGE")
        except ValueError:
            continue
        if isinstance(message, list):
            # The journal gives what is not plain text as numbers of its bytes.
            message = bytes(message).decode(errors="replace")
        if isinstance(message, str):
            yield message


def of_lines(lines: Iterable[str]) -> Words:
    """Sort lines of a unit into the engine's and the steps' own."""
    own: list[str] = []
    verdict = ""
    for line in lines:
        if line.startswith(NOT_READY):
            verdict = verdict or _verdict(line)
        elif not (line.startswith(STEPS) or _STEP.match(line)):
            own.append(line)
    shown = [line[:LONGEST_LINE] for line in map(bare, own) if line.strip()]
    return Words(cause(own), tuple(shown[-SHOWN:]), verdict, "\n".join(own[-LINES:]))


def _verdict(line: str) -> str:
    """Return the reason from the sentence of the step, `replica.not_ready: chat.0 is not ready on release 2: why.`."""
    reason = line.removeprefix(NOT_READY).partition(" is not ready on release ")[2].partition(": ")[2]
    return reason.removesuffix(".").removesuffix("; see its journal")


def bare(line: str) -> str:
    """Return a line without what a logger sets before it."""
    return _PREFIX.sub("", line, count=1).rstrip()


def cause(lines: Iterable[str]) -> str:
    """Return the first exception that is not only a report of another one, or the words of a parser; else nothing."""
    texts = [bare(line) for line in lines]
    repeated = ""
    for number, text in enumerate(texts):
        stripped = text.strip()
        if not (_EXCEPTION.match(stripped) or _USAGE.match(stripped)):
            continue
        if any(one in stripped for one in _REPEATS):
            repeated = repeated or stripped
            continue
        # pydantic says on the lines that follow where it is and what it does not take.
        more = texts[number + 1 : number + 3] if "validation error" in stripped else []
        told = [one.strip() for one in more if one.strip() and not one.strip().startswith("For further information")]
        return " ".join([stripped, *told])[:LONGEST_LINE]
    return repeated[:LONGEST_LINE]
