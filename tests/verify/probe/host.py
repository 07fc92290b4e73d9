"""What the probe says of the host: our part on it, packages, settings, packet filter, hardware, leftovers."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.verify.probe.reading import (
    ENGINE_USER,
    MODELS,
    OPT,
    RUN,
    STATE,
    demand,
    digest_of,
    last_line,
    read_json,
    read_text,
    run,
    unit,
)  # fmt: skip

ETC = Path("/etc/gpuready")
GATEWAY_RUN = Path("/run/gpuready-gateway")
FOLDERS = (OPT, OPT / "engines", MODELS, STATE, STATE / "releases", STATE / "replicas", ETC)
FIREWALL_UNIT = "gpuready-firewall.service"


def server_part(_: dict[str, Any]) -> dict[str, Any]:
    """Our file, and whether the command answers."""
    link = OPT / "gpuready.pyz"
    target = link.resolve()
    said = run("/usr/local/bin/gpuready", "deployment", "status", "--json")
    answer = last_line(said.stdout)
    return {
        "name": target.name,
        "digest": digest_of(target),
        "runs": said.returncode == 0 and answer.startswith("{"),
        "said": last_line(said.stderr) or f"exit {said.returncode}",
    }


def user(_: dict[str, Any]) -> dict[str, Any]:
    """Return the engines' user; nothing where there is none."""
    try:
        entry = pwd.getpwnam(ENGINE_USER)
    except KeyError:
        return {}
    return {"uid": entry.pw_uid, "shell": entry.pw_shell}


def packages(record: dict[str, Any]) -> dict[str, Any]:
    """Return the state of each recorded package, and what dpkg complains of."""
    listed = demand("dpkg-query", "--show", "--showformat=${Package}\\t${Status}\\n")
    states = dict(line.split("\t", 1) for line in listed.stdout.splitlines() if "\t" in line)
    plan, host = record["plan"], record["host"] or {}
    wanted = {"haproxy", *plan["host"]["cuda"]["packages"], *host.get("packages", [])}
    wanted.update(name for engine in plan["engines"] for name in engine["apt"])
    broken = {
        name: state for name, state in states.items() if state.split()[-1].startswith(("half-", "unpacked", "trig"))
    }
    return {
        "states": {name: states.get(name.split(":")[0], "absent") for name in sorted(wanted)},
        "broken": broken,
        "audit": _dpkg_audit(),
    }


def _dpkg_audit() -> str:
    said = run("dpkg", "--audit")
    if said.returncode and not said.stdout.strip():
        raise OSError(f"dpkg --audit: {last_line(said.stderr) or f'exit {said.returncode}'}")
    return " ".join(said.stdout.split())


def files(record: dict[str, Any]) -> dict[str, Any]:
    """Return the digest that each recorded file has now."""
    return {path: digest_of(Path(path)) for path in (record["host"] or {}).get("files", {})}


def parameters(record: dict[str, Any]) -> dict[str, Any]:
    """Return the value that each recorded kernel parameter has now."""
    now = {}
    for key in (record["host"] or {}).get("parameters", {}):
        first = re.search(r"[./]", key)
        path = key if first and first.group() == "/" else key.translate(str.maketrans("./", "/."))
        text = read_text(Path("/proc/sys") / path)
        now[key] = None if text is None else " ".join(text.split())
    return now


def memory(_: dict[str, Any]) -> dict[str, Any]:
    """Return the size of /dev/shm and of the RAM, in bytes."""
    shm = os.statvfs("/dev/shm")
    found = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {"shm": shm.f_blocks * shm.f_frsize, "ram": int(found.group(1)) * 1024 if found else None}


