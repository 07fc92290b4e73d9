"""Compares what is declared with what the server is, before anything is changed. Every refusal at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpuready import catalog
from gpuready.outcome import Failure
from gpuready.planning import clock, sources, support
from gpuready.planning.memory.device import device
from gpuready.planning.memory.run import GIB

NVIDIA = "10de"
SYSTEMS = {"debian": ["12", "13"], "ubuntu": ["22.04", "24.04"]}
OLDEST_PYTHON = (3, 10)
HIDDEN_FROM_ENGINES = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 - named, not used
"""Folders that the engines' unit does not show them (ProtectHome, PrivateTmp)."""
SPARE_GIB = 2.0
"""Room that every filesystem we write to keeps, for logs, releases and package lists."""


def cards() -> dict[str, dict[str, Any]]:
    """Return the catalog of cards."""
    found: dict[str, dict[str, Any]] = catalog.load("gpus")["cards"]
    return found


def _card_of_pci(device_id: str) -> str | None:
    return next((key for key, card in cards().items() if device_id in card["pci"]), None)


def driver_failures(
    host: str, key: str, stack_name: str, stack: Mapping[str, Any], facts: Mapping[str, Any]
) -> list[Failure]:
    """Check that a driver answers, is new enough for the stack and the card, and still knows the card."""
    floors = [floor for floor in (stack["host"]["driver_min"], cards()[key].get("driver_min")) if floor]
    if not floors:
        return []
    needed = max(floors, key=_version)
    nvml = facts["nvml"]
    if nvml is None:
        what = f"host {host}, gpuready_stack = {stack_name!r}: there is no NVIDIA driver on the server"
        return [
            Failure(
                "preflight.no_driver", what, "", f"install driver {needed} or newer from your distribution or NVIDIA"
            )
        ]
    if nvml["driver"] and _version(nvml["driver"]) < _version(needed):
        what = f"host {host}, gpuready_stack = {stack_name!r}: the NVIDIA driver is {nvml['driver']}"
        return [Failure("preflight.driver_old", what, f"{key} on this stack needs {needed}", "upgrade the driver")]
    last = support.last_driver(device(key))
    if nvml["driver"] and last and _version(nvml["driver"])[0] > last:
        what = f"host {host}, gpuready_gpu_model = {key}: the NVIDIA driver is {nvml['driver']}"
        why = f"branch {last} is the last that knows this card"
        return [Failure("preflight.driver_new", what, why, f"install a driver of branch {last}")]
    return []


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def gpu_failures(host: str, key: str, count: int, facts: Mapping[str, Any]) -> list[Failure]:
    """Compare the declared card and number with PCI, and with NVML where a driver is."""
    card = cards()[key]
    found = facts["gpus"]
    if not found:
        what = f"host {host}, gpuready_gpu_model = {key}: the server shows no NVIDIA GPU on its PCI bus"
        return [Failure("preflight.no_gpu", what, "", "see lspci -d 10de: on the server, or name another host")]
    failures = []
    others = sorted({gpu["device_id"] for gpu in found} - set(card["pci"]))
    if others:
        shown = ", ".join(f"{_card_of_pci(one) or 'an unknown card'} ({NVIDIA}:{one})" for one in others)
        what = f"host {host}, gpuready_gpu_model = {key} is contradicted by the hardware: its PCI bus shows {shown}"
        known = next((name for one in others if (name := _card_of_pci(one))), None)
        fix = f"set gpuready_gpu_model: {known}" if known else f"known cards are {', '.join(cards())}"
        failures.append(Failure("preflight.gpu_model", what, "", fix))
    if len(found) != count:
        what = f"host {host}, gpuready_gpu_count = {count}, but the PCI bus shows {len(found)} NVIDIA GPUs"
        why = "some are missing" if len(found) < count else "there are more"
        fix = f"set gpuready_gpu_count: {len(found)}, or see why {why}"
        failures.append(Failure("preflight.gpu_count", what, "", fix))
    return failures + (_nvml_failures(host, key, card, facts) if not failures else [])


