"""A stand-in: shows the engines that run on this simulated machine as processes on its simulated GPUs.

An engine is really there, on the CPU. On which GPUs it would be stands in its devices.env; how much memory it would
hold on each, in the plan of its release for the declared card. Looks once a second and writes only what has changed.
Standard library only: it runs on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from sim.hardware.state_file import PATH, State, StateError, change, read

PROGRAM = "/usr/lib/gpuready-standin/gpus-standin"

CGROUPS = "sys/fs/cgroup/system.slice"
UNITS = "system-gpuready?x2dengine.slice/gpuready-engine@*.service"
GIB = 1 << 30


def pids_of(unit: Path) -> list[int]:
    """Return the processes of a unit, also those in cgroups below it."""
    found: list[int] = []
    for file in unit.rglob("cgroup.procs"):
        found += map(int, file.read_text().split())
    return sorted(found)


def title_of(proc: Path, pid: int) -> str:
    """Return what a process calls itself; empty when it is gone."""
    try:
        return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def holder(titles: dict[int, str], rank: int) -> int | None:
    """Return the process that holds the GPU of that rank: a worker, else the engine's core, else its first process."""
    workers = [pid for pid, title in titles.items() if title.startswith("VLLM::Worker")]
    if rank < len(workers):
        return workers[rank]
    for part in ("VLLM::EngineCore", "multiprocessing.spawn"):
        cores = [pid for pid, title in titles.items() if part in title]
        if cores:
            return cores[0]
    # What only prepares the start is not the engine yet.
    return next((pid for pid, title in titles.items() if title and "gpuready.pyz" not in title), None)


def planned_bytes(root: Path, deployment: str, release: str) -> int | None:
    """Return what the plan of a release says that an engine holds on one GPU."""
    try:
        plan = json.loads((root / "var/lib/gpuready/releases" / deployment / release / "plan.json").read_text())
        return int(float(plan["memory"]["budget_gib"]) * GIB)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def wanted(root: Path, state: State) -> dict[str, set[str]]:
    """Return the process lines that belong to the engines of now, by GPU."""
    by_uuid = {gpu.get("uuid"): gpu.title for gpu in state.gpus}
    lines: dict[str, set[str]] = {}
    for unit in (root / CGROUPS).glob(UNITS):
        replica = unit.name.removeprefix("gpuready-engine@").removesuffix(".service")
        try:
            text = (root / "run/gpuready" / replica / "devices.env").read_text()
            titles = {pid: title_of(root / "proc", pid) for pid in pids_of(unit)}
        except OSError:
            continue
        devices = dict(line.partition("=")[::2] for line in text.splitlines())
        size = planned_bytes(root, replica.rpartition(".")[0], devices.get("GPUREADY_RELEASE", ""))
        for rank, uuid in enumerate(devices.get("GPUREADY_GPU_UUIDS", "").split(",")):
            pid = holder(titles, rank)
            if uuid in by_uuid and pid is not None and size is not None:
                lines.setdefault(by_uuid[uuid], set()).add(f"{pid} {size} compute - -")
    return lines


def check(file: Path) -> None:
    """Refuse a file that the library would refuse, such as one with more memory in use than there is."""
    said = subprocess.run([PROGRAM, "check", str(file)], capture_output=True, text=True, check=False)
    if said.returncode:
        raise StateError(said.stderr.strip())


def bring(file: Path, ours: dict[str, set[str]], now: dict[str, set[str]]) -> None:
    """Change the process lines from what we last wrote to what is wanted; lines of others stay."""
    with change(file, check) as state:
        for gpu in state.gpus:
            there, wanted_here = set(gpu.all("process")), now.get(gpu.title, set())
            for line in ours.get(gpu.title, set()) - wanted_here:
                gpu.remove("process", line)
            for line in sorted(wanted_here - there):
                gpu.add("process", line)


def watch(root: Path) -> None:
    """Look once a second, for ever."""
    file = root / PATH.lstrip("/")
    ours: dict[str, set[str]] = {}
    state, seen = State([]), 0
    while True:
        try:
            stamp = file.stat().st_mtime_ns
            if stamp != seen:
                state, seen = read(file), stamp
            now = wanted(root, state)
            there = {gpu.title: set(gpu.all("process")) for gpu in state.gpus}
            lacking = any(lines - there[gpu] for gpu, lines in now.items())
            if lacking or now != ours:
                bring(file, ours, now)
                ours = now
        except (OSError, StateError) as problem:
            # No driver, a file that somebody is mending, no room on the GPU: told, and looked at again.
            print(f"engines-standin: {problem}", file=sys.stderr, flush=True)
            time.sleep(10)
        time.sleep(1)


if __name__ == "__main__":
    watch(Path("/"))
