"""Who a machine is, and how it is reached: name, address, host keys, the key that opens it."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Sequence
from pathlib import Path

from sim.machine import sources
from sim.machine.common import Sim, read_json, run, write_atomically

KEY_KINDS = ("ecdsa", "ed25519")
"""Of host keys; finding the primes of an RSA key would take longer than all else about a new machine."""


def key_file(sim: Sim) -> Path:
    """Return the private key that opens every machine of the simulation."""
    return sim.state / "ssh/id_ed25519"


def known_hosts_file(sim: Sim) -> Path:
    """Return the file of the machines' host keys."""
    return sim.state / "ssh/known_hosts"


def make_key(sim: Sim) -> None:
    """Make the key pair, once."""
    file = key_file(sim)
    if file.exists() and file.with_suffix(".pub").exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.chmod(0o700)
    file.unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpuready simulation", "-f", str(file)])


def give(sim: Sim, root: Path, name: str, address: str) -> list[str]:
    """Make the root a machine of its own; return its host keys."""
    _write(root, "etc/hostname", f"{name}\n")
    _write(root, "etc/hosts", f"127.0.0.1 localhost\n{address} {name}\n::1 localhost ip6-localhost ip6-loopback\n")
    _write(root, "etc/machine-id", f"{uuid.uuid4().hex}\n")
    # It must sort before Debian's own 80-container-host0.network, else the machine takes a link-local address.
    _write(
        root,
        "etc/systemd/network/10-host0.network",
        f"[Match]\nName=host0\n\n[Network]\nAddress={address}/{sim.subnet.prefixlen}\nGateway={sim.gateway}\n"
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n",
    )
    servers = sources.name_servers()
    if servers:
        (root / "etc/resolv.conf").unlink(missing_ok=True)
        _write(root, "etc/resolv.conf", servers)
    ssh = root / "root/.ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    _write(root, "root/.ssh/authorized_keys", key_file(sim).with_suffix(".pub").read_text())
    (ssh / "authorized_keys").chmod(0o600)
    for old in (root / "etc/ssh").glob("ssh_host_*"):
        old.unlink()
    for kind in KEY_KINDS:
        file = root / f"etc/ssh/ssh_host_{kind}_key"
        run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", f"root@{name}", "-f", str(file)])
    keys = sorted((root / "etc/ssh").glob("ssh_host_*_key.pub"))
    return [" ".join(key.read_text().split()[:2]) for key in keys]


def _write(root: Path, name: str, text: str) -> None:
    (root / name).write_text(text)


def write_known_hosts(sim: Sim) -> None:
    """Write the host keys of all machines, as they were made; nothing is trusted on first sight."""
    lines = []
    for file in sorted((sim.state / "machines").glob("[a-z]*.json")):
        data = read_json(file)
        lines += [f"{data['name']},{data['address']} {key}" for key in data.get("host_keys", [])]
    write_atomically(known_hosts_file(sim), "".join(f"{line}\n" for line in lines))


def ssh_options(sim: Sim) -> list[str]:
    """Return the options with which ssh trusts the simulation's keys and no others."""
    return [
        "-o",
        f"UserKnownHostsFile={known_hosts_file(sim)}",
        "-o",
        "GlobalKnownHostsFile=/dev/null",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "IdentitiesOnly=yes",
    ]


def ssh_argv(sim: Sim, address: str, command: Sequence[str] = (), *, quote: bool = True) -> list[str]:
    """Return the ssh command line that runs the command as root."""
    words = [shlex.join(command)] if quote and command else list(command)
    return [
        "ssh",
        "-F",
        "/dev/null",
        "-i",
        str(key_file(sim)),
        *ssh_options(sim),
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=5",
        "-o",
        "LogLevel=ERROR",
        f"root@{address}",
        *words,
    ]
