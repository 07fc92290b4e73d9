"""What a simulated machine takes over from the outside: package mirrors, CAs, name servers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sim.machine.common import run

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
HOST_CAS = Path("/usr/local/share/ca-certificates")
RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
TAKEN_OVER = re.compile(r'^Acquire::(?:https?::Proxy|Check-Valid-Until|Check-Date) ".*";$')


def host_mirrors(etc: Path = Path("/etc")) -> dict[str, str]:
    """Return the Debian mirrors that the outside's own apt uses: keys `main` and `security`.

    Empty where the outside is not Debian; mmdebstrap then takes its own default.
    """
    release = (etc / "os-release").read_text() if (etc / "os-release").exists() else ""
    if not re.search(r"^ID=debian$", release, re.MULTILINE):
        return {}
    codename = re.search(r"^VERSION_CODENAME=(\S+)$", release, re.MULTILINE)
    if codename is None:
        return {}
    found: dict[str, str] = {}
    for uri, suite, components in _entries(etc / "apt"):
        if "main" not in components.split() or not uri.startswith(("http://", "https://")):
            continue
        if suite == codename[1]:
            found.setdefault("main", uri)
        elif suite == f"{codename[1]}-security":
            found.setdefault("security", uri)
    return found if "main" in found else {}


def _entries(apt: Path) -> list[tuple[str, str, str]]:
    """Return (address, suite, components) of every source of packages that apt reads."""
    entries: list[tuple[str, str, str]] = []
    folder = apt / "sources.list.d"
    for file in [apt / "sources.list", *sorted(folder.glob("*.list"))]:
        lines = file.read_text().splitlines() if file.exists() else []
        for line in lines:
            match = re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.*)", line.strip())
            if match:
                entries.append((match[1], match[2], match[3]))
    for file in sorted(folder.glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", file.read_text()):
            fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
            if "deb" not in fields.get("Types", "").split() or fields.get("Enabled", "yes") == "no":
                continue
            entries += [
                (uri, suite, fields.get("Components", ""))
                for uri in fields.get("URIs", "").split()
                for suite in fields.get("Suites", "").split()
            ]
    return entries


def mirror_lines(suite: str, mirrors: dict[str, str]) -> list[str]:
    """Return the `deb` lines for mmdebstrap; none means its own default, with updates and security."""
    if not mirrors:
        return []
    option = f"[signed-by={KEYRING}]"
    lines = [f"deb {option} {mirrors['main']} {name} main" for name in (suite, f"{suite}-updates")]
    if "security" in mirrors:
        lines.append(f"deb {option} {mirrors['security']} {suite}-security main")
    return lines


def as_deb822(one_line_sources: str) -> str:
    """Return sources in the form that a fresh Debian has today, one stanza per mirror."""
    suites: dict[tuple[str, str], list[str]] = {}
    for line in one_line_sources.splitlines():
        match = re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.*)", line.strip())
        if match:
            suites.setdefault((match[1], match[3].strip()), []).append(match[2])
    return "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {' '.join(names)}\nComponents: {components}\nSigned-By: {KEYRING}\n"
        for (uri, components), names in suites.items()
    )


def apt_settings() -> str:
    """Return the outside's apt settings without which its mirrors are not reached (a proxy, a frozen mirror)."""
    lines = run(["apt-config", "dump"], check=False).stdout.splitlines()
    return "".join(f"{line}\n" for line in lines if TAKEN_OVER.match(line))


def name_servers() -> str | None:
    """Return the outside's resolv.conf in a form that works from another machine, or None."""
    for path in RESOLVERS:
        if path.exists():
            text = path.read_text()
            servers = re.findall(r"^nameserver\s+(\S+)", text, re.MULTILINE)
            if any(not server.startswith("127.") and server != "::1" for server in servers):
                return text
    return None


def host_cas() -> list[Path]:
    """Return the extra CA certificates that the outside trusts."""
    return sorted(HOST_CAS.rglob("*.crt")) if HOST_CAS.is_dir() else []


def copy_host_cas(root: Path) -> None:
    """Make the machine trust them as well, as any machine behind the same proxy must."""
    target = root / "usr/local/share/ca-certificates"
    for certificate in host_cas():
        place = target / certificate.relative_to(HOST_CAS)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(certificate, place)
    run(["chroot", str(root), "update-ca-certificates"])
