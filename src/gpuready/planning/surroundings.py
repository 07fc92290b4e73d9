"""What the server's surroundings mean for a run: where it must be able to write, its clock, its locale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning import clock
from gpuready.planning.plan import MODELS_FOLDER

TARGETS = (
    "/etc/apt/apt.conf.d",
    "/etc/apt/sources.list.d",
    "/etc/gpuready",
    "/etc/needrestart/conf.d",
    "/etc/security/limits.d",
    "/etc/sysctl.d",
    "/etc/systemd/system",
    "/opt/gpuready",
    "/run",
    MODELS_FOLDER,
    "/usr",
    "/var/cache/apt",
    "/var/lib/apt",
    "/var/lib/dpkg",
    "/var/lib/gpuready",
)
"""Every folder that stages write to; packages write to /usr and /var."""
EXECUTED = ("/opt/gpuready", "/usr", "/var/lib/dpkg")
"""Of these, those from which programs run: engines, packages, and the packages' own scripts."""

_READ_ONLY_FIX = (
    "mount it writable, or take an ordinary Debian or Ubuntu where the system is an image that must not be changed; "
    "after a disk error a filesystem turns read-only by itself: see dmesg"
)

_DENIED_FIX = "run with the rights of root (become), see its owner and mode; an NFS share needs no_root_squash"


def target_failures(host: str, facts: Mapping[str, Any], places_models: bool) -> list[Failure]:
    """Check that everything which stages write can be written; one sentence per cause.

    `places_models` says whether gpuready puts a model of its own under /srv/models. Else nothing is written there, and
    it may be a share of weights that this server only reads.
    """
    causes: dict[tuple[str, str], list[str]] = {}
    for path, found in facts["targets"].items():
        is_only_read = path == MODELS_FOLDER and not places_models and found["place"] == path
        # Root is nobody on most shares, and need not be more where nothing is written.
        harmless = ("read-only", "denied") if found["mount"] == path else ("read-only",)
        if found["problem"] and not (is_only_read and found["problem"] in harmless):
            # What is above all of them says it once.
            where = (found["mount"] or found["place"]) if found["problem"] == "read-only" else found["place"]
            causes.setdefault((found["problem"], where), []).append(path)
        elif found["noexec"] and path in EXECUTED:
            causes.setdefault(("noexec", found["mount"] or found["place"]), []).append(path)
    return [_target_failure(host, problem, where, paths) for (problem, where), paths in causes.items()]


def _target_failure(host: str, problem: str, where: str, paths: list[str]) -> Failure:
    said, fix = {
        "read-only": (f"{where} is mounted read-only", _READ_ONLY_FIX),
        "immutable": (f"{where} is immutable", f"chattr -ia {where}"),
        "no folder": (f"{where} is no folder", "make it one, or remove it"),
        "denied": (f"{where} may not be written", _DENIED_FIX),
        "noexec": (f"{where} is mounted noexec", f"mount -o remount,exec {where}, and correct /etc/fstab"),
    }[problem]
    needed = "runs programs from" if problem == "noexec" else "writes to"
    why = f"gpuready {needed} {', '.join(paths)}"
    return Failure(f"preflight.{problem.replace(' ', '_').replace('-', '_')}", f"host {host}: {said}", why, fix)


def notes(facts: Mapping[str, Any], asked: float, answered: float) -> list[str]:
    """Return what an operator should know about the server, though it stops nothing.

    `asked` and `answered` are this machine's times around the question to the server.
    """
    found = [clock.difference(facts["clock"], asked, answered)]
    by_locale: dict[str, list[str]] = {}
    for variable, name in facts["unknown_locales"].items():
        by_locale.setdefault(name, []).append(variable)
    found += [
        f"the locale {name} ({', '.join(variables)}) is not generated there: we work without it, others complain; "
        "generate it (locale-gen), or correct /etc/default/locale, /etc/environment or SendEnv of your SSH client"
        for name, variables in by_locale.items()
    ]
    return [note for note in found if note]
