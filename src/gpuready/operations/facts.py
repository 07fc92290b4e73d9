"""`facts show`: everything that preflight and the planner ask, in one answer. Reads only, keeps nothing."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuready.hardware import host, nvml, pci, surroundings
from gpuready.operations import packages as interrupted
from gpuready.operations import storage, storage_view
from gpuready.operations.machine import Machine
from gpuready.outcome import Failure, Refusal, masked
from gpuready.planning import storage as store
from gpuready.planning.engines import SYSTEM_PYTHON
from gpuready.planning.sources import STORE
from gpuready.serving import engine_store, models, pythons
from gpuready.serving.files import read_json
from gpuready.serving.layout import Layout

APT_HELPER = "/usr/lib/apt/apt-helper"
REPOSITORY_SECONDS = 20
LOCAL_SCHEMES = ("file", "copy")
ASKED_SCHEMES = ("http", "https")
"""apt-helper downloads from these alone; apt itself takes more, and methods of other packages."""


def show(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of this server.

    `request` names what to look at beyond the hardware: `paths` whose filesystems matter, `targets` that must be
    writable, `models` (as planning/sources.py asks for them), `packages` (Debian packages whose version matters),
    `store` (`{mount, disk}`, the filesystem of the store of models). Where that is not mounted yet, all the rest is
    told as it will be, for this process sees it mounted.
    """
    clock = time.time()
    stored_models = store_facts(request.get("store"))
    read = host.facts(request.get("paths", []))
    targets = {path: _target(path) for path in request.get("targets", [])}
    filesystems = {
        one.path: {"mount": one.mount_point, "total_bytes": one.total_bytes, "free_bytes": one.free_bytes}
        for one in read.filesystems
    }
    if stored_models:
        filesystems |= stored_models.pop("filesystems")
        targets |= stored_models.pop("targets")
    stored = read_json(Layout().plan)
    return {
        "clock": clock,
        **_system(read, request),
        **_hardware(read),
        **_packages(request),
        "filesystems": filesystems,
        "targets": targets,
        "store": stored_models,
        "models": models_facts(request),
        "engines": engine_folders(),
        "stored_plan": stored,
        "cures": read_json(Layout().cures) or {},
        "placement": placement(stored),
    }


def _system(read: host.HostFacts, request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "unknown_locales": surroundings.unknown_locales(),
        "os": {"id": read.system.distribution, "version": read.system.distribution_version},
        "kernel": read.system.kernel,
        "architecture": read.system.architecture,
        # Of the distribution, whichever one runs this.
        "python": pythons.minor(pythons.version(SYSTEM_PYTHON)),
        "pythons": pythons.of_distribution(),
        "pythons_named": {path: pythons.look(path) for path in request.get("pythons", [])},
        "container": read.system.container,
        "simulated_marker": read.simulated_machine,
        "listening": [
            {
                "address": one.address,
                "port": one.port,
                "pid": one.pid,
                "program": one.program,
                "unit": host.unit(one.pid) if one.pid else None,
            }
            for one in read.listening_ports or ()
        ],
    }


def _hardware(read: host.HostFacts) -> dict[str, Any]:
    devices = pci.scan()
    return {
        "numa_nodes": [asdict(node) for node in read.numa_nodes or ()],
        "shared_memory": asdict(read.shared_memory) if read.shared_memory else None,
        "cpu": asdict(read.cpu),
        "ram_bytes": read.memory.total_bytes,
        "gpus": [
            {"address": gpu.address, "device_id": f"{gpu.device:04x}", "numa_node": gpu.numa_node}
            for gpu in pci.gpus(devices)
        ],
        "nvswitch_count": len(pci.nvswitches(devices)),
        "nvme_count": len(pci.nvmes(devices)),
        "nvml": _nvml(),
    }


def _packages(request: Mapping[str, Any]) -> dict[str, Any]:
    packages = installed_packages(request.get("packages", []))
    offered, unread = candidates([name for name in request.get("offered", []) if packages.get(name) is None])
    return {
        "packages": packages,
        "begun": begun(packages),
        "candidates": offered,
        "candidates_problem": unread,
        "repositories": masked(repositories()) if None in packages.values() and shutil.which("apt-get") else [],
    }