def clock(record: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the recorded time service, and the container that would keep it from running."""
    name = (record["host"] or {}).get("clock")
    container = run("systemd-detect-virt", "--container").stdout.strip()
    return {"container": "" if container == "none" else container, **(unit(name) if name else {})}


def firewall(_: dict[str, Any]) -> dict[str, Any]:
    """Return whether our rules are in the kernel, on disk, at boot, and not on trial."""
    listed = run("nft", "--stateless", "list", "table", "inet", "gpuready")
    recorded = read_json(STATE / "firewall.json") or {}
    trial = [str(path) for path in sorted((RUN / "firewall").glob("pending*"))]
    timer = unit("gpuready-firewall-revert.timer").get("ActiveState")
    return {
        "loaded": listed.returncode == 0,
        "open": re.findall(r"\btcp dport (\{[^}]*\}|\S+)(?=.* accept)", listed.stdout),
        "as_recorded": listed.stdout == recorded.get("table"),
        "file_as_recorded": read_text(ETC / "firewall.nft") == recorded.get("file"),
        "unit": unit(FIREWALL_UNIT),
        "trial": [*trial, *(["gpuready-firewall-revert.timer"] if timer == "active" else [])],
    }


def gpus(_: dict[str, Any]) -> dict[str, Any]:
    """Return the NVIDIA display controllers on the PCI bus by address."""
    found = {}
    for entry in sorted(Path("/sys/bus/pci/devices").iterdir()):
        vendor, kind, device = ((read_text(entry / name) or "").strip() for name in ("vendor", "class", "device"))
        if vendor == "0x10de" and kind.startswith("0x03"):
            found[entry.name] = device
    return found


def cuda(_: dict[str, Any]) -> dict[str, Any]:
    """Return what was recorded of the toolkit, and what its compiler says now."""
    recorded = read_json(STATE / "cuda.json") or {}
    said = run(recorded.get("nvcc") or "nvcc", "--version")
    release = re.search(r"release (\d+\.\d+)", said.stdout)
    complaint = last_line(said.stderr) or f"exit {said.returncode}"
    return {"recorded": recorded, "release": release.group(1) if release else None, "said": complaint}


def failed_units(_: dict[str, Any]) -> list[str]:
    """Return the units that systemd calls failed."""
    listed = demand("systemctl", "list-units", "--failed", "--plain", "--no-legend", "--full")
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]


def access(_: dict[str, Any]) -> dict[str, str]:
    """Return mode, owner and group of what holds the record, and of the doors to its daemons."""
    found = {}
    for path in _guarded():
        try:
            # Folders may lie elsewhere, on a larger disk; of all else the thing itself is meant.
            shown = path.stat() if path in FOLDERS else path.lstat()
        except OSError as error:
            if error.errno != errno.ENOENT:
                found[str(path)] = str(error.strerror)
            continue
        found[str(path)] = f"{shown.st_mode & 0o7777:04o} {_owner(shown)}"
    return found


def _is_read_only(folder: Path) -> bool:
    """Say whether a folder is a mount that nobody can change from here, whoever owns it."""
    return folder.is_dir() and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def _owner(shown: os.stat_result) -> str:
    try:
        return f"{pwd.getpwuid(shown.st_uid).pw_name}:{grp.getgrgid(shown.st_gid).gr_name}"
    except KeyError:
        return f"{shown.st_uid}:{shown.st_gid}"


def _guarded() -> Iterator[Path]:
    yield from (folder for folder in FOLDERS if folder != MODELS or not _is_read_only(MODELS))
    yield from (STATE / "plan.json", (OPT / "gpuready.pyz").resolve())
    yield from (GATEWAY_RUN / "master.sock", GATEWAY_RUN / "admin.sock")
    for release in sorted((STATE / "releases").glob("*/[0-9]*")):
        yield release
        yield from sorted(release.iterdir())


def leftovers(record: dict[str, Any]) -> list[str]:
    """Return what an interrupted run left: things half built beside their place."""
    plan = record["plan"]
    engines = {engine["folder"] for engine in plan["engines"]}
    replicas = {f"{one['name']}.{part['index']}" for one in plan["deployments"] for part in one["replicas"]}
    found = [path for pattern in (".*.new", ".smoke-*", "cache", "tools/.*") for path in OPT.glob(pattern)]
    found += [path for path in (OPT / "engines").glob("[!.]*") if str(path) not in engines and not _is_built(path)]
    found += MODELS.glob(".*@*")
    found += [path for pattern in (".*.*", "releases/*/.*", "replicas/*/*/.*") for path in STATE.glob(pattern)]
    found += [*ETC.glob(".*"), *Path(plan["gateway"]["folder"]).glob(".*"), *GATEWAY_RUN.glob("*.new")]
    recorded = map(Path, (record["host"] or {}).get("files", {}))
    found += [half for path in recorded if (half := path.with_name(f".{path.name}.new")).exists()]
    found += [path for path in (RUN / ".trial").glob("*") if path.name not in replicas]
    orders = Path("/etc/systemd/system").glob("gpuready-engine@*.service.d/gpuready-order.conf")
    found += [path for path in orders if path.parent.name[16:-10] not in replicas]
    return sorted(map(str, found))


def _is_built(folder: Path) -> bool:
    return read_json(folder / "gpuready-engine.json") is not None
