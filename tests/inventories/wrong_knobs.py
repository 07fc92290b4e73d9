"""Wrong variables of the roles: types, ranges, forms, unknown names, contradictions, and of the proxy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.inventories.case import DECLARED, Case, as_yaml

RANGES = {
    "base_lock_seconds": (1, 86400),
    "base_shm_percent": (1, 95),
    "base_firewall_revert_seconds": (20, 3600),
    "cuda_lock_seconds": (1, 86400),
    "gateway_port": (1, 18099),
    "gateway_request_timeout_seconds": (1, 86400),
    "gateway_hold_seconds": (0, 3600),
    "gateway_body_limit_kib": (16, 65536),
    "gateway_max_connections": (1, 100000),
}
LISTS = (
    "base_packages",
    "base_limits",
    "base_firewall_open",
    "base_firewall_ssh_sources",
    "base_firewall_gateway_sources",
    "cuda_packages",
    "engines_extra_index_urls",
    "engines_find_links",
)
LIMIT = {"domain": "*", "type": "soft", "item": "nofile", "value": 1024}


def knob(kind: str, name: str, value: Any, *says: str, at: str = "", **more: Any) -> Case:
    """Return a case in which one variable of a role is wrong, at a place within it or as a whole."""
    return Case(kind, f"{name}{at}", says, as_yaml({**DECLARED, name: value, **more}))


def types_and_ranges(dice: random.Random) -> Iterator[Case]:
    """Yield values of a wrong type, and numbers beyond their range."""
    for name, (low, high) in RANGES.items():
        yield knob("a role's number below its range", name, low - 1, f"= {low - 1} is refused", f"{low} to {high}")
        yield knob("a role's number above its range", name, high + 1, f"= {high + 1} is refused", f"{low} to {high}")
        value = dice.choice([True, "many", 1.5, "\uff11\uff10", [5]])
        yield knob("no number for a role", name, value, "is refused", "allowed is a whole number in decimal digits")
        yield knob("a huge number for a role", name, 10**30, "= 1000000000000000000000000000000", f"{low} to {high}")
    for name in LISTS:
        yield knob(
            "no list for a role", name, dice.choice(["a,b", {"a": 1}, 1, True]), "is refused", "allowed is a list"
        )
        yield knob("null for a role", name, None, "= null is refused", "allowed is a list")
    for value in ("false", "no", 0, None, "0"):
        yield knob("no boolean for a role", "base_firewall_enabled", value, "is refused", "allowed is true or false")
    for value in ("a", [1], None):
        yield knob("no mapping for a role", "base_sysctl", value, "is refused", "allowed is a mapping")
    for name in ("cuda_version", "cuda_sm", "gateway_bind", "engines_index_url"):
        yield knob("no text for a role", name, dice.choice([12.8, True, ["a"]]), "is refused", "allowed is a text")


def forms(_: random.Random) -> Iterator[Case]:
    """Yield texts of a wrong form."""
    for name in ("base_packages", "cuda_packages"):
        for value in ("a b", "../x", "x; reboot", "Caps", "", "-y", "x\n"):
            values = ["nftables", value]
            yield knob("no name of a package", name, values, ascii(value), "names of Debian packages", at="[1]")
    for value in ("12", "12.8.1", "twelve", "12.8\n"):
        yield knob("no CUDA version", "cuda_version", value, ascii(value), "major and minor")
    for value in ("90", "sm90", "sm_90; x"):
        yield knob("no architecture", "cuda_sm", value, ascii(value), "such as sm_90")
    yield knob("no source of packages", "cuda_source", "nvidia", "'nvidia'", "debian, configured")
    for value in ("everywhere", "0.0.0.0:80", "10.0.0.0/8", "::1%lo", "* ", "1.2.3"):
        yield knob("no address to listen on", "gateway_bind", value, ascii(value), "IPv4 or IPv6 address")
    for value in ("pypi.org", "ftp://x/y", "https://me:hunter2@", "https://a b", "me:hunter2@pypi.org"):
        yield knob("no address of an index", "engines_index_url", value, "is refused", "http:// or https://")
        yield knob("no address of an index", "engines_extra_index_urls", [value], "is refused", "http", at="[0]")
    for value in ("ftp://x", "", "a\nb"):
        yield knob("no place of wheels", "engines_find_links", [value], "is refused", "folders", at="[0]")
    for value in ("1.2.3.4.5", "10.0.0.0/33", "me", "", "10.0.0.0/8 ", "\uff11.1.1.1", "10.0.0.0/8; drop"):
        for name in ("base_firewall_ssh_sources", "base_firewall_gateway_sources"):
            yield knob("no network", name, ["10.0.0.0/8", value], ascii(value), "such as 10.0.0.0/8", at="[1]")


def nested(_: random.Random) -> Iterator[Case]:
    """Yield openings, limits and kernel parameters that are wrong in themselves."""
    for port in (0, 65536, "x", "9110-9100", "1-2-3", "80,81", True, None, "80; drop", "\uff18\uff10"):
        says = ("is refused", "1 to 65535, or a range such as 9100-9110")
        yield knob("no port of an opening", "base_firewall_open", [{"port": port}], *says, at="[0].port")
    for proto in ("sctp", "TCP", 6, None):
        yield knob(
            "no protocol of an opening",
            "base_firewall_open",
            [{"port": 1, "proto": proto}],
            "is refused",
            at="[0].proto",
        )
    for source in ("me", ["10.0.0.0/8", "x"], {"a": 1}, 7):
        yield knob(
            "no source of an opening",
            "base_firewall_open",
            [{"port": 1, "source": source}],
            "is refused",
            at="[0].source",
        )
    for comment in ('say "hi"', "a\nb", "x" * 101, "a\\b", "\u202e"):
        yield knob(
            "no comment of an opening",
            "base_firewall_open",
            [{"port": 1, "comment": comment}],
            "is refused",
            at="[0].comment",
        )
    yield knob("an opening without a port", "base_firewall_open", [{"proto": "udp"}], "is not set", at="[0].port")
    yield knob(
        "a misspelled key of an opening",
        "base_firewall_open",
        [{"port": 1, "sorce": "::1"}],
        "did you mean source?",
        at="[0].sorce",
    )
    yield knob(
        "an opening that is no mapping",
        "base_firewall_open",
        [9100],
        "= 9100 is refused",
        "allowed is a mapping",
        at="[0]",
    )
    for key, value in (("domain", "a b"), ("type", "medium"), ("item", "files"), ("value", "much"), ("value", 1.5)):
        yield knob("no limit", "base_limits", [{**LIMIT, key: value}], ascii(value), at=f"[0].{key}")
    for key in LIMIT:
        one = {name: value for name, value in LIMIT.items() if name != key}
        yield knob("a limit that lacks a key", "base_limits", [one], "is not set", at=f"[0].{key}")
    for name in ("swappiness", "vm.swap piness", "vm/../x", "-w"):
        yield knob("no name of a kernel parameter", "base_sysctl", {name: 1}, "such as net.core.somaxconn")
    for setting in (True, 1.5, [1], "a\nb", ""):
        yield knob(
            "no value of a kernel parameter", "base_sysctl", {"vm.swappiness": setting}, "is refused", "a whole number"
        )


def names_and_contradictions(_: random.Random) -> Iterator[Case]:
    """Yield unknown variables of every role, and values that cannot be together."""
    misspelled = {
        "base_pakages": "base_packages",
        "cuda_versoin": "cuda_version",
        "engines_index": "engines_index_url",
        "gateway_prot": "gateway_port",
        "base_firewal_open": "base_firewall_open",
    }
    for name, meant in misspelled.items():
        yield knob("a misspelled variable of a role", name, 1, "no such variable", f"did you mean {meant}?")
    for name in ("agent_x", "models_path", "serving_flags", "preflight_off"):
        yield knob("an unknown variable of a role", name, 1, "no such variable")
    yield knob(
        "a packet filter without its package", "base_packages", ["vim"], "['vim']", "the packet filter needs nftables"
    )
    yield knob("the gateway on the port of SSH", "gateway_port", 22, "= 22 is refused", "SSH is on this port")
    hard = [{**LIMIT, "value": 9}, {**LIMIT, "type": "hard", "value": 8}]
    yield knob("a soft limit above the hard one", "base_limits", hard, "= 9 is refused", "is 8", at="[0].value")
    packages = {"cuda_packages": ["cuda-toolkit-12-8"]}
    says = ("'cuda-toolkit-12-8'", "cuda_version is 12.4")
    yield Case(
        "packages of another CUDA version",
        "cuda_packages[0]",
        says,
        as_yaml({**DECLARED, "cuda_version": "12.4", **packages}),
    )
    for value in ({"http": "proxy:3128"}, {"https": "ftp://p:1"}, {}, {"htp": "http://p:1"}, {"http": "http://p"}):
        yield knob("no proxy", "gpuready_proxy", value)
    yield knob("no proxy", "gpuready_proxy", {"http": "http://p:1", "no_proxy": ["a b"]}, "'a b'", at=".no_proxy[0]")
