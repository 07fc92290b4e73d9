"""Base images: what a freshly rented minimal Debian server has on it, and nothing more."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import datetime, timezone
from pathlib import Path

from sim.machine import pool, sources
from sim.machine.common import CANNOT, CHECKOUT, REFUSED, Say, Sim, SimError, quiet, run, tree_hash
from sim.machine.servers import Kind

SUITES = ("trixie", "bookworm")
PACKAGES = (
    "ca-certificates",
    "cron",
    "dbus",
    "iproute2",
    "iputils-ping",
    "kmod",
    "less",
    "libpam-systemd",
    "netbase",
    "openssh-server",
    "procps",
    "python3",
    "sudo",
    "systemd",
    "systemd-sysv",
    "tzdata",
)
HARDWARE = CHECKOUT / "sim/hardware/install.py"
PRESETS = CHECKOUT / "sim/hardware/presets"
MARKER = "etc/gpuready-simulated-machine"
SYSTEM_RECIPE = [CHECKOUT / "sim/machine/image.py", CHECKOUT / "sim/machine/sources.py"]
HARDWARE_RECIPE = [CHECKOUT / "sim/hardware", CHECKOUT / "sim/nvml", CHECKOUT / "sim/engines"]
STANDINS = "usr/lib/gpuready-standin/engines"
MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer")
"""Timers that would take apt's lock in the middle of a test."""


def presets() -> list[str]:
    """Return the names of the hardware presets."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def key(kind: Kind) -> str:
    """Return the image's name: suite, hardware, and a hash over all that it is built from."""
    if kind.suite not in SUITES:
        raise SimError(
            f"{kind.suite} is not a Debian release that the simulation builds", f"take {' or '.join(SUITES)}", REFUSED
        )
    own = own_file(kind.preset)
    if own is None and kind.preset not in presets():
        raise SimError(
            f"{kind.preset} is not a hardware preset of the simulation",
            f"take one of {', '.join(presets())}, or a file such as ./mine.yaml",
            REFUSED,
        )
    if own is not None and not own.is_file():
        raise SimError(f"there is no file {own}", "", REFUSED)
    recipe = [*HARDWARE_RECIPE, *([own] if own else [])]
    return f"{family(kind)}{tree_hash(recipe, _system_key(kind.suite))}"


def _system_key(suite: str) -> str:
    """Return the name of the image of a release without hardware."""
    taken_over = json.dumps(sources.host_mirrors()) + sources.apt_settings()
    return f"{suite}-{tree_hash([*SYSTEM_RECIPE, *sources.host_cas()], taken_over)}"


def own_file(preset: str) -> Path | None:
    """Return the operator's own description of hardware, where one is named and not a preset."""
    return Path(preset).resolve() if preset.endswith((".yaml", ".yml")) or "/" in preset else None


def family(kind: Kind) -> str:
    """Return how the names of all images of a kind begin."""
    own = own_file(kind.preset)
    label = re.sub(r"[^a-z0-9-]+", "-", own.stem.lower()).strip("-") if own else kind.preset
    return f"{kind.suite}-{label}-"


def suite_of(sim: Sim, name: str) -> str:
    """Return the Debian release that an image holds; empty where it does not say."""
    release = sim.pool / "images" / name / "etc/os-release"
    found = re.search(r"^VERSION_CODENAME=(\S+)$", release.read_text() if release.exists() else "", re.MULTILINE)
    return found[1] if found else ""


def check(kind: Kind) -> None:
    """Refuse hardware and releases that there are not, and hardware that is described wrongly."""
    key(kind)
    _install_hardware(kind, "--check")


