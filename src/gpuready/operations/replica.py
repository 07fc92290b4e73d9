"""The steps of a replica's unit: devices before it starts, the engine itself, readiness after it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from gpuready.hardware import nvml
from gpuready.outcome import Failed, Failure, MachineCannot, Result
from gpuready.serving import readiness, units
from gpuready.serving.files import as_json, read_json, write_text
from gpuready.serving.layout import Layout, split_replica

DEFAULT_START_SECONDS = 600


def load(layout: Layout, replica: str) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Return the plan of a replica's deployment, the replica's own part, and its release's folder.

    Raises:
        MachineCannot: when the replica has no release here.
    """
    try:
        name, index = split_replica(replica)
    except ValueError as error:
        what = f"{replica!r} is not a replica"
        raise MachineCannot(Failure("replica.name", what, "", "name it DEPLOYMENT.INDEX, e.g. chat.0")) from error
    current = layout.current(name, index)
    plan = read_json(current / "plan.json")
    part = next((one for one in (plan or {}).get("replicas", []) if one["index"] == index), None)
    if plan is None or part is None:
        what = f"replica {replica} has no release on this server"
        raise MachineCannot(Failure("replica.no_release", what, f"{current} leads nowhere", "run site.yml for it"))
    return plan, part, current.resolve()


def write_devices(layout: Layout, replica: str) -> Result:
    """Write devices.env: the UUIDs of the replica's GPUs, as NVML names them at this start."""
    _, part, _ = load(layout, replica)
    report = nvml.probe()
    if report is None or report.problem:
        why = "there is no NVIDIA driver" if report is None else str(report.problem)
        raise MachineCannot(
            Failure("replica.no_nvml", f"the GPUs of {replica} cannot be named", why, "repair the driver")
        )
    by_index = {gpu.index: gpu for gpu in report.gpus}
    missing = [index for index in part["gpus"] if index not in by_index or not by_index[index].uuid]
    if missing:
        what = f"{replica} was planned on GPU {missing[0]}, which does not answer"
        raise MachineCannot(
            Failure("replica.gpu_gone", what, f"{len(by_index)} GPUs answer", "see nvidia-smi; then site.yml")
        )
    uuids = ",".join(str(by_index[index].uuid) for index in part["gpus"])
    folder = layout.run(replica)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "devices.env", f"CUDA_VISIBLE_DEVICES={uuids}\n")
    return Result(summary=f"{replica} runs on {uuids}")


def _environment(layout: Layout, replica: str, plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of the engine: little of ours, the plan's, and its devices."""
    cache = f"{layout.root}var/cache/gpuready/{replica}"
    environment = {
        "PATH": f"{plan['engine_folder']}/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": cache,
        "XDG_CACHE_HOME": cache,
        "LANG": "C.UTF-8",
        **plan["environment"],
    }
    for line in (layout.run(replica) / "devices.env").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        environment[key] = value
    return environment


def run_engine(layout: Layout, replica: str) -> NoReturn:
    """Become the engine: systemd then signals and watches the engine itself, not a wrapper."""
    plan, _, release = load(layout, replica)
    python = f"{plan['engine_folder']}/bin/python"
    if not Path(python).exists():
        what = f"the engine of {replica} is not installed: {plan['engine_folder']} has no Python"
        raise MachineCannot(Failure("replica.no_engine", what, "", "run site.yml for this server"))
    words = [python, "-m", plan["launch"], "--config", str(release / "serve.yaml")]
    os.chdir("/")
    os.execve(python, words, _environment(layout, replica, plan))  # noqa: S606 - replacing ourselves is the point


def wait_ready(layout: Layout, replica: str, main_pid: int | None) -> Result:
    """Wait for one real token, then write ready.json with the memory baseline."""
    plan, part, _ = load(layout, replica)
    budget = float(plan.get("start_seconds", DEFAULT_START_SECONDS))
    try:
        seconds = readiness.wait_for_token(part["port"], plan["model"], main_pid, budget)
    except readiness.NotReady as error:
        raise Failed(Failure("replica.not_ready", f"{replica} is not ready", str(error), "see its journal")) from error
    pid = main_pid or 0
    digest = units.digest(layout.engine_unit)
    proof = readiness.baseline(pid, part["port"], plan["model"], seconds, digest)
    write_text(layout.run(replica) / "ready.json", as_json({**proof, "gpu_process_bytes": _gpu_memory(pid)}))
    return Result(summary=f"{replica} gave its first token after {seconds:.1f} s")


def _gpu_memory(main_pid: int) -> int | None:
    """Return what NVML says the replica's processes hold on all GPUs, in bytes; None when it does not say."""
    report = nvml.probe()
    if report is None or report.problem:
        return None
    pids = set(readiness.process_tree(main_pid))
    held = [
        process.used_bytes
        for gpu in report.gpus
        for process in gpu.processes or ()
        if process.pid in pids and process.used_bytes is not None
    ]
    return sum(held) if held else None


def status(layout: Layout, replicas: list[str]) -> Result:
    """Return what each replica is doing now."""
    data: dict[str, Any] = {}
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
        }
    lines = [
        f"{replica}: {one['state']} ({one['step']}), release {one['release']}, {one['restarts']} automatic restarts"
        for replica, one in data.items()
    ]
    return Result(summary="\n".join(lines) or "no deployment on this server", data={"replicas": data})
