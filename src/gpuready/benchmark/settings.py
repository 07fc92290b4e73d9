"""What an operator asks of a run, and every reason against it at once."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gpuready.outcome import Failure, Refusal

DEFAULT_LEVELS = (1, 2, 4, 8, 16)
MAX_LEVEL = 4096
MAX_TOKENS = 1_000_000
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Settings:
    """One run, checked."""

    url: str
    """Where the API is, without /v1: http://HOST:PORT."""
    seed: int
    model: str | None = None
    levels: tuple[int, ...] = DEFAULT_LEVELS
    requests: int | None = None
    """Requests of each level; None: `max(20, 5 * level)`."""
    prompt_tokens: int = 512
    output_tokens: int = 128
    warmup: int | None = None
    """Requests before each level that are not measured; None: as many as the level."""
    timeout_seconds: float = 300.0
    api_key: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    insecure: bool = False
    max_failed_percent: float = 1.0
    """The run is a failed one when more of its requests fail."""
    note: str = ""
    simulated: bool = False
    """The inventory says stack `cpu`."""

    def requests_at(self, level: int) -> int:
        """Return the requests of a level: at 20 there is a p95, and five rounds keep the tail small."""
        return self.requests or max(20, 5 * level)

    def warmup_at(self, level: int) -> int:
        """Return the warm-up requests before a level."""
        return level if self.warmup is None else self.warmup

    @property
    def host(self) -> str:
        """Return the host that is measured."""
        return urlsplit(self.url).hostname or ""

    @property
    def key_is_exposed(self) -> bool:
        """An API key goes over the network unencrypted."""
        return (
            bool(self.api_key) and self.url.startswith("http:") and self.host not in ("localhost", "127.0.0.1", "::1")
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the arguments as the report shows them: no secret."""
        return {
            "url": self.url,
            "model": self.model,
            "concurrency": list(self.levels),
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "seed": self.seed,
            "warmup": self.warmup,
            "timeout_seconds": self.timeout_seconds,
            "api_key": "given" if self.api_key else None,
            "ca_file": str(self.ca_file) if self.ca_file else None,
            "insecure": self.insecure,
            "max_failed_percent": self.max_failed_percent,
            "note": self.note,
        }


def refuse_if_wrong(settings: Settings) -> None:
    """Refuse settings that cannot be measured, every reason at once.

    Raises:
        Refusal: with one failure for each.
    """
    failures = [*_level_failures(settings), *_number_failures(settings)]
    if settings.insecure and (settings.ca_file or not settings.url.startswith("https:")):
        failures.append(_wrong("--insecure", "only means something for https without --ca-file", "leave it out"))
    if settings.ca_file and not settings.url.startswith("https:"):
        failures.append(_wrong("--ca-file", f"is given, but {settings.url} is not https", "leave it out, or use https"))
    if settings.ca_file and (why := _ca_file_fault(settings.ca_file)):
        failures.append(_wrong(f"--ca-file {settings.ca_file}", why, "name a file of PEM certificates"))
    if failures:
        raise Refusal(failures)


def _ca_file_fault(path: Path) -> str:
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        return "holds no certificate"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def _level_failures(settings: Settings) -> list[Failure]:
    levels, failures = settings.levels, []
    outside = [level for level in levels if not 1 <= level <= MAX_LEVEL]
    if outside:
        failures.append(_wrong("--concurrency", f"{outside[0]} is no level", f"give 1 to {MAX_LEVEL}, e.g. 1,2,4,8"))
    elif list(levels) != sorted(set(levels)):
        failures.append(_wrong("--concurrency", f"{_list(levels)} does not rise", "give each level once, rising"))
    elif settings.requests is not None and 1 <= settings.requests < levels[-1]:
        failures.append(
            _wrong(
                f"--requests {settings.requests}",
                f"is fewer than the level {levels[-1]}, which would never be reached",
                f"ask for at least {levels[-1]}",
            )
        )
    return failures


def _number_failures(settings: Settings) -> list[Failure]:
    ranges: list[tuple[str, float | None, float, float]] = [
        ("--requests", settings.requests, 1, 1_000_000),
        ("--prompt-tokens", settings.prompt_tokens, 1, MAX_TOKENS),
        ("--output-tokens", settings.output_tokens, 1, MAX_TOKENS),
        ("--warmup", settings.warmup, 0, 10_000),
        ("--timeout", settings.timeout_seconds, 0.001, 86_400),
        ("--seed", settings.seed, 0, 2**63 - 1),
        ("--max-failed-percent", settings.max_failed_percent, 0, 100),
    ]
    # Written this way round, so that "not a number" is outside too.
    return [
        _wrong(f"{name} {value}", "is out of range", f"give {low:g} to {high:g}")
        for name, value, low, high in ranges
        if value is not None and not low <= value <= high
    ]


def base_url(text: str) -> str:
    """Return the API's address without /v1, checked. A host's name may hold an underscore.

    Raises:
        Refusal: naming what is wrong with it.
    """
    example = "give it as http://HOST:8080"
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise Refusal(_wrong(f"URL {text!r}", str(error), example)) from error
    why = _url_fault(parts)
    if why:
        # A password in it must not be repeated in a log.
        shown = text if "@" not in text else f"{parts.scheme}://...@{parts.hostname}"
        raise Refusal(_wrong(f"URL {shown!r}", why, example))
    host = parts.hostname or ""
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    authority = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    return f"{parts.scheme}://{authority}{path}"


def _url_fault(parts: SplitResult) -> str:
    if parts.scheme not in ("http", "https"):
        return "it does not begin with http:// or https://"
    if parts.username is not None or parts.password is not None:
        return "a password does not belong into an address; use --api-key-file"
    if parts.query or parts.fragment:
        return "it has a query or a fragment"
    host = parts.hostname or ""
    if not host:
        return "it names no host"
    if ":" not in host and (
        ".." in host or not _HOST.fullmatch(host.rstrip(".")) or any(map(_too_long, host.split(".")))
    ):
        return f"the host name {host!r} is not valid: letters, digits, '.', '-' and '_' are, 63 of them between dots"
    return ""


def _too_long(label: str) -> bool:
    return len(label) > 63


def parse_levels(text: str) -> tuple[int, ...]:
    """Read `1,2,4`.

    Raises:
        Refusal: naming the part that is not a whole number.
    """
    levels = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,6}\s*", part):
            raise Refusal(_wrong(f"--concurrency {text!r}", f"{part!r} is not a whole number", "give e.g. 1,2,4,8"))
        levels.append(int(part))
    return tuple(levels)


def read_api_key(path: Path) -> str:
    """Read an API key from a file of one line.

    Raises:
        Refusal: without repeating what stands in the file.
    """
    name = f"--api-key-file {path}"
    try:
        return checked_api_key(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        why = "is not text" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
        raise Refusal(_wrong(name, why, "name a file that holds the key")) from error


def checked_api_key(text: str, name: str) -> str:
    """Return a key that can stand in a header.

    Raises:
        Refusal: without repeating the key.
    """
    key = text.strip()
    if not key or not re.fullmatch(r"[\x21-\x7e]+", key):
        raise Refusal(_wrong(name, "is not one line of printable ASCII without spaces", "put the key alone into it"))
    return key


def _list(levels: tuple[int, ...]) -> str:
    return ",".join(map(str, levels))


def _wrong(what: str, why: str, fix: str) -> Failure:
    return Failure("benchmark.argument", what, why, fix)
