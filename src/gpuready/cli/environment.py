"""The environment of the server part and of every program that it starts: made once, before a verb runs.

What a login, sshd or /etc/environment brings must not decide how a program answers us, nor whom it asks on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from gpuready.outcome import Failure, Refusal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LANGUAGE = ("LANG", "LANGUAGE")


def own_environment(environment: MutableMapping[str, str], proxy: Mapping[str, Any] | None = None) -> None:
    """Give the environment plain messages, and the proxy that the inventory names (`{http, https, no_proxy}`)."""
    for name in [name for name in environment if name in _LANGUAGE or name.startswith("LC_")]:
        del environment[name]
    environment["LC_ALL"] = "C"
    if proxy is not None:
        _use_proxy(environment, proxy)
    # A proxy that the server's own environment names must not stand between this server and itself either.
    direct = [name for name in _value(environment, "no_proxy").replace(" ", ",").split(",") if name]
    direct += [name for name in (*(proxy or {}).get("no_proxy", ()), *LOOPBACK) if name not in direct]
    _set(environment, "no_proxy", ",".join(direct))


def _use_proxy(environment: MutableMapping[str, str], proxy: Mapping[str, Any]) -> None:
    addresses = [address for scheme in ("http", "https") if (address := proxy.get(scheme))]
    if not addresses or not all(isinstance(address, str) for address in addresses):
        raise Refusal(
            Failure("input.proxy", "the proxy of the input names no address", "", "set its key http or https")
        )
    for scheme in ("http", "https"):
        # One proxy for both is the usual case.
        _set(environment, f"{scheme}_proxy", proxy.get(scheme) or addresses[0])


def _value(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name) or environment.get(name.upper()) or ""


def _set(environment: MutableMapping[str, str], name: str, value: str) -> None:
    """Set a variable in both spellings: programs differ in which one they read."""
    environment[name] = environment[name.upper()] = value
