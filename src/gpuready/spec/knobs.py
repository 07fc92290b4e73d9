"""What the roles' own variables may be, beyond their types: ranges, formats, contradictions. The one place for them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gpuready.planning.placement import FIRST_PORT
from gpuready.planning.storage import DEVICES, SHARES
from gpuready.spec.options import Path, Problem
from gpuready.spec.values import allowed, whole

DAY = 86400


@dataclass(frozen=True)
class Rule:
    """What a value may be, in words and as a check of a value whose type is right."""

    allowed: str
    accepts: Callable[[Any], bool]
    null: bool = False
    """Whether null is a value too."""


def _between(low: int, high: int, *, null: bool = False) -> Rule:
    def accepts(value: Any) -> bool:
        number = whole(value)
        return number is not None and low <= number <= high

    return Rule(f"{low} to {high}{', or null' if null else ''}", accepts, null)


def _matching(pattern: str, allowed: str) -> Rule:
    compiled = re.compile(pattern)
    return Rule(allowed, lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None)


def is_port_range(value: Any) -> bool:
    """Return whether a value is a port, or a range such as 9100-9110."""
    text = str(value) if whole(value) is not None else value
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", text):
        return False
    ends = [int(end) for end in text.split("-")]
    return ends == sorted(ends) and all(0 < end < 65536 for end in ends)


def is_network(value: Any) -> bool:
    """Return whether a value is an address or a network."""
    try:
        ipaddress.ip_network(value if isinstance(value, str) else "", strict=False)
    except ValueError:
        return False
    return True


def _is_networks(value: Any) -> bool:
    return all(map(is_network, value)) if isinstance(value, list) else value in (None, "") or is_network(value)


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return value == "*"
    return "%" not in value


def _is_comment(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 100 and value.isprintable() and not re.search(r'["\\]', value)


def _is_limit(value: Any) -> bool:
    number = whole(value)
    return value in ("unlimited", "infinity") or (number is not None and -20 <= number < 2**63)


def _is_parameter(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"[ -~\t]{1,200}", value) is not None and bool(value.strip())
    return value is None or (whole(value) is not None and abs(value) < 2**64)


def _is_place_of_wheels(value: Any) -> bool:
    if not isinstance(value, str) or not value.isprintable() or not value.strip():
        return False
    return "://" not in value or _is_url(value)


def _is_url(value: Any) -> bool:
    if not isinstance(value, str) or not re.fullmatch(r"https?://[!-~]+", value):
        return False
    try:
        return bool(urlsplit(value).hostname)
    except ValueError:
        return False


_PACKAGE = _matching(r"[a-z0-9][a-z0-9.+-]+", "names of Debian packages, of the server's own architecture")
_NETWORKS = "addresses or networks such as 10.0.0.0/8 or 2001:db8::/32"
_ITEMS = [
    "as",
    "core",
    "cpu",
    "data",
    "fsize",
    "locks",
    "maxlogins",
    "maxsyslogins",
    "memlock",
    "msgqueue",
    "nice",
    "nofile",
    "nproc",
    "priority",
    "rss",
    "rtprio",
    "sigpending",
    "stack",
]

RULES: dict[str, Rule] = {
    "base_packages.*": _PACKAGE,
    "base_lock_seconds": _between(1, DAY),
    "base_limits.*.domain": _matching(r"\*|%|[@%]?[A-Za-z0-9_][A-Za-z0-9_.:-]*", "a user, @group, uid range or *"),
    "base_limits.*.item": Rule(f"one of {', '.join(_ITEMS)}", lambda value: value in _ITEMS),
    "base_limits.*.value": Rule("a whole number, or unlimited", _is_limit),
    "base_shm_percent": _between(1, 95, null=True),
    "base_sysctl.*": Rule("a whole number, a line of text, or null", _is_parameter, null=True),
    "base_firewall_open.*.port": Rule("1 to 65535, or a range such as 9100-9110", is_port_range),
    "base_firewall_open.*.source": Rule(_NETWORKS, _is_networks),
    "base_firewall_open.*.comment": Rule("at most 100 characters, without quotes and backslashes", _is_comment),
    "base_firewall_ssh_sources.*": Rule(_NETWORKS, is_network),
    "base_firewall_gateway_sources.*": Rule(_NETWORKS, is_network),
    "base_firewall_revert_seconds": _between(20, 3600),
    # Not choices of the role: its default is the plan's, and Ansible judges it before there is one.
    "cuda_source": Rule("debian, configured", lambda value: value in ("debian", "configured")),
    "cuda_packages.*": _PACKAGE,
    "cuda_version": _matching(r"[0-9]{1,2}\.[0-9]{1,2}", "major and minor, such as '12.8'"),
    "cuda_sm": _matching(r"sm_[0-9]{2,3}[a-z]?", "an architecture such as sm_90"),
    "cuda_lock_seconds": _between(1, DAY),
    "engines_pythons.*": _matching(r"/[A-Za-z0-9._+/-]+", "absolute paths, such as /opt/python3.12/bin/python3"),
    "engines_keep": _between(0, 20),
    "engines_index_mirrors.*": Rule(
        "addresses with http:// or https://, or an empty text", lambda value: value == "" or _is_url(value)
    ),
    "engines_index_url": Rule(
        "an address with http:// or https://, or an empty text", lambda value: value == "" or _is_url(value)
    ),
    "engines_extra_index_urls.*": Rule("addresses with http:// or https://", _is_url),
    "engines_find_links.*": Rule(
        "folders of the controller, or addresses with http:// or https://", _is_place_of_wheels
    ),
    "serving_crash_starts": _between(1, 1000),
    "serving_crash_seconds": _between(60, 30 * DAY),
    "serving_reachable.*": Rule(_NETWORKS, is_network),
    "models_endpoint.*": Rule("addresses with http:// or https://", _is_url, null=True),
    "models_token_file": _matching(r"|[^\x00-\x1f]{1,500}", "a file of the controller, or an empty text"),
    "models_token": _matching(r"|[!-~]{1,500}", "one word of ASCII letters, digits and signs"),
    "models_token_hub": Rule("huggingface, modelscope", lambda value: value in ("huggingface", "modelscope")),
    "models_mount.source": _matching(
        r"[A-Za-z0-9_.:\[\]-]+:/[!-$&-~]*|UUID=[0-9A-Fa-f-]{4,36}|LABEL=[A-Za-z0-9_.-]{1,16}",
        "a share as host:/path, or a filesystem as UUID=... or LABEL=...",
    ),
    "models_mount.fstype": Rule(f"one of {', '.join((*SHARES, *DEVICES))}", lambda one: one in (*SHARES, *DEVICES)),
    "models_mount.options": _matching(r"[A-Za-z0-9_.,=:/+-]*", "options of mount(8), with commas between them"),
    "models_disk.serial": _matching(
        r"[!-~]([ -~]{0,98}[!-~])?", "a disk's serial, as lsblk -d -o NAME,SERIAL shows it"
    ),
    "models_disk.fstype": Rule(f"one of {', '.join(DEVICES)}", lambda one: one in DEVICES),
    "serving_drain_seconds": _between(0, 3600),
    "serving_settle_seconds": _between(0, 600),
    "serving_start_seconds": _between(0, 86_400),
    "gateway_port": _between(1, FIRST_PORT - 1),
    "gateway_bind": Rule("* or an IPv4 or IPv6 address", _is_address),
    "gateway_request_timeout_seconds": _between(1, DAY),
    "gateway_hold_seconds": _between(0, 3600),
    "gateway_body_limit_kib": _between(16, 65536),
    "gateway_max_connections": _between(1, 100000),
}
"""By variable; `.*` stands for every element of a list and every key of a mapping."""

ADDRESSES = {
    *("engines_index_url", "engines_extra_index_urls", "engines_index_mirrors", "engines_find_links"),
    *("models_endpoint", "models_token"),
}
"""Addresses, which may carry a password, and passwords themselves: a wrong one is not shown."""
_ENGINES = ("vllm", "sglang", "tensorrt_llm")
_KEYS: dict[str, Rule] = {
    "base_sysctl": _matching(r"[a-z0-9_]+([./][A-Za-z0-9_*-]+)+", "names such as net.core.somaxconn"),
    "engines_pythons": Rule(f"the engines {', '.join(_ENGINES)}", lambda key: key in _ENGINES),
    "engines_index_mirrors": Rule("addresses of indexes, with http:// or https://", _is_url),
}
"""By variable that is a mapping: what its keys may be."""


def problems(variable: str, value: Any) -> Iterator[Problem]:
    """Yield what is wrong with the value of a variable whose type is right."""
    for name, rule in RULES.items():
        if name.split(".")[0] == variable:
            for path, one in _reach((variable,), name.split(".")[1:], value):
                if not rule.accepts(one) and not (rule.null and one is None):
                    yield Problem(path, one, allowed(rule.allowed), secret=variable in ADDRESSES)
    if variable in _KEYS:
        words, accepts = _KEYS[variable].allowed, _KEYS[variable].accepts
        for key in value:
            if not accepts(key):
                yield Problem((variable, key), value[key], allowed(words), secret=variable in ADDRESSES)


def _reach(path: Path, steps: list[str], value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values, with their places, that the steps of a rule lead to; an optional key may be absent."""
    if not steps:
        yield path, value
    elif steps[0] == "*":
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _reach((*path, key), steps[1:], one)
    elif steps[0] in value:
        yield from _reach((*path, steps[0]), steps[1:], value[steps[0]])


