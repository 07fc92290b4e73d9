"""Files and standard input that a command is given: JSON, and YAML on the controller; every problem is one sentence."""

from __future__ import annotations

import io
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gpuready.outcome import Failure, MachineCannot, Refusal

LARGEST = 64 * 1024**2
"""Bytes of a file that is read: far beyond every configuration and every table of runs."""
LARGEST_LOG = 4 * 1024**3
"""Bytes of a log that is read, of which the end alone is kept: an end to a device that has none."""
_CHUNK = 1024**2
_SOME = 8
"""One in so many characters that are none: no text."""


_LONGEST_PATH = 300
_LONGEST_NUMBER = 1000
"""Digits; Python itself refuses to read more than 4300."""


def called(path: str) -> str:
    """Return what sentences call a file that was named on the command line."""
    if path == "-":
        return "standard input"
    return path if len(path) <= _LONGEST_PATH else f"{path[:40]}... ({len(path)} characters)"


def text_of(path: str) -> str:
    """Return the text of a file; `-` is standard input.

    Raises:
        Refusal: when it cannot be read, is too large or is no text.
    """
    where = called(path)
    if not path:
        raise Refusal(Failure("input.unreadable", "no file is named", "", "name one; - is standard input"))
    try:
        if path == "-":
            return "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
        # One more than is allowed, so that a device that never ends is too large as well.
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise Refusal(Failure("input.too_large", f"{where} is larger than {LARGEST // 1024**2} MiB"))
        return content.decode("utf-8-sig")
    except OSError as error:
        raise Refusal(Failure("input.unreadable", f"{where} cannot be read", str(error.strerror))) from error
    except UnicodeDecodeError as error:
        raise Refusal(Failure("input.not_text", f"{where} is not UTF-8 text")) from error


def log_of(path: str, most: int) -> str:
    """Return the last bytes of a log, `most` or less; `-` is standard input.

    A process that died may have left a character half written, and rotation a hole of NUL bytes: neither is refused.

    Raises:
        Refusal: when it cannot be read, never ends or is no text.
    """
    where, kept, count = called(path), b"", 0
    if not path:
        raise Refusal(Failure("input.unreadable", "no file is named", "", "name one; - is standard input"))
    try:
        with _bytes_of(path) as file:
            while chunk := file.read(_CHUNK):
                count += len(chunk)
                if count > LARGEST_LOG:
                    raise Refusal(Failure("input.too_large", f"{where} is larger than {LARGEST_LOG // 1024**2} MiB"))
                kept = (kept + chunk)[-most:]
    except OSError as error:
        raise Refusal(Failure("input.unreadable", f"{where} cannot be read", str(error.strerror))) from error
    text = kept.replace(b"\0", b"").decode("utf-8", errors="replace")
    if text.count("\N{REPLACEMENT CHARACTER}") * _SOME > len(text):
        raise Refusal(Failure("input.not_text", f"{where} is no text"))
    return text


def _bytes_of(path: str) -> AbstractContextManager[BinaryIO]:
    """Return a file to read and close; standard input stays open, and is empty where nobody gives any."""
    if path != "-":
        return Path(path).open("rb")
    return nullcontext(io.BytesIO() if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer)


def json_of(path: str) -> Any:
    """Return what a JSON file holds; an empty one holds None."""
    return _parsed(text_of(path), called(path))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number, parse_int=_whole_number) if text.strip() else None
    except RecursionError as error:
        raise Refusal(Failure("input.not_json", f"{where} is nested too deeply")) from error
    except ValueError as error:
        raise Refusal(Failure("input.not_json", f"{where} is not JSON", str(error))) from error


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _whole_number(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def object_of(path: str) -> dict[str, Any]:
    """Return the JSON object that a file holds; an empty one is an empty object."""
    value = json_of(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refusal(Failure("input.not_object", f"{called(path)} is not a JSON object"))
    return value


def mapping_of(path: str) -> dict[str, Any]:
    """Return the mapping that a JSON or YAML file holds; YAML is read on the controller only."""
    if path.endswith(".json"):
        return object_of(path)
    text = text_of(path)
    try:
        import yaml
    except ModuleNotFoundError as error:
        what = f"{path} is YAML, which is read on the controller only"
        raise MachineCannot(
            Failure("input.yaml", what, "", "write it as JSON, in a file that ends in .json")
        ) from error
    try:
        value = yaml.safe_load(text)
    except RecursionError as error:
        raise Refusal(Failure("input.not_yaml", f"{path} is nested too deeply")) from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}, line {mark.line + 1}"
        why = str(getattr(error, "problem", None) or error)
        raise Refusal(Failure("input.not_yaml", f"{where} is not YAML", why)) from error
    if not isinstance(value, dict):
        raise Refusal(Failure("input.not_object", f"{path} holds no mapping of keys to values"))
    return value
