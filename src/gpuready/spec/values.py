"""How a value that an operator wrote is read and shown. Values come from files: any of them may be hostile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpuready.outcome import mask

SHOWN = 80
"""Characters of a value that a sentence shows."""
_DIGITS = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


class Secret(str):
    """A text that came out of a vault: it is checked like any other and never shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "(from a vault, not shown)"


class Sealed(Secret):
    """A text of a file that is encrypted as a whole: whether it is a secret by itself nobody can tell."""

    __slots__ = ()


def shown(value: object) -> str:
    """Return a value as a sentence shows it: escaped, without credentials, at most 80 characters."""
    text = ""
    # Piece by piece, because a value of a few aliases can be endless.
    for piece in _pieces(value):
        text += piece
        if len(text) > 4 * SHOWN:
            break
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield "{"
        for number, (key, one) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(one)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "["
        for number, one in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(one)
        yield "]"
    else:
        yield _scalar(value)


def _scalar(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Secret):
        return repr(value)
    if isinstance(value, str):
        return ascii(mask(str(value)))
    try:
        return ascii(str(value))[1:-1]
    except Exception:
        # A number of more than 4300 digits, or a text of a vault that nobody can open.
        return "(cannot be shown)"


def whole(value: object) -> int | None:
    """Return a whole number, also one that `-e` made a text; None for all else, such as true, 8.0 and '8 '."""
    if isinstance(value, str):
        return int(value) if _DIGITS.fullmatch(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """Return a finite number, also one that `-e` made a text; None for all else, such as true, .nan and '8 GiB'."""
    if isinstance(value, str):
        return float(value) if _DECIMAL.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e18 < value < 1e18:
        return None
    return float(value)


def allowed(words: str) -> str:
    """Return what is allowed, as the part of a sentence that says why a value is refused."""
    return f"allowed {'is' if words.startswith(('a ', 'an ', 'one ', 'at ', '* ')) else 'are'} {words}"


def key_text(part: object) -> str:
    """Return a key as a sentence shows it; one that is no plain name is escaped."""
    return part if isinstance(part, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", part) else f"[{shown(part)}]"


def path_text(path: tuple[object, ...]) -> str:
    """Write a location as an operator would: gpuready_deployments[0].workload.p50."""
    text = ""
    for part in path:
        if isinstance(part, int) and not isinstance(part, bool) and text:
            text += f"[{part}]"
            continue
        key = key_text(part)
        text += key if not text or key.startswith("[") else f".{key}"
    return text


def yaml_hint(value: object) -> str:
    """Return what YAML made of a word that was meant as a text; empty where it changed nothing."""
    if isinstance(value, bool):
        return "YAML reads yes, no, on, off, true and false as booleans: quote the word"
    if value is None:
        return "nothing, ~ and null are no value in YAML"
    if isinstance(value, int | float):
        return "YAML reads it as a number: quote it"
    if isinstance(value, Mapping) and any(isinstance(key, Mapping) for key in value):
        return "quote a value that begins with {{"
    return ""
