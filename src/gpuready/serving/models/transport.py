"""HTTP to a hub of models: its token goes to the hub's own host alone, and what may pass by is tried again.

Proxies are those of the environment, which `cli/environment.py` makes from gpuready_proxy.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from gpuready.outcome import mask

PAUSES_SECONDS = (1, 2, 4, 8, 16)
"""Between tries that bring nothing; a server that is restarted is back within half a minute."""
LONGEST_PAUSE_SECONDS = 120
"""Of what a hub may ask us to wait (Retry-After); a longer one is told instead."""
SILENCE_SECONDS = 30
"""Without a byte a connection is given up."""
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_MOST_REDIRECTS = 6
_LARGEST_ANSWER = 64 << 20
_AGENT = "gpuready"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_T = TypeVar("_T")


class HubError(Exception):
    """A request that a hub did not answer as it should; `why` ends a sentence."""

    def __init__(self, why: str, status: int | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.why = why
        self.status = status
        """Of HTTP; None where there was no answer at all."""
        self.headers = headers or {}
        super().__init__(why)

    @property
    def passes(self) -> bool:
        """Whether another try may succeed."""
        return self.status is None or self.status in _PASSING

    @property
    def retry_after(self) -> float | None:
        """Return the seconds that the hub asks us to wait; None where it does not say."""
        said = self.headers.get("Retry-After", "")
        return float(said) if said.isdecimal() else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects are followed by hand, because the token must not go along to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Transport:
    """Requests to one hub at `endpoint`, e.g. https://huggingface.co."""

    def __init__(self, endpoint: str, credentials: Mapping[str, str] | None = None) -> None:
        self.endpoint = endpoint.rstrip("/")
        parts = urlsplit(self.endpoint)
        self._origin = (parts.scheme, parts.netloc)
        # Whoever is on the way could read it.
        self.withholds_token = bool(credentials) and parts.scheme != "https" and parts.hostname not in _LOOPBACK
        self._credentials = {} if self.withholds_token else dict(credentials or {})
        self.has_token = bool(self._credentials)
        self._opener = urllib.request.build_opener(_NoRedirect())

    @contextlib.contextmanager
    def opened(self, address: str, start: int = 0, end: int | None = None) -> Iterator[http.client.HTTPResponse]:
        """Open an address, from byte `start` to byte `end` (inclusive); status 200 says that all of it comes.

        Raises:
            HubError: when there is no answer, or another status than 200 and 206; also while it is read.
        """
        try:
            response = self._follow(address, start, end)
        except (OSError, http.client.HTTPException, ssl.SSLError, ValueError) as error:
            raise HubError(_said(error)) from error
        with response:
            try:
                yield response
            except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
                raise HubError(_said(error)) from error

    def _follow(self, address: str, start: int, end: int | None) -> http.client.HTTPResponse:
        before = self._origin[0]
        for _ in range(_MOST_REDIRECTS):
            parts = urlsplit(address)
            # A hub's own list may lead elsewhere too, and urllib would read this server's files.
            allowed = ("https",) if before == "https" else ("http", "https")
            if parts.scheme not in allowed:
                raise HubError(f"it leads to {_without_query(address)}, which is not {' or '.join(allowed)}", 302)
            headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity"}
            if start or end is not None:
                headers["Range"] = f"bytes={start}-{'' if end is None else end}"
            if (parts.scheme, parts.netloc) == self._origin:
                headers |= self._credentials
            request = urllib.request.Request(address, headers=headers)  # noqa: S310 - the scheme is checked above
            try:
                response: http.client.HTTPResponse = self._opener.open(request, timeout=SILENCE_SECONDS)
                return response
            except urllib.error.HTTPError as error:
                location = error.headers.get("Location")
                with error:
                    if error.code not in (301, 302, 303, 307, 308) or not location:
                        said = dict(error.headers.items())
                        raise HubError(f"it answers {error.code} {error.reason}", error.code, said) from error
            before, address = parts.scheme, urljoin(address, location)
        raise HubError(f"it redirects more than {_MOST_REDIRECTS} times", 302)

    def json(self, address: str) -> tuple[Any, Mapping[str, str]]:
        """Return the JSON of an answer and its headers, after as many tries as it takes within reason."""

        def ask() -> tuple[Any, Mapping[str, str]]:
            with self.opened(address) as response:
                content = response.read(_LARGEST_ANSWER)
                try:
                    return json.loads(content), dict(response.headers.items())
                except (ValueError, RecursionError) as error:
                    raise HubError("its answer is no JSON", 200) from error

        return patiently(ask)

    def start(self, address: str, length: int) -> bytes:
        """Return the first bytes of a file."""

        def ask() -> bytes:
            if not length:
                return b""
            with self.opened(address, 0, length - 1) as response:
                content = response.read(length)
            if response.status == 206 and len(content) < min(length, _length_of_range(response) or length):
                raise HubError("the connection ended early")
            return content

        return patiently(ask)


def patiently(ask: Callable[[], _T], began: Callable[[], object] = lambda: None) -> _T:
    """Return what `ask` returns, asked again after a pause where that may help.

    `began` is a measure of what has been reached: while it changes, tries start anew.
    """
    tries, reached = 0, began()
    while True:
        try:
            return ask()
        except HubError as error:
            now = began()
            tries, reached = (0, now) if now != reached else (tries, reached)
            pause = error.retry_after
            if not error.passes or tries >= len(PAUSES_SECONDS):
                raise
            if pause is not None and pause > LONGEST_PAUSE_SECONDS:
                raise HubError(
                    f"{error.why}, and asks to be left alone for {pause:.0f} s", error.status, error.headers
                ) from error
            time.sleep(max(PAUSES_SECONDS[tries], min(pause or 0, LONGEST_PAUSE_SECONDS)))
            tries += 1


def _length_of_range(response: http.client.HTTPResponse) -> int | None:
    said = response.headers.get("Content-Range", "").rpartition("/")[2]
    return int(said) if said.isdecimal() else None


def _without_query(address: str) -> str:
    # What signs an address of a storage is as good as a password.
    return mask(address.partition("?")[0])


def _said(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return _said(reason)
    if isinstance(error, TimeoutError):
        return f"no byte within {SILENCE_SECONDS} s"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended early"
    text = str(getattr(error, "strerror", None) or reason or error) or type(error).__name__
    return mask(" ".join(text.split()))[:300]