def _nvml_failures(host: str, key: str, card: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Failure]:
    nvml = facts["nvml"]
    if nvml is None:
        return []
    if nvml["problem"]:
        return [
            Failure("preflight.nvml", f"host {host}: the NVIDIA driver does not answer", nvml["problem"], "repair it")
        ]
    failures = []
    wrong = sorted({gpu["name"] for gpu in nvml["gpus"] if gpu["name"] and gpu["name"] not in card["nvml_names"]})
    if wrong:
        what = f"host {host}, gpuready_gpu_model = {key} is contradicted by the driver: it names {', '.join(wrong)}"
        failures.append(Failure("preflight.gpu_name", what, "", f"expected is {' or '.join(card['nvml_names'])}"))
    if len(nvml["gpus"]) != len(facts["gpus"]):
        what = f"host {host}: the driver shows {len(nvml['gpus'])} GPUs, the PCI bus {len(facts['gpus'])}"
        failures.append(
            Failure("preflight.gpu_lost", what, "", "see dmesg for XID errors, and reset or replace the GPU")
        )
    divided = [str(gpu["index"]) for gpu in nvml["gpus"] if gpu["mig_mode"] == "enabled"]
    if divided:
        what = f"host {host}: MIG is enabled on GPU {', '.join(divided)}, and deployments take whole GPUs"
        failures.append(
            Failure("preflight.mig", what, "", "disable MIG there (nvidia-smi -mig 0), once nobody uses it")
        )
    for gpu in nvml["gpus"]:
        if gpu["problem"]:
            what = f"host {host}: GPU {gpu['index']} does not answer the driver"
            failures.append(Failure("preflight.gpu_sick", what, gpu["problem"], "reset or replace it"))
    return failures


def system_failures(host: str, facts: Mapping[str, Any]) -> list[Failure]:
    """Check the distribution, the architecture and Python."""
    failures = []
    system = facts["os"]
    if system["version"] not in SYSTEMS.get(system["id"], []):
        listed = ", ".join(f"{name.capitalize()} {'/'.join(versions)}" for name, versions in SYSTEMS.items())
        what = f"host {host} runs {system['id']} {system['version']}"
        failures.append(Failure("preflight.system", what, "it is not supported", f"supported are {listed}"))
    if facts["architecture"] != "x86_64":
        what = f"host {host} is {facts['architecture']}"
        failures.append(Failure("preflight.architecture", what, "it is not supported", "x86_64 is"))
    if tuple(int(part) for part in facts["python"].split(".")[:2]) < OLDEST_PYTHON:
        what = f"host {host} has Python {facts['python']}"
        failures.append(Failure("preflight.python", what, "3.10 or newer is needed", "upgrade the distribution"))
    return failures


def simulation_failures(host: str, simulated: bool, facts: Mapping[str, Any]) -> list[Failure]:
    """Stand-ins are only for machines of the machine builder: the inventory and the machine must both say so."""
    marker = facts["simulated_marker"] is not None
    if simulated and not marker:
        what = f"host {host}, gpuready_simulated = true, but the server was not made by this checkout's machine builder"
        return [
            Failure("preflight.not_simulated", what, "", "remove gpuready_simulated; ./scripts/quickstart makes one")
        ]
    if marker and not simulated:
        what = f"host {host} is a simulated server, but gpuready_simulated is not true in the inventory"
        return [Failure("preflight.simulated", what, "", "set gpuready_simulated: true, or name a real server")]
    return []


