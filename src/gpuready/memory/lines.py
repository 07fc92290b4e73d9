"""A log as it was written: without colours and prefixes, sorted by worker, and the last start alone.

Workers of one engine write through each other. A message or traceback of one is read in that worker's own stream, and
found again in the whole by its line.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpuready import catalog

LONGEST = 8_000_000
"""Characters of a log that are read, counted from its end; an engine's start is some hundred thousand."""
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\[(?:\d{1,2};)*\d{1,2}m")
_PREFIXES = (
    # journalctl, syslog: "Dec 01 05:00:00 host python[123]: ", "2025-12-01T05:00:00+0000 host python[1]: "
    re.compile(r"(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|\d{4}-\d\d-\d\dT[\d:.+Z-]+) \S+ [\w.@/()-]+(?:\[\d+\])?: ?"),
    # docker compose, kubectl: "vllm-1  | "
    re.compile(r"[\w.-]+\s+\| ?"),
    re.compile(r"\d{4}-\d\d-\d\d[T ][\d:.,]+Z? (?:stdout|stderr) [FP] "),
)
# The worker's own name: vLLM and Ray "(EngineCore_DP0 pid=1) ", SGLang "[2025-01-01 00:00:00 TP0] ", TensorRT-LLM
# "[12/01/2025-05:00:00] [TRT-LLM] [RANK 1] [E] ".
_TAGGED = re.compile(r"\((?P<name>[A-Za-z][\w-]*)(?: [\w=-]+)*? pid=(?P<pid>\d+)[^)]*\) ?")
_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d [\d:]+(?: (?P<name>(?:[A-Z]+\d+ ?)+))?\] ?")
_TRTLLM = re.compile(r"\[\d\d/\d\d/\d{4}-[\d:]+\] \[TRT-LLM\] (?:\[RANK (?P<name>\d+)\] )?\[[A-Z]\] ?")
_LEVEL = re.compile(r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) [\d-]+ [\d:.,]+ \[[^\]]{1,80}\] ?")


@functools.cache
def pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of the catalog, in which a blank stands for any white space and ` ?` for none as well."""
    spaced = text.replace(" ?", r"\s*").replace(" +", r"\s+").replace(" ", r"\s+")
    return re.compile(spaced, re.IGNORECASE)


def faults() -> dict[str, Any]:
    """Return the catalog's page of messages."""
    return catalog.load("memory_faults")


@dataclass(frozen=True)
class Found:
    """A place in a log: which line of the whole, what the pattern said there, and the stream that it stands in."""

    line: int
    match: re.Match[str]
    stream: Stream


@dataclass(frozen=True)
class Stream:
    """The lines of one worker, joined."""

    name: str
    text: str
    offsets: tuple[int, ...]
    """Where each line begins in `text`."""
    numbers: tuple[int, ...]
    """The line's number in the whole log."""

    def search(self, wanted: re.Pattern[str]) -> Iterator[Found]:
        """Yield every place of a pattern."""
        for match in wanted.finditer(self.text):
            at = match.start() + len(match[0]) - len(match[0].lstrip())
            yield Found(self.numbers[self._index(at)], match, self)

    def before(self, found: Found) -> list[str]:
        """Return the stream's lines before a place, its own included."""
        return self.text[: found.match.end()].split("\n")

    def _index(self, at: int) -> int:
        return bisect.bisect_right(self.offsets, at) - 1


@dataclass(frozen=True)
class Log:
    """One start of an engine, as written."""

    lines: tuple[str, ...]
    """Without colours and what the logging system put before them."""
    streams: tuple[Stream, ...]
    pids: frozenset[int]
    """Processes that name themselves in it: the engine's own."""

    @property
    def text(self) -> str:
        """Return all lines as one text."""
        return "\n".join(self.lines)

    def search(self, text: str) -> list[Found]:
        """Return every place of one of the catalog's patterns, first line first."""
        wanted = pattern(text)
        return sorted((one for stream in self.streams for one in stream.search(wanted)), key=lambda one: one.line)

    def glued(self) -> Log:
        """Return it without the breaks that a terminal put into the lines of a worker, also in the middle of words."""
        lines: list[str] = []
        for line in self.lines:
            if lines and line[:1].strip() and _speaker(line)[0] is None and _speaker(lines[-1])[0] is not None:
                lines[-1] += line
            else:
                lines.append(line)
        return _log(lines)


def read(text: str) -> list[Log]:
    """Return the starts in a log, the last one first."""
    lines = [_bare(line) for line in text[-LONGEST:].replace("\r", "\n").split("\n")]
    # Ray repeats what others wrote, later and out of order.
    lines = [line for line in lines if not line.endswith("across cluster]")]
    begins = [0]
    starts = [pattern(one) for one in faults()["starts"]]
    for number, line in enumerate(lines):
        if number and any(one.search(line) for one in starts):
            begins.append(number)
    ends = [*begins[1:], len(lines)]
    return [_log(lines[begin:end]) for begin, end in zip(reversed(begins), reversed(ends))]  # noqa: B905 - Python 3.10 reads it


def _bare(line: str) -> str:
    line = _COLOUR.sub("", line)
    for prefix in _PREFIXES:
        if match := prefix.match(line):
            line = line[match.end() :]
    return line.rstrip()


def _log(lines: Iterable[str]) -> Log:
    whole: list[str] = []
    parts: dict[str, list[tuple[int, str]]] = {}
    pids: set[int] = set()
    speaker = ""
    for number, line in enumerate(lines):
        name, pid, rest = _speaker(line)
        speaker = name if name is not None else speaker
        if pid:
            pids.add(pid)
        whole.append(line)
        parts.setdefault(speaker, []).append((number, rest))
    return Log(tuple(whole), tuple(_stream(name, part) for name, part in parts.items()), frozenset(pids))


def _speaker(line: str) -> tuple[str | None, int | None, str]:
    """Return who wrote a line (None: it does not say), its process, and what it wrote."""
    name: str | None = None
    pid: int | None = None
    if match := _TAGGED.match(line):
        name, pid = match[0].strip(), int(match["pid"])
        line = line[match.end() :]
    elif (match := _SGLANG.match(line)) or (match := _TRTLLM.match(line)):
        name = match["name"] or ""
        line = line[match.end() :]
    if level := _LEVEL.match(line):
        line = line[level.end() :]
        name = name if name is not None else ""
    return name, pid, line


def _stream(name: str, part: list[tuple[int, str]]) -> Stream:
    offsets, at = [], 0
    for _, line in part:
        offsets.append(at)
        at += len(line) + 1
    return Stream(name, "\n".join(line for _, line in part), tuple(offsets), tuple(number for number, _ in part))