def ensure(sim: Sim, kind: Kind, say: Say = quiet) -> str:
    """Return the name of the kind's image; build it when there is none of this recipe. Hold the lock."""
    name = key(kind)
    if pool.is_subvolume(sim.pool / "images" / name):
        return name
    check(kind)
    system = _ensure_system(sim, kind.suite, say)
    started = time.monotonic()
    building = pool.scratch(sim, name)
    pool.snapshot(sim, sim.pool / "images" / system, building)
    _install_hardware(kind, "--root", str(building))
    _mark(building, name)
    _keep(sim, building, name, family(kind))
    say(f"put the hardware of {kind.preset} into the image {name} in {time.monotonic() - started:.0f} s")
    return name


def _ensure_system(sim: Sim, suite: str, say: Say) -> str:
    """Return the name of the image of a release without hardware, from which those with some are made."""
    name = _system_key(suite)
    if pool.is_subvolume(sim.pool / "images" / name):
        return name
    say(f"building the image {name}")
    started = time.monotonic()
    building = pool.scratch(sim, name)
    pool.create(building)
    _install_system(sim, suite, building)
    _configure(building)
    _keep(sim, building, name, f"{suite}-")
    say(f"built the image {name} in {time.monotonic() - started:.0f} s")
    return name


def _keep(sim: Sim, building: Path, name: str, family: str) -> None:
    """Keep an image, and not those of other recipes: a machine made from one is a copy of its own."""
    pool.keep_image(sim, building, name)
    for other in pool.images(sim):
        if re.fullmatch(rf"{re.escape(family)}[0-9a-f]{{12}}", other) and other != name:
            pool.delete(sim, sim.pool / "images" / other)


def _install_hardware(kind: Kind, *words: str) -> None:
    """Have the description of the hardware compiled, and installed where `words` say so."""
    preset = str(own_file(kind.preset) or kind.preset)
    done = run([_python(), str(HARDWARE), "--preset", preset, *words], check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["the hardware could not be installed"])[-1]
        raise SimError(said.removeprefix("install.py: ").rstrip("."), "", REFUSED)


def _python() -> str:
    """Return the checkout's own Python, which has what reads YAML."""
    python = CHECKOUT / ".venv/bin/python"
    if not python.exists():
        raise SimError(f"there is no {python}", "run ./scripts/setup", CANNOT)
    return str(python)


def _install_system(sim: Sim, suite: str, root: Path) -> None:
    mirrors = sources.mirror_lines(suite, sources.host_mirrors())
    env = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    run(
        [
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            f"--include={','.join(PACKAGES)}",
            "--components=main",
            suite,
            str(root),
            *mirrors,
        ],
        env={**env, "LC_ALL": "C.UTF-8"},
        log=sim.log / f"image-{root.name}.log",
    )


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _configure(root: Path) -> None:
    one_line = root / "etc/apt/sources.list"
    _write(root, "etc/apt/sources.list.d/debian.sources", sources.as_deb822(one_line.read_text()))
    one_line.unlink()
    settings = sources.apt_settings()
    if settings:
        _write(root, "etc/apt/apt.conf.d/80outside", settings)
    _write(root, "etc/apt/apt.conf.d/80keep-downloads", 'Binary::apt::APT::Keep-Downloaded-Packages "true";\n')
    _write(root, "etc/dpkg/dpkg.cfg.d/simulated-machine", "force-unsafe-io\n")
    sources.copy_host_cas(root)
    for stale in (root / "etc/ssh").glob("ssh_host_*"):
        stale.unlink()
    run(["systemctl", f"--root={root}", "--quiet", "enable", "systemd-networkd.service"])
    run(["systemctl", f"--root={root}", "--quiet", "mask", *MASKED])


def _mark(root: Path, name: str) -> None:
    """Write the marker: roles allow stand-ins only on a machine that carries it, and of engines those that it names."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    there = sorted(folder.name for folder in (root / STANDINS).iterdir())
    marker = {"builder": "gpuready sim/machine", "image": name, "built": now, "standins": there}
    _write(root, MARKER, json.dumps(marker, indent=2) + "\n")
    for folder in ("etc", "var"):
        # As on a server that has booted before: else systemd takes the first boot for one after an update.
        _write(root, f"{folder}/.updated", "")