def stand_in_failures(host: str, engines: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[Failure]:
    """Check that the simulated server has the stand-ins without which its engines do not start."""
    there = (facts["simulated_marker"] or {}).get("standins", [])
    return [
        Failure(
            "preflight.stand_in",
            f"host {host}: {one['engine']} {one['version']} needs the stand-in {one['standin']}, which is not on it",
            f"the machine was made with {', '.join(there) or 'none'}",
            "make the machine anew from this checkout",
        )
        for one in engines
        if one.get("standin") and one["standin"] not in there
    ]


def expectation_failures(host: str, expect: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Failure]:
    """Compare gpuready_expect with the server; what cannot be read is said, never passed."""
    links = sorted(
        {gpu["nvlink_links"] for gpu in (facts["nvml"] or {}).get("gpus", []) if gpu["nvlink_links"] is not None}
    )
    # name: what was found, and whether it must be met exactly
    found: dict[str, tuple[float | None, bool]] = {
        "cpu_cores": (facts["cpu"]["physical_cores"], False),
        # Firmware takes a share of what is plugged in: 5 % is not a missing module.
        "ram_gib": (facts["ram_bytes"] / GIB / 0.95, False),
        "nvme_count": (facts["nvme_count"], False),
        "nvswitch_count": (facts["nvswitch_count"], True),
        "nvlink_links_per_gpu": (links[0] if len(links) == 1 else (min(links) if links else None), True),
    }
    failures = []
    for key, wanted in expect.items():
        if wanted is None:
            continue
        value, exactly = found[key]
        where = f"host {host}, gpuready_expect.{key} = {wanted}"
        if value is None:
            failures.append(
                Failure("preflight.expect", f"{where} cannot be checked: the server does not say", "", "remove it")
            )
        elif value < wanted or (exactly and value != wanted):
            what = f"{where}, but the server has {value:.0f}"
            failures.append(Failure("preflight.expect", what, "", "repair the server or correct gpuready_expect"))
    return failures


def disk_failures(host: str, needs_gib: Mapping[str, float], facts: Mapping[str, Any]) -> list[Failure]:
    """Check that every filesystem has room for what will be written to it.

    `needs_gib` maps a path to what will be written below it, in GiB; paths of one filesystem add up.
    """
    by_mount: dict[str, dict[str, Any]] = {}
    for path, gib in needs_gib.items():
        filesystem = facts["filesystems"][path]
        entry = by_mount.setdefault(
            filesystem["mount"], {"free": filesystem["free_bytes"] / GIB, "need": SPARE_GIB, "paths": []}
        )
        entry["need"] += gib
        entry["paths"].append(path)
        entry["fix"] = filesystem.get("fix")
    failures = []
    for mount, entry in by_mount.items():
        # A share of weights that this server only reads may be full.
        only_read = entry["paths"] == [sources.STORE] and not needs_gib[sources.STORE] and entry["fix"] is None
        if entry["free"] < entry["need"] and not only_read:
            paths = ", ".join(entry["paths"])
            free, need = f"{entry['free']:.1f}", f"{entry['need']:.1f}"
            what = f"host {host}: {mount} has {free} GiB free, and {need} GiB are needed for {paths}"
            fix = entry["fix"] or f"free space on {mount} or give these paths a disk of their own"
            failures.append(Failure("preflight.disk", what, "", fix))
    return failures


def port_failures(host: str, ports: Mapping[str, tuple[int, str]], facts: Mapping[str, Any]) -> list[Failure]:
    """Check that nobody else listens where we want to: `{what: (port, our unit that may)}`."""
    failures = []
    for key, (port, ours) in ports.items():
        holders = [one for one in facts["listening"] if one["port"] == port]
        holder = next((one for one in holders if not str(one["unit"] or "").startswith(ours)), None)
        if holder is not None:
            who = f"{holder['program'] or 'a process'} (pid {holder['pid']})" if holder["pid"] else "another process"
            what = f"host {host}, {key} = {port} is taken by {who}"
            failures.append(Failure("preflight.port", what, "", f"stop it, or choose another port for {key}"))
    return failures


def repository_failures(host: str, facts: Mapping[str, Any]) -> list[Failure]:
    """Check that every package source answers, where packages are still to be installed."""
    return [
        Failure(
            "preflight.repository",
            f"host {host}: the package source {one['uri']} ({one['suite']}) does not answer",
            one["problem"],
            clock.hint(one["problem"], facts["clock"])
            or "see the server's network, gpuready_proxy and /etc/apt/sources.list.d",
        )
        for one in facts["repositories"]
        if one["problem"]
    ]


def model_failures(host: str, deployments: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[Failure]:
    """Return what is wrong with the folders of the models, with the deployment that names each."""
    failures = []
    for deployment, named in ((one, named) for one in deployments for named in sources.asked(one)):
        read = facts["models"].get(named.path)
        if read is None:
            continue
        where = f"host {host}, deployment {deployment['name']}, {named.title}"
        failures += [
            Failure(one["code"], f"{where}: {one['what']}", one["why"], one["fix"]) for one in read["failures"]
        ]
        resolved = f"{read.get('resolved', '')}/"
        hidden = next((folder for folder in HIDDEN_FROM_ENGINES if resolved.startswith(folder)), None)
        if hidden:
            why = f"engines run without a view of {hidden}"
            failures.append(Failure("preflight.model_hidden", where, why, "move the model, e.g. below /srv or /data"))
    return failures


def candidate_failures(host: str, cuda: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Failure]:
    """Check that packages which the operator's own sources must offer are offered."""
    if cuda["source"] != "configured":
        return []
    missing = [name for name, version in facts["candidates"].items() if version is None]
    if not missing:
        return []
    what = f"host {host}: no package source of the server offers {', '.join(missing)}"
    why = facts["candidates_problem"]
    fix = "add NVIDIA's CUDA repository for this distribution, as NVIDIA's CUDA Installation Guide for Linux says"
    if why:
        # The repository may well be there, and not have answered.
        fix = f"see the server's network, gpuready_proxy and /etc/apt/sources.list.d; where none is NVIDIA's, {fix}"
    return [Failure("preflight.no_candidate", what, why, clock.hint(why, facts["clock"]) or fix)]
