"""The packet filter's rules: what an operator wants open, read and written in nft's language."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuready.outcome import Failure, Refusal

TABLE = "inet gpuready"
UNIT = "gpuready-firewall.service"
FIRST_OF_PEOPLE = 1000
"""The first uid that is not the system's own (UID_MIN of login.defs); the gateway's user and the engines' lie below."""
CLEAR = f"add table {TABLE}\ndelete table {TABLE}\n"


@dataclass(frozen=True)
class Open:
    """One port, or range of ports, that is open to some sources, or to all."""

    port: str
    proto: str = "tcp"
    source: Sequence[str] = ()
    comment: str = ""

    def lines(self) -> list[str]:
        """Return the rules in nft's language."""
        networks = [ipaddress.ip_network(source, strict=False) for source in self.source]
        what = f"{self.proto} dport {self.port} accept"
        if self.comment:
            what += f' comment "{self.comment}"'
        if not networks:
            return [what]
        lines = []
        for version, word in ((4, "ip"), (6, "ip6")):
            some = [str(network) for network in networks if network.version == version]
            if some:
                lines.append(f"{word} saddr {{ {', '.join(some)} }} {what}")
        return lines


@dataclass(frozen=True)
class Wanted:
    """What is to be open."""

    openings: Sequence[Open] = ()
    ssh_ports: Sequence[int] = (22,)
    """The ports that Ansible is told to use; those on which sshd listens are added on the server."""
    ssh_source: Sequence[str] = ()
    revert_seconds: int = 90
    engine_ports: Sequence[int] = ()
    """Where engines listen on loopback. They check no keys, so people of the server go through the gateway."""


def wanted_from(data: dict[str, Any]) -> Wanted:
    """Read the verb's input; every entry that is wrong is named."""
    problems: list[Failure] = []
    openings = []
    for number, entry in enumerate(data.get("open", [])):
        where = f"base_firewall_open[{number}]" if not entry.get("where") else str(entry["where"])
        opening = Open(
            port=str(entry.get("port", "")),
            proto=str(entry.get("proto") or "tcp"),
            source=_as_list(entry.get("source")),
            comment=str(entry.get("comment") or ""),
        )
        problems += _problems_of(opening, where)
        openings.append(opening)
    ssh = Open(port="22", source=_as_list(data.get("ssh_source")))
    problems += _problems_of(ssh, "base_firewall_ssh_sources")
    seconds = int(data.get("revert_seconds", 90))
    if not 20 <= seconds <= 3600:
        problems.append(Failure("firewall.seconds", f"base_firewall_revert_seconds is {seconds}", "", "set 20 to 3600"))
    if problems:
        raise Refusal(problems)
    ports = [int(port) for port in data.get("ssh_ports", [22])]
    engines = [int(port) for port in data.get("engine_ports", [])]
    return Wanted(openings, ports, ssh.source, seconds, engines)


def _as_list(value: Any) -> list[str]:
    if value in (None, ""):
        return []
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _problems_of(opening: Open, where: str) -> list[Failure]:
    problems = []
    ends = opening.port.split("-")
    numbers = [int(end) for end in ends if end.isdigit()]
    if (
        len(ends) > 2
        or len(numbers) != len(ends)
        or numbers != sorted(numbers)
        or not all(0 < one < 65536 for one in numbers)
    ):
        problems.append(
            Failure(
                "firewall.port",
                f"{where}: port is {opening.port!r}",
                "",
                "give 1 to 65535, or a range such as 9100-9110",
            )
        )
    if opening.proto not in ("tcp", "udp"):
        problems.append(Failure("firewall.proto", f"{where}: proto is {opening.proto!r}", "", "give tcp or udp"))
    for source in opening.source:
        if not _is_network(source):
            fix = "give addresses or networks such as 10.0.0.0/8 or 2001:db8::/32"
            problems.append(Failure("firewall.source", f"{where}: source {source!r} is no network", "", fix))
    if len(opening.comment) > 100 or re.search(r'["\\\n]', opening.comment):
        fix = "at most 100 characters, without quotes, backslashes and line breaks"
        problems.append(Failure("firewall.comment", f"{where}: comment {opening.comment!r} cannot be used", "", fix))
    return problems


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def render(wanted: Wanted, ssh_ports: Iterable[int]) -> str:
    """Return the rules as one transaction: the table is replaced in one step, other tables stay as they are."""
    ssh = Open(port=_ports(ssh_ports), source=wanted.ssh_source, comment="SSH")
    rules = [
        'iifname "lo" accept',
        "ct state established,related accept",
        'meta l4proto { icmp, ipv6-icmp } accept comment "path MTU, neighbours, ping"',
        'udp sport 67 udp dport 68 accept comment "DHCP"',
        'ip6 saddr fe80::/10 udp sport 547 udp dport 546 accept comment "DHCPv6"',
        *ssh.lines(),
        *(line for opening in wanted.openings for line in opening.lines()),
        'counter comment "dropped"',
    ]
    body = "\n".join(f"\t\t{rule}" for rule in rules)
    return (
        "# Written by gpuready; a change made here by hand is lost on the next run.\n"
        f"# Tried out before it was written; loaded at boot by {UNIT}.\n"
        f"{CLEAR}"
        f"table {TABLE} {{\n\tchain input {{\n"
        f"\t\ttype filter hook input priority filter; policy drop;\n{body}\n\t}}\n{_straight_to_engines(wanted)}}}\n"
    )


def _ports(numbers: Iterable[int]) -> str:
    ports = ", ".join(str(port) for port in sorted(set(numbers)))
    return f"{{ {ports} }}" if "," in ports else ports


def _straight_to_engines(wanted: Wanted) -> str:
    """Return the chain that keeps people of the server from the engines' ports; it looks at who sends."""
    if not wanted.engine_ports:
        return ""
    whom = f'oifname "lo" tcp dport {_ports(wanted.engine_ports)} meta skuid >= {FIRST_OF_PEOPLE}'
    return (
        "\tchain output {\n\t\ttype filter hook output priority filter; policy accept;\n"
        f'\t\t{whom} reject with tcp reset comment "engines, past the gateway"\n\t}}\n'
    )
