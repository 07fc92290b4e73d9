"""A replica's engine: it is started, gives one real token, and is known by what it does now."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from gpuready.operations import crashes, devices, memory, readback, surroundings
from gpuready.operations.start import UUIDS, Start, read_devices, running
from gpuready.outcome import Failed, Failure, MachineCannot, Result
from gpuready.serving import launch, probes, readiness, releases, units
from gpuready.serving.files import as_json, read_json, write_text
from gpuready.serving.layout import Layout, split_replica

DEFAULT_START_SECONDS = 600
"""For releases planned before the planner gave a limit of their own."""


def run_engine(layout: Layout, replica: str) -> NoReturn:
    """Become the engine: systemd then signals and watches the engine itself, not a wrapper."""
    if known := crashes.given_up(layout, replica):
        print(crashes.failure(replica, known).sentence(), flush=True)
        sys.exit(crashes.GIVEN_UP_STATUS)
    start = running(layout, replica)
    _demand_access(replica, start)
    for name in surroundings.forget_gone_engines(layout, replica, start):
        print(f"{replica}: what {name} kept is removed, that engine is not installed any more", flush=True)
    words = launch.words(start.plan, start.folder, start.part)
    surroundings.stay_near(replica, start.part.get("numa_node"))
    os.chdir("/")
    environment = surroundings.environment(layout, replica, start)
    os.execve(words[0], words, environment)  # noqa: S606 - replacing ourselves is the point


def _demand_access(replica: str, start: Start) -> None:
    """Raise where the engines' user may not open its GPUs, as on a server that gives them to a group alone."""
    names = ["nvidiactl", "nvidia-uvm", *(f"nvidia{gpu}" for gpu in start.part["gpus"])]
    there = [path for path in devices.files_of_gpus() if path.name in names]
    if closed := list(devices.locked(there)):
        what = f"the user of {replica} may not open {', '.join(map(str, closed))}"
        fix = "add gpuready-engine to the group that may (ls -l /dev/nvidia*)"
        raise MachineCannot(Failure("replica.no_access", what, "", fix))


def start_seconds(start: Start) -> float:
    """Return how long the engine may take to its first token: as found before its trial, else as planned."""
    found = releases.start_seconds(start.store, start.index, start.number)
    return found or float(start.plan.get("start_seconds") or DEFAULT_START_SECONDS)


def wait_ready(layout: Layout, replica: str, main_pid: int | None) -> Result:
    """Wait for one real token, then write ready.json: what gave it, on which GPUs, and what memory it has."""
    if known := crashes.given_up(layout, replica):
        raise Failed(crashes.failure(replica, known))
    start = running(layout, replica)
    port, model, limit = start.part["port"], start.plan["model"], start_seconds(start)
    try:
        seconds = readiness.wait_for_token(probes.asked_of(start.plan, start.part), main_pid, limit)
    except readiness.NotReady as error:
        what = f"{replica} is not ready on release {start.number}"
        raise Failed(Failure("replica.not_ready", what, str(error), "see its journal")) from error
    pid = main_pid or 0
    # A unit file that systemd has not read yet is not the one that this engine runs under.
    unread = units.properties(units.unit_of(replica), "NeedDaemonReload").get("NeedDaemonReload") == "yes"
    uuids = [uuid for uuid in read_devices(layout, replica).get(UUIDS, "").split(",") if uuid]
    proof = {
        **readiness.baseline(pid, port, model, seconds, "" if unread else units.digest(layout.engine_unit)),
        "start_seconds": limit,
        "release": start.number,
        "release_digest": start.store.digest(start.number),
        "gpu_uuids": uuids,
        **readback.taken(start.plan.get("engine", ""), port, pid, uuids),
    }
    write_text(layout.run(replica) / "ready.json", as_json(proof))
    said = [f"{replica} gave its first token after {seconds:.1f} s on release {start.number}"]
    if found := readback.comparison(layout, replica):
        said.append(found.sentence(replica))
    return Result(summary="\n".join(said))


def status(layout: Layout, replicas: list[str]) -> Result:
    """Return what each replica is doing now, and its KV cache as planned and as measured at its start."""
    data: dict[str, Any] = {}
    lines: list[str] = []
    for replica in replicas:
        shown = units.properties(units.unit_of(replica), "ActiveState", "SubState", "NRestarts", "MainPID")
        name, index = split_replica(replica)
        current = layout.current(name, index)
        data[replica] = {
            "state": shown.get("ActiveState"),
            "step": shown.get("SubState"),
            "restarts": int(shown.get("NRestarts") or 0),
            "release": current.readlink().name if current.is_symlink() else None,
            "ready": read_json(layout.run(replica) / "ready.json"),
            "given_up": crashes.given_up(layout, replica),
        }
        found = readback.comparison(layout, replica)
        data[replica]["kv_cache"] = found.as_dict() if found else None
        lines.append(
            f"{replica}: {shown.get('ActiveState')} ({shown.get('SubState')}), release {data[replica]['release']}, "
            f"{data[replica]['restarts']} automatic restarts"
        )
        if known := data[replica]["given_up"]:
            lines.append(f"  {crashes.failure(replica, known).sentence()}")
        if found:
            lines.append(f"  {found.sentence(replica)}")
        if lack := memory.last_failure(layout, name):
            lines.append(f"  {lack}")
    return Result(summary="\n".join(lines) or "no deployment on this server", data={"replicas": data})
