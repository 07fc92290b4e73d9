"""The simulation's network: one bridge, one nftables table of its own, ip_forward."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sim.machine.common import CANNOT, Sim, SimError, read_json, run, write_atomically

IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


def _ip(*args: str) -> list[dict[str, Any]]:
    """Return what `ip -j` says."""
    said = run(["ip", "-j", "-4", *args], check=False)
    if said.returncode or not said.stdout.strip():
        return []
    data = json.loads(said.stdout)
    return [entry for entry in data if isinstance(entry, dict) and entry]


def taken_by(
    subnet: ipaddress.IPv4Network, own: str, addresses: Iterable[dict[str, Any]], routes: Iterable[dict[str, Any]]
) -> str | None:
    """Return who already uses a part of the range, or None; `own` is the simulation's bridge."""
    for link in addresses:
        name = str(link.get("ifname", ""))
        if name == own:
            continue
        for entry in link.get("addr_info", []):
            used = ipaddress.IPv4Network(f"{entry['local']}/{entry.get('prefixlen', 32)}", strict=False)
            if used.overlaps(subnet):
                return f"{entry['local']}/{entry.get('prefixlen', 32)} on {name}"
    for route in routes:
        target = str(route.get("dst", "default"))
        if target == "default" or route.get("dev") == own:
            continue
        try:
            used = ipaddress.IPv4Network(target, strict=False)
        except ValueError:
            continue
        # 0.0.0.0/1 and 128.0.0.0/1 are a VPN's way to say default.
        if used.prefixlen > 1 and used.overlaps(subnet):
            return f"the route {target} on {route.get('dev', 'no device')}"
    return None


def range_problem(sim: Sim) -> SimError | None:
    """Return the refusal when the range is used by something else here."""
    holder = taken_by(sim.subnet, sim.bridge, _ip("addr"), _ip("route"))
    if holder is None:
        return None
    return SimError(
        f"the address range {sim.subnet} is already used by {holder}",
        "name a free one, e.g. GPUREADY_SIM_SUBNET=10.99.1.0/24",
        CANNOT,
    )


def forward_problem(sim: Sim) -> SimError | None:
    """Return the refusal when another firewall here drops what is forwarded to and from the range."""
    said = run(["nft", "-j", "list", "chains"], check=False)
    if said.returncode:
        return None
    chains = [item["chain"] for item in json.loads(said.stdout).get("nftables", []) if "chain" in item]
    for chain in chains:
        if chain.get("hook") != "forward" or chain.get("policy") != "drop" or chain.get("family") == "ip6":
            continue
        rules = run(["nft", "list", "table", chain["family"], chain["table"]], check=False).stdout
        if str(sim.subnet) in rules:
            continue
        return SimError(
            f"the firewall here (table {chain['family']} {chain['table']}, chain {chain['name']}) drops forwarded"
            f" traffic, so machines in {sim.subnet} would not reach the package mirrors",
            f"allow the range: `iptables -I FORWARD -s {sim.subnet} -j ACCEPT` and the same with -d",
            CANNOT,
        )
    return None


def is_up(sim: Sim) -> bool:
    """Say whether the bridge and the table are there."""
    has_bridge = run(["ip", "link", "show", sim.bridge], check=False).returncode == 0
    return has_bridge and run(["nft", "list", "table", "ip", sim.table], check=False).returncode == 0


def ruleset(sim: Sim) -> str:
    """Return the table; loading it twice leaves one."""
    return f"""table ip {sim.table}
delete table ip {sim.table}
table ip {sim.table} {{
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {sim.subnet} oifname != "{sim.bridge}" masquerade
    }}
}}
"""


def up(sim: Sim, ip_forward: Path = IP_FORWARD) -> bool:
    """Bring the network up; return whether that changed anything. What was set before is recorded first."""
    record = sim.state / "network.json"
    if not read_json(record):
        problem = range_problem(sim) or forward_problem(sim)
        if problem:
            raise problem
        before = {"subnet": str(sim.subnet), "ip_forward": ip_forward.read_text().strip()}
        write_atomically(record, json.dumps(before, indent=2) + "\n")
    changed = False
    if run(["ip", "link", "show", sim.bridge], check=False).returncode:
        run(["ip", "link", "add", sim.bridge, "type", "bridge"])
        changed = True
    run(["ip", "addr", "replace", f"{sim.gateway}/{sim.subnet.prefixlen}", "dev", sim.bridge])
    run(["ip", "link", "set", sim.bridge, "up"])
    if run(["nft", "list", "table", "ip", sim.table], check=False).returncode:
        run(["nft", "-f", "-"], stdin=ruleset(sim))
        changed = True
    if ip_forward.read_text().strip() != "1":
        ip_forward.write_text("1\n")
        changed = True
    return changed


def forget(sim: Sim, address: str) -> None:
    """Forget which machine had an address: the next one with it has another link address."""
    run(["ip", "neigh", "flush", "to", address, "dev", sim.bridge], check=False)


def down(sim: Sim, ip_forward: Path = IP_FORWARD) -> list[str]:
    """Take the network away and restore what was set before; return what was done, in words."""
    done: list[str] = []
    if run(["ip", "link", "show", sim.bridge], check=False).returncode == 0:
        run(["ip", "link", "delete", sim.bridge])
        done.append(f"removed the bridge {sim.bridge}")
    if run(["nft", "list", "table", "ip", sim.table], check=False).returncode == 0:
        run(["nft", "delete", "table", "ip", sim.table])
        done.append(f"removed the nftables table ip {sim.table}")
    record = sim.state / "network.json"
    before = read_json(record).get("ip_forward")
    if before is not None:
        if ip_forward.read_text().strip() != before:
            ip_forward.write_text(f"{before}\n")
        done.append(f"net.ipv4.ip_forward is {before} again, as before")
        record.unlink()
    return done
