"""Sources of apt: what the server has, and our own file with the parts of its archive that they lack."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Failure, MachineCannot, Refusal, mask


@dataclass(frozen=True)
class Source:
    """One entry of apt's sources, in either of its two forms."""

    file: str
    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)
    """Further fields in deb822's names, such as Signed-By."""


_OPTION_NAMES = {
    "signed-by": "Signed-By", "arch": "Architectures", "trusted": "Trusted", "lang": "Languages",
    "check-valid-until": "Check-Valid-Until", "allow-insecure": "Allow-Insecure", "by-hash": "By-Hash",
}  # fmt: skip
_OWN_FIELDS = ("types", "uris", "suites", "components", "enabled")


def read_sources(machine: Machine) -> list[Source]:
    """Return every enabled binary source of the server."""
    sources = _one_line_sources("/etc/apt/sources.list", machine.read("/etc/apt/sources.list") or "")
    folder = machine.path("/etc/apt/sources.list.d")
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = f"/etc/apt/sources.list.d/{entry.name}"
        if entry.suffix == ".list":
            sources += _one_line_sources(name, machine.read(name) or "")
        elif entry.suffix == ".sources":
            sources += _deb822_sources(name, machine.read(name) or "")
    return sources


def _one_line_sources(file: str, text: str) -> list[Source]:
    sources = []
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if not found:
            continue
        options = {}
        for option in (found.group(1) or "").split():
            name, _, value = option.partition("=")
            if name.lower() in _OPTION_NAMES:
                options[_OPTION_NAMES[name.lower()]] = value.replace(",", " ")
        sources.append(Source(file, (found.group(2),), (found.group(3),), tuple(found.group(4).split()), options))
    return sources


def _deb822_sources(file: str, text: str) -> list[Source]:
    sources = []
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", kept):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace() and name:
                fields[name] += f"\n{line}"
            elif ":" in line:
                name, value = line.split(":", 1)
                fields[name] = value.strip()
        lower = {name.lower(): value for name, value in fields.items()}
        if "deb" not in lower.get("types", "").split() or lower.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        uris, suites, components = (tuple(lower.get(key, "").split()) for key in ("uris", "suites", "components"))
        rest = {name: value for name, value in fields.items() if name.lower() not in _OWN_FIELDS}
        sources.append(Source(file, uris, suites, components, rest))
    return sources


def components_source(sources: Sequence[Source], own: str, suite: str, components: Sequence[str], keyring: str) -> str:
    """Return the text of our source file, empty where nothing lacks: the server's own mirror with what it lacks."""
    others = [source for source in sources if source.file != own and suite in source.suites]
    offered = {component for source in others for component in source.components}
    lacking = [component for component in components if component not in offered]
    if not lacking:
        return ""
    main = next((source for source in others if "main" in source.components), None)
    if main is None:
        what = f"no apt source of this server offers the main part of {suite}"
        why = f"{own} takes the mirror from there"
        raise Refusal(Failure("packages.no_main", what, why, f"name a mirror of {suite} in /etc/apt/sources.list.d"))
    options = dict(main.options)
    if keyring and not any(name.lower() in ("signed-by", "trusted") for name in options):
        options["Signed-By"] = keyring
    lines = [
        "# Written by gpuready; a change made here by hand is lost on the next run.",
        "Types: deb",
        f"URIs: {' '.join(main.uris)}",
        f"Suites: {suite}",
        f"Components: {' '.join(lacking)}",
        *(f"{name}:{'' if value.startswith(chr(10)) else ' '}{value}" for name, value in options.items()),
    ]
    return "\n".join(lines) + "\n"


def offer_components(machine: Machine, own: str, components: Sequence[str], check: bool) -> list[Change]:
    """Keep our source file, `own`, such that the server's sources offer these parts of the distribution's archive."""
    release = machine.read("/etc/os-release") or ""
    found = re.search(r"^VERSION_CODENAME=\"?([a-z]+)", release, re.MULTILINE)
    if not found:
        raise MachineCannot(
            Failure("packages.no_codename", "/etc/os-release names no VERSION_CODENAME", "", "use a released Debian")
        )
    keyrings = [f"/usr/share/keyrings/debian-archive-keyring.{end}" for end in ("pgp", "gpg")]
    keyring = next((path for path in keyrings if machine.path(path).exists()), "")
    text = components_source(read_sources(machine), own, found.group(1), components, keyring)
    now = machine.read(own) or ""
    if now == text:
        return []
    if text and not check:
        # Credentials of the server's own mirror stay with root, as apt itself reads its sources.
        machine.write(own, text, 0o644 if mask(text) == text else 0o600)
    elif not check:
        machine.remove(own)
    return [Change(own, now, text)]