def store_facts(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what is wrong with the declared filesystem of the store, and what it will be; None where none is declared.

    Raises:
        MachineCannot: where what is mounted there does not answer: every question about it would wait for ever.
    """
    machine, wanted = Machine(), storage.declared(given)
    storage.demand_answer(machine)
    if wanted is None:
        return None
    found = storage.facts(machine, wanted)
    failures = store.failures(wanted, found)
    to_be = store.filesystem_of(wanted, found)
    answer: dict[str, Any] = {"filesystems": {}, "targets": {}}
    if not failures and to_be is not None:
        answer["filesystems"] = {STORE: to_be}
    elif not failures and not store.is_mounted(wanted, found):
        try:
            storage_view.enter(wanted, found)
        except Refusal as refusal:
            failures = refusal.failures
    if not wanted.is_share and not failures and not store.is_read_only(wanted, found):
        # A device is looked at without anything being written to it, and then is.
        answer["targets"] = {STORE: {"mount": STORE, "problem": "", "place": STORE, "noexec": None}}
    return {**answer, "failures": [asdict(one) for one in failures]}


def _target(path: str) -> dict[str, Any]:
    found = surroundings.target(path)
    return {"mount": found.mount_point, "problem": found.problem, "place": found.place, "noexec": found.noexec}


def _nvml() -> dict[str, Any] | None:
    report = nvml.probe()
    if report is None:
        return None
    return {
        "driver": report.driver_version,
        "problem": report.problem,
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "memory_bytes": gpu.memory_total_bytes,
                "pci_address": gpu.pci_address,
                "nvlink_links": gpu.nvlinks_active,
                "nvlink_peers": gpu.nvlink_peers,
                "mig_mode": gpu.mig_mode,
                "problem": gpu.problem,
            }
            for gpu in report.gpus
        ],
    }


def models_facts(request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by folder what every model and adapter is, on this server or on its hub, or what is wrong with it."""
    hubs = models.Hubs(request.get("hubs") or {}, request.get("models_token"))
    return {one["path"]: _model_facts(one, hubs) for one in request.get("models", [])}


def _model_facts(entry: Mapping[str, Any], hubs: models.Hubs) -> dict[str, Any]:
    path, pickle = Path(entry["path"]), bool(entry["allow_pickle"])
    try:
        if entry["source"]:
            said = models.facts(entry, hubs)
        elif failures := models.check(path, entry["kind"], pickle=pickle):
            raise Refusal(failures)
        else:
            said = (models.read_adapter if entry["kind"] == "adapter" else models.read_model)(path, pickle=pickle)
    except Refusal as refusal:
        return {"failures": [asdict(failure) for failure in refusal.failures]}
    return {**said, "resolved": str(path.resolve()), "failures": []}


def engine_folders() -> list[str]:
    """Return the folders of all whole engine environments."""
    return [one["folder"] for one in engine_store.listing(engine_store.ROOT / "engines") if one["whole"]]


def begun(packages: Mapping[str, str | None]) -> dict[str, int]:
    """Return what interrupted installations have already written, in bytes by path: who finishes them needs less."""
    of_packages = interrupted.begun(Machine()) if None in packages.values() else {}
    return {**of_packages, "/opt/gpuready": engine_store.begun(engine_store.ROOT)}


def installed_packages(names: list[str]) -> dict[str, str | None]:
    """Return the installed version of each package; None where it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    if names and shutil.which("dpkg-query"):
        answer = subprocess.run(
            ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package} ${Version}\n", *names],
            capture_output=True,
            text=True,
            check=False,
        )
        for line in answer.stdout.splitlines():
            status, name, version = line.split(" ", 2)
            if status == "installed":
                found[name] = version
    return found


def candidates(names: list[str]) -> tuple[dict[str, str | None], str]:
    """Return the version that the server's package sources offer of each package; None where none does.

    Where the server's package lists do not know one, newer lists are looked at, beside the server's own; what kept
    apt from reading these is the second answer.
    """
    found: dict[str, str | None] = dict.fromkeys(names)
    problem = ""
    if names and shutil.which("apt-cache"):
        found |= _policy(names, [])
        if None in found.values():
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "partial").mkdir()
                # apt fetches as a user of its own where it may not write as root.
                lists = ["-o", f"Dir::State::lists={folder}", "-o", "APT::Sandbox::User=root"]
                read = subprocess.run(
                    ["apt-get", *lists, "update", "-q"], capture_output=True, text=True, errors="replace", check=False
                )
                problem = lists_problem(read.stderr)
                found |= _policy(names, [*lists, "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="])
    return found, problem


def lists_problem(said: str) -> str:
    """Return why apt could not read some package lists: it calls that an error, or warns and ends well."""
    lines = [line for line in said.splitlines() if line.startswith(("E: ", "W: Failed to fetch"))]
    return " ".join(line[3:] for line in lines[:4])


def _policy(names: list[str], options: list[str]) -> dict[str, str]:
    """Return the candidate of each package that apt knows one of."""
    environment = {**os.environ, "LC_ALL": "C"}
    answer = subprocess.run(
        ["apt-cache", *options, "policy", *names], capture_output=True, text=True, check=False, env=environment
    )
    found, name = {}, ""
    for line in answer.stdout.splitlines():
        if not line.startswith(" "):
            name = line.rstrip(":")
        elif line.strip().startswith("Candidate:") and "(none)" not in line:
            found[name] = line.split(":", 1)[1].strip()
    return found


def repositories() -> list[dict[str, str | None]]:
    """Ask every package source for its release file, with apt's own proxies and certificates.

    `problem` is empty where it answers, and None where only apt itself can ask it, e.g. a list of mirrors.
    """
    answer = subprocess.run(["apt-get", "update", "--print-uris"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        said = answer.stderr.strip().splitlines()
        what = "apt cannot read its package sources"
        raise Refusal(Failure("facts.apt", what, said[-1].removeprefix("E: ") if said else "", "repair the named file"))
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(_ask_repository, release_files(answer.stdout)))


def release_files(printed: str) -> list[str]:
    """Return the addresses of the release files in what `apt-get update --print-uris` printed."""
    addresses = {line.split("'")[1] for line in printed.splitlines() if line.startswith("'")}
    return sorted(address for address in addresses if address.endswith("/InRelease"))


def _ask_repository(address: str) -> dict[str, str | None]:
    uri, _, suite = address.removesuffix("/InRelease").partition("/dists/")
    scheme, _, path = address.partition(":")
    if scheme in LOCAL_SCHEMES:
        place = Path(path.removeprefix("//")).parent
        return {"uri": uri, "suite": suite, "problem": "" if place.is_dir() else f"{place} does not exist"}
    if scheme not in ASKED_SCHEMES:
        return {"uri": uri, "suite": suite, "problem": None}
    problem = "no answer"
    with tempfile.TemporaryDirectory() as folder:
        # An old mirror has the signature beside the file instead of in it.
        for name in (address, address.removesuffix("InRelease") + "Release"):
            try:
                answer = subprocess.run(
                    [APT_HELPER, "-o", "Acquire::Retries=0", "download-file", name, f"{folder}/release"],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=REPOSITORY_SECONDS,
                )
            except subprocess.TimeoutExpired:
                problem = f"no answer within {REPOSITORY_SECONDS} s"
                break
            if answer.returncode == 0:
                return {"uri": uri, "suite": suite, "problem": ""}
            problem = fetch_problem(answer.stderr) or f"apt-helper ended with {answer.returncode}"
    return {"uri": uri, "suite": suite, "problem": problem}


def fetch_problem(said: str) -> str:
    """Return why apt could not fetch a file, from what it said: `E: Failed to fetch ADDRESS  REASON`, then less."""
    errors = [line.removeprefix("E:").strip() for line in said.splitlines() if line.startswith("E:")]
    return errors[0].removeprefix("Failed to fetch ").partition("  ")[2].strip() or errors[0] if errors else ""


def placement(stored: Mapping[str, Any] | None) -> dict[str, list[dict[str, Any]]]:
    """Return where the replicas of the stored plan run: `{name: [{index, gpus, port}]}`."""
    return {one["name"]: list(one["replicas"]) for one in (stored or {}).get("deployments", [])}
