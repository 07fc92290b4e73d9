"""Whether a value is of the kind that a flag takes, and whether an engine's file can hold it as it is meant."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpuready.planning.flags.table import Known

_INT, _FLOAT = re.compile(r"-?[0-9]{1,18}"), re.compile(r"-?[0-9]{0,18}(\.[0-9]{1,18})?([eE]-?[0-9]{1,3})?")
_SIZE = re.compile(r"-?[0-9]{1,18}|[0-9]{1,12}(\.[0-9]{1,6})?[kmgt]|[0-9]{1,12}[KMGT]|auto")
_OF_JSON = re.compile("(args|config|kwargs|map|overrides|params)$")
"""Names of flags whose text is JSON, as SGLang has them; a mapping is written so."""
_SCALARS = {
    "int": "a whole number",
    "size": "a whole number, also as 16k or 2M",
    "float": "a number",
    "text": "a text",
}
_MOST_SHOWN = 12


def refusal(known: Known, value: Any) -> str:
    """Return what a flag takes, where a value is none of it; empty where it is. null always is: it says nothing."""
    if value is None:
        return ""
    if known.kind in ("switch", "bool"):
        return "" if isinstance(value, bool) or value in ("true", "false") else "allowed is true or false"
    if known.kind.startswith("list of "):
        return _list_refusal(known, value)
    if known.kind.startswith("json"):
        return "" if _is_json(value) or (known.kind == "json or text" and isinstance(value, str)) else _JSON
    if known.kind == "text" and isinstance(value, Mapping) and _OF_JSON.search(known.name):
        return ""
    if not _is_scalar(known.kind, value):
        return f"allowed is {_SCALARS[known.kind]}"
    return choice_refusal(known, value)


def as_meant(known: Known | None, value: Any) -> Any:
    """Return true or false where a flag that is one of them has it as a text, which `-e` makes of it.

    vLLM's reader would write such a text behind a flag that takes none.
    """
    is_truth = known is not None and known.kind in ("switch", "bool") and isinstance(value, str)
    return value == "true" if is_truth else value


_JSON = "allowed is a mapping or a list, or a text that is JSON"


def _list_refusal(known: Known, value: Any) -> str:
    kind = known.kind.removeprefix("list of ")
    values = value if isinstance(value, list) else [value]
    if kind == "text" and all(isinstance(one, Mapping) for one in values):
        return ""
    if not all(_is_scalar(kind, one) for one in values):
        return f"allowed is a list, each of it {_SCALARS[kind]}"
    return next((said for one in values if (said := choice_refusal(known, one))), "")


def choice_refusal(known: Known, value: Any) -> str:
    """Return what a flag takes where a value is none of what it counts up; empty where it is."""
    if not known.choices or str(value) in map(str, known.choices):
        return ""
    shown = ", ".join(map(str, known.choices[:_MOST_SHOWN]))
    return f"allowed is {shown}" + (
        f" and {len(known.choices) - _MOST_SHOWN} more" * (len(known.choices) > _MOST_SHOWN)
    )


def _is_scalar(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if kind == "text":
        return isinstance(value, str | int | float)
    if isinstance(value, str):
        forms = {"int": _INT, "float": _FLOAT, "size": _SIZE}
        return bool(value) and forms[kind].fullmatch(value) is not None
    return isinstance(value, int) or (kind == "float" and isinstance(value, float))


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return True
    if not isinstance(value, str):
        return False
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def strange(value: Any) -> Iterator[str]:
    """Yield what of a value the engine's file cannot hold as it is meant."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                yield f"its key {shown(key)} is no text"
            yield from strange(one)
    elif isinstance(value, list):
        for one in value:
            yield from strange(one)
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"{value} is not finite"
    elif isinstance(value, int):
        if abs(value) >= 2**64:
            yield "a number has more than 64 bits"
    elif value is not None and not isinstance(value, str):
        yield f"{shown(value)} is a {_NOUNS.get(type(value).__name__, 'value of another kind')}"


_NOUNS = {"date": "date", "datetime": "date", "bytes": "binary value", "set": "set"}


def shown(value: Any) -> str:
    """Return a value as a sentence shows it: escaped and short."""
    try:
        return (ascii(value) if isinstance(value, str | list | Mapping) else ascii(str(value))[1:-1])[:80]
    except ValueError:
        return "a number of more than 4300 digits"