def contradictions(knobs: Mapping[str, Any], ssh_port: object = 22) -> Iterator[Problem]:
    """Yield what cannot be together, over all roles; `knobs` are values, each good by itself."""
    if knobs["base_firewall_enabled"] and "nftables" not in knobs["base_packages"]:
        words = "the packet filter needs nftables: add it, or set base_firewall_enabled: false"
        yield Problem(("base_packages",), knobs["base_packages"], words)
    if whole(knobs["gateway_port"]) == (whole(ssh_port) or 22):
        yield Problem(("gateway_port",), knobs["gateway_port"], "SSH is on this port: choose another one")
    yield from _limits(knobs["base_limits"])
    yield from _cuda(knobs)
    yield from _store(knobs["models_mount"], knobs["models_disk"])


def _limits(limits: list[Mapping[str, Any]]) -> Iterator[Problem]:
    hard = {(one["domain"], one["item"]): whole(one["value"]) for one in limits if one["type"] == "hard"}
    for index, one in enumerate(limits):
        number, most = whole(one["value"]), hard.get((one["domain"], one["item"]))
        if one["type"] == "soft" and number is not None and most is not None and number > most:
            words = f"the hard limit of {one['item']} for {one['domain']} is {most}: set at most that"
            yield Problem(("base_limits", index, "value"), one["value"], words)


