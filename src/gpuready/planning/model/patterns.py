"""Matches the names of modules against the patterns in a quantized checkpoint's configuration.

A pattern comes from a file that anybody may have written, so it is never given to `re`, which can be made to run for
hours: the part of the language that checkpoints use is read here and matched in time that grows with the name alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_MOST_WAYS = 64
_MOST_PARTS = 256
_MOST_STEPS = 4_000_000
_MOST_PATTERNS = 2048
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
_NUMBERED = re.compile(r"\d|\\[dw]|\[|(?<!\\)\.(?![*+])")
"""What makes a pattern tell layer 7 from layer 17: a digit, a class, one arbitrary character."""
_Test = Callable[[str], bool]
_Part = tuple[_Test, bool, bool]
"""A test of one character, whether it may be left out, and whether it may pass any number of times."""


class TooMuch(ValueError):
    """Patterns that would take minutes to match."""


class NotUnderstood(ValueError):
    """A pattern beyond what is read here."""


def _any(_: str) -> bool:
    return True


def _digit(character: str) -> bool:
    return character.isdigit()


def _word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CLASSES: dict[str, _Test] = {"d": _digit, "w": _word}


def _one_of(characters: str, inverted: bool) -> _Test:
    """Return a test for a class such as [0-9_] or [^.]."""
    allowed: set[str] = set()
    index = 0
    while index < len(characters):
        if characters[index + 1 : index + 2] == "-" and index + 2 < len(characters):
            first, last = ord(characters[index]), ord(characters[index + 2])
            if not first <= last < 256:
                raise NotUnderstood(characters)
            allowed.update(map(chr, range(first, last + 1)))
            index += 3
        else:
            allowed.add(characters[index])
            index += 1
    return lambda character: (character in allowed) is not inverted


def _ways(pattern: str) -> list[str]:
    """Return the patterns without groups that a pattern with groups such as (q|k|v) stands for."""
    depth, begin = 0, -1
    index = 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 2
            continue
        if character == "(":
            depth += 1
            begin = index if depth == 1 else begin
        elif character == ")":
            depth -= 1
            if depth < 0:
                raise NotUnderstood(pattern)
            if depth == 0:
                return _expanded(pattern, begin, index)
        index += 1
    if depth:
        raise NotUnderstood(pattern)
    return _branches(pattern)


def _branches(pattern: str) -> list[str]:
    """Return the parts between the bars that stand outside of every group."""
    found, depth, begin, index = [], 0, 0, 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            found.append(pattern[begin:index])
            begin = index + 1
        index += 1
    return [*found, pattern[begin:]]


def _expanded(pattern: str, begin: int, end: int) -> list[str]:
    inside, rest = pattern[begin + 1 : end].removeprefix("?:"), pattern[end + 1 :]
    if inside.startswith("?") or rest[:1] in ("*", "+", "{"):
        raise NotUnderstood(pattern)
    outer = _branches(pattern)
    if len(outer) > 1:
        return _limited(way for one in outer for way in _ways(one))
    inner = [*_branches(inside), ""] if rest[:1] == "?" else _branches(inside)
    rest = rest.removeprefix("?")
    return _limited(way for one in inner for way in _ways(pattern[:begin] + one + rest))


def _limited(ways: Iterable[str]) -> list[str]:
    found: list[str] = []
    for way in ways:
        found.append(way)
        if len(found) > _MOST_WAYS:
            raise NotUnderstood(way)
    return found


def _parts(pattern: str) -> list[_Part]:
    """Return the parts of a pattern without groups, from its start to its end."""
    found: list[_Part] = []
    index = 0
    while index < len(pattern):
        test, index = _test(pattern, index)
        many = pattern[index : index + 1]
        if many and many in "*+?":
            index += 1
            if pattern[index : index + 1] and pattern[index] in "*+?{":
                raise NotUnderstood(pattern)
        else:
            many = ""
        if many in ("", "+"):
            found.append((test, False, False))
        if many:
            found.append((test, True, many != "?"))
        if len(found) > _MOST_PARTS:
            raise NotUnderstood(pattern)
    return found


def _test(pattern: str, index: int) -> tuple[_Test, int]:
    """Return the test that stands at an index and the index after it."""
    character = pattern[index]
    if character == "\\":
        escaped = pattern[index + 1 : index + 2]
        if escaped in _CLASSES:
            return _CLASSES[escaped], index + 2
        if not escaped or escaped.isalnum():
            raise NotUnderstood(pattern)
        return _one_of(escaped, False), index + 2
    if character == "[":
        end = pattern.find("]", index + 2)
        if end < 0 or "\\" in pattern[index:end]:
            raise NotUnderstood(pattern)
        inverted = pattern[index + 1] == "^"
        return _one_of(pattern[index + 1 + inverted : end], inverted), end + 1
    if character in "{}*+?^$|()":
        raise NotUnderstood(pattern)
    return (_any if character == "." else _one_of(character, False)), index + 1


def _closed(states: set[int], parts: list[_Part]) -> set[int]:
    """Return the parts that may come next, with those behind parts that may be left out."""
    for state in sorted(states):
        while state < len(parts) and parts[state][1]:
            state += 1
            states.add(state)
    return states


def _expression(pattern: str) -> list[tuple[list[_Part], bool]]:
    """Return the ways to match a regular expression from the start of a name, each with whether it reaches its end."""
    ways = []
    for way in _limited(_ways(pattern)):
        plain = way.removeprefix("^")
        whole = plain.endswith("$") and not plain.endswith("\\$")
        ways.append((_parts(plain.removesuffix("$") if whole else plain), whole))
    return ways


def _wildcard(pattern: str) -> list[tuple[list[_Part], bool]]:
    """Return the ways in which a name is what a pattern with asterisks describes, or lies under it."""
    if len(pattern) > _MOST_PARTS:
        raise NotUnderstood(pattern)
    parts = [(_any, True, True) if one == "*" else (_one_of(one, False), False, False) for one in pattern]
    return [(parts, True), ([*parts, (_one_of(".", False), False, False)], False)]


class Names:
    """Many patterns at once: plain names, which cover what holds their words anywhere, `re:` expressions, asterisks."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.not_understood: list[str] = []
        self._words: set[str] = set()
        self._longest = 0
        self._walks: list[tuple[str, list[tuple[list[_Part], bool]]]] = []
        self._steps = 0
        self._by_number = False
        self._walked: dict[str, bool] = {}
        for pattern in patterns:
            self._add(pattern)

    def _add(self, pattern: str) -> None:
        if len(self._walks) >= _MOST_PATTERNS:
            raise TooMuch
        try:
            if pattern.startswith("re:") or "*" in pattern:
                self._by_number = self._by_number or bool(_NUMBERED.search(pattern))
            if pattern.startswith("re:"):
                self._walks.append(("", _expression(pattern[3:])))
            elif "*" in pattern:
                self._walks.append((pattern.partition("*")[0], _wildcard(pattern)))
            elif pattern.strip("."):
                self._words.add(pattern.strip("."))
                self._longest = max(self._longest, pattern.strip(".").count(".") + 1)
        except NotUnderstood:
            self.not_understood.append(pattern)

    def cover(self, name: str) -> bool:
        """Say whether one of the patterns covers a name.

        Raises:
            TooMuch: when the patterns are so many and so intricate that nobody can have meant them.
        """
        words = name.split(".")
        for begin in range(len(words)):
            for end in range(begin + 1, min(len(words), begin + self._longest) + 1):
                if ".".join(words[begin:end]) in self._words:
                    return True
        if not self._walks:
            return False
        alike = name if self._by_number else _NUMBERS.sub("0", name)
        if alike not in self._walked:
            self._walked[alike] = self._walk(alike)
        return self._walked[alike]

    def _walk(self, name: str) -> bool:
        for start, ways in self._walks:
            if not name.startswith(start):
                continue
            if any(self._along(parts, name, whole) for parts, whole in ways):
                return True
        return False

    def _along(self, parts: list[_Part], text: str, whole: bool) -> bool:
        """Walk over a text once, with the set of all parts that may come next."""
        end = len(parts)
        states = _closed({0}, parts)
        for character in text:
            if not whole and end in states:
                return True
            self._steps += len(states)
            if self._steps > _MOST_STEPS:
                raise TooMuch
            passed = set()
            for state in states:
                if state < end and parts[state][0](character):
                    passed.add(state if parts[state][2] else state + 1)
            if not passed:
                return False
            states = _closed(passed, parts)
        return end in states
