"""Reads server-sent events as they come, in pieces of any size, and says what each means for a measurement.

The format is the HTML standard's (html.spec.whatwg.org, 9.2); the content OpenAI's chat completion chunks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_EVENT_BYTES = 4 * 1024 * 1024
DONE = "[DONE]"
# A carriage return at the end of a piece may be the first half of a line end.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class StreamProblem(Exception):
    """The stream is not what was asked for; the message says what was seen."""


class EventReader:
    """Puts events together from pieces of bytes: lines, and letters of several bytes, may be torn anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of the events that are complete with this piece."""
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamProblem(f"one line of the stream is longer than {MAX_EVENT_BYTES} bytes")
        return [data for line in lines if (data := self._take(line)) is not None]

    def close(self) -> list[str]:
        """Return what the stream's end completes: some servers leave out the last empty line."""
        found = [self._take(self._rest.rstrip(b"\r")), self._take(b"")]
        self._rest = b""
        return [data for data in found if data is not None]

    def _take(self, line: bytes) -> str | None:
        if line:
            # Comments (keep-alives) begin with a colon, and so have no field's name.
            name, _, value = line.decode(errors="replace").partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return None
        if not self._data:
            return None
        data, self._data = "\n".join(self._data), []
        return data


@dataclass(frozen=True)
class Usage:
    """What the server says it has counted; None where it says nothing that is a count."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True)
class Chunk:
    """What one event of a chat completion means."""

    has_choice: bool = False
    """It belongs to the answer itself; `usage` after it does not."""
    has_text: bool = False
    """It holds generated text, content or reasoning."""
    is_reasoning: bool = False
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


def read_chunk(data: str) -> Chunk:
    """Read the data of one event.

    Raises:
        StreamProblem: when it is not a JSON object.
    """
    try:
        page = json.loads(data)
    except ValueError as error:
        raise StreamProblem(f"an event is not JSON: {data[:120]!r}") from error
    if not isinstance(page, dict):
        raise StreamProblem(f"an event is not a JSON object: {data[:120]!r}")
    if page.get("error"):
        return Chunk(error=error_sentence(page))
    choice = _mapping((page.get("choices") or [None])[0] if isinstance(page.get("choices"), list) else None)
    delta = _mapping(choice.get("delta"))
    # vLLM calls it reasoning, formerly reasoning_content, as DeepSeek does.
    reasoning = bool(delta.get("reasoning_content") or delta.get("reasoning"))
    return Chunk(
        has_choice=bool(choice),
        has_text=bool(delta.get("content")) or reasoning,
        is_reasoning=reasoning,
        finish_reason=choice.get("finish_reason"),
        usage=read_usage(page.get("usage")),
    )


def read_usage(page: Any) -> Usage | None:
    """Read `usage`; None where there is none."""
    if not isinstance(page, dict):
        return None
    details = _mapping(page.get("prompt_tokens_details"))
    return Usage(
        _count(page.get("prompt_tokens")), _count(page.get("completion_tokens")), _count(details.get("cached_tokens"))
    )


def error_sentence(page: Any) -> str:
    """Return the message of an error in OpenAI's form, or of what stands in its place."""
    error = page.get("error", page) if isinstance(page, dict) else page
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message if message else error).split())[:300]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