def _cuda(knobs: Mapping[str, Any]) -> Iterator[Problem]:
    version = knobs.get("cuda_version")
    for index, name in enumerate(knobs.get("cuda_packages") or []):
        named = re.fullmatch(r"cuda-toolkit-([0-9]+)-([0-9]+)", name)
        if version and named and f"{named[1]}.{named[2]}" != version:
            words = f"cuda_version is {version}: name the packages of that version, or its version"
            yield Problem(("cuda_packages", index), name, words)


def _store(mount: Mapping[str, Any], disk: Mapping[str, Any]) -> Iterator[Problem]:
    if mount and disk:
        yield Problem(("models_disk",), disk, "models_mount is set, too, and the store has one filesystem: remove one")
    # Ansible takes an empty mapping for one that lacks what is required in it, so the specification requires nothing.
    for variable, value, key in (("models_mount", mount, "source"), ("models_disk", disk, "serial")):
        if value and key not in value:
            yield Problem((variable, key), None, "", missing=True)
    is_share = ":/" in mount.get("source", ":/")
    if "source" in mount and mount.get("fstype") and (mount["fstype"] in SHARES) != is_share:
        words = f"of {mount['source']} it is one of {', '.join(SHARES if is_share else DEVICES)}"
        yield Problem(("models_mount", "fstype"), mount["fstype"], words)
