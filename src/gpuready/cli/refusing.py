"""Refusals of what a command line asks for: one of many answers, the word that was meant, several at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeVar

from gpuready.outcome import Failure, Refusal


def refused(code: str, what: str, why: str = "", fix: str = "") -> Refusal:
    """Return a refusal with one failure."""
    return Refusal(Failure(code, what, why, fix))


def nearest(word: str, words: Iterable[str], most: int = 8, aliases: Iterable[str] = ()) -> str:
    """Say which known word was meant, among them aliases, or which there are."""
    names = sorted(words)
    folded = {name.lower(): name for name in [*aliases, *names]}
    near = difflib.get_close_matches(word.lower()[:200], list(folded), n=1, cutoff=0.5)
    if near:
        return f"did you mean {folded[near[0]]}?"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"known are {', '.join(names[:most])}{more}"


Said = TypeVar("Said")


class Gathered:
    """Collects refusals of several answers, so that all are said at once."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    def of(self, answer: Callable[[], Said]) -> Said | None:
        """Return an answer, or None and keep why there is none."""
        try:
            return answer()
        except Refusal as refusal:
            self.failures += refusal.failures
            return None

    def end(self) -> None:
        """Refuse with everything that was kept."""
        if self.failures:
            raise Refusal(self.failures)
