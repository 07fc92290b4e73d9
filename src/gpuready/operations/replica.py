"""The steps of a replica's unit: devices before it starts, the engine itself, readiness after it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gpuready.hardware import host, nvml
from gpuready.operations import readback
from gpuready.outcome import Failed, Failure, MachineCannot, Result
from gpuready.serving import launch, readiness, units
from gpuready.serving.files import as_json, make_folder, read_json, write_text
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import Store, trial_release

DEFAULT_START_SECONDS = 600
"""For releases planned before the planner gave a limit of their own."""
STEADY_SECONDS = 600
LONGEST_PAUSE_SECONDS = 60
_RELEASE = "GPUREADY_RELEASE"
_UUIDS = "GPUREADY_GPU_UUIDS"


@dataclass(frozen=True)
class Start:
    """One replica on one release."""

    store: Store
    number: int
    index: int
    plan: dict[str, Any]
    """The plan of the replica's deployment."""
    part: dict[str, Any]
    """The replica's own part of it."""

    @property
    def folder(self) -> Path:
        """The release's folder."""
        return self.store.folder(self.number)


def _split(replica: str) -> tuple[str, int]:
    try:
        return split_replica(replica)
    except ValueError as error:
        what = f"{replica!r} is not a replica"
        raise MachineCannot(Failure("replica.name", what, "", "name it DEPLOYMENT.INDEX, e.g. chat.0")) from error


def _read(layout: Layout, replica: str, number: int | None) -> Start:
    name, index = _split(replica)
    store = Store(layout, name)
    plan = None if number is None else read_json(store.folder(number) / "plan.json")
    part = None if number is None else store.part(number, index)
    if number is None or plan is None or part is None:
        what = f"replica {replica} has no release on this server"
        raise MachineCannot(
            Failure("replica.no_release", what, f"{layout.current(name, index)} leads to none", "run site.yml for it")
        )
    return Start(store, number, index, plan, part)


def next_start(layout: Layout, replica: str) -> tuple[Start, bool]:
    """Return what the replica starts on now, and whether that is a trial.

    Raises:
        MachineCannot: when there is no release, or only one that never gave a token.
    """
    tried = trial_release(layout, replica, only_live=True)
    if tried is not None:
        return _read(layout, replica, tried), True
    name, index = _split(replica)
    start = _read(layout, replica, Store(layout, name).current(index))
    if not start.store.verified(start.number):
        what = f"release {start.number} of {replica} never gave a token"
        why = "without site.yml only what was proved is started"
        raise MachineCannot(Failure("replica.not_verified", what, why, "run site.yml for this server"))
    return start, False


def running(layout: Layout, replica: str) -> Start:
    """Return what the replica was started on; the link may have moved since."""
    number = read_devices(layout, replica).get(_RELEASE, "")
    return _read(layout, replica, int(number) if number.isdigit() else None)


def read_devices(layout: Layout, replica: str) -> dict[str, str]:
    """Return what the first step of the unit wrote for this start; empty before it."""
    path = layout.run(replica) / "devices.env"
    if not path.exists():
        return {}
    return dict(line.partition("=")[::2] for line in path.read_text(encoding="utf-8").splitlines())


def write_devices(layout: Layout, replica: str) -> Result:
    """Write devices.env: the replica's release and GPUs at this start.

    Engines take indices only (vLLM 0.19.1 reads each entry of CUDA_VISIBLE_DEVICES as a number), and indices shift
    when a GPU is gone. So on trial the planned indices hold, which were made from today's GPUs, and the proof records
    their UUIDs; every later start looks those UUIDs up and takes the indices that they have now.
    """
    _pause(layout, replica)
    start, trial = next_start(layout, replica)
    load_uvm(replica)
    report = nvml.probe()
    if report is None or report.problem:
        why = "there is no NVIDIA driver" if report is None else str(report.problem)
        raise MachineCannot(
            Failure("replica.no_nvml", f"the GPUs of {replica} cannot be named", why, "repair the driver")
        )
    recorded = None if trial else start.store.gpu_uuids(start.number, start.index)
    found = by_uuids(replica, report, recorded) if recorded else by_indices(replica, report, start.part["gpus"])
    indices = ",".join(str(gpu.index) for gpu in found)
    uuids = ",".join(str(gpu.uuid) for gpu in found)
    folder = layout.run(replica)
    make_folder(folder)
    lines = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": indices,
        _UUIDS: uuids,
        _RELEASE: start.number,
    }
    # Proof of another start must not stand beside it.
    (folder / "ready.json").unlink(missing_ok=True)
    write_text(folder / "devices.env", "".join(f"{key}={value}\n" for key, value in lines.items()))
    tried = ", on trial" if trial else ""
    return Result(summary=f"{replica} starts on release {start.number}{tried}, GPU {indices} ({uuids})")


def by_uuids(replica: str, report: nvml.NvmlReport, uuids: Sequence[str]) -> list[nvml.NvmlGpu]:
    """Return the GPUs with these UUIDs, wherever they are now."""
    known = {gpu.uuid: gpu for gpu in report.gpus}
    gone = [uuid for uuid in uuids if uuid not in known]
    if gone:
        what = f"{replica} was proved on GPU {gone[0]}, which does not answer"
        fix = "see nvidia-smi; with the GPU replaced, or gpuready_gpu_count corrected, run site.yml for this server"
        raise MachineCannot(Failure("replica.gpu_gone", what, _answering(report), fix))
    return [known[uuid] for uuid in uuids]


def by_indices(replica: str, report: nvml.NvmlReport, indices: Sequence[int]) -> list[nvml.NvmlGpu]:
    """Return the GPUs with these indices, which NVML counts in the order of PCI addresses."""
    known = {gpu.index: gpu for gpu in report.gpus if gpu.uuid}
    gone = [index for index in indices if index not in known]
    if gone:
        what = f"{replica} was planned on GPU {gone[0]}, which does not answer"
        raise MachineCannot(Failure("replica.gpu_gone", what, _answering(report), "see nvidia-smi; then run site.yml"))
    return [known[index] for index in indices]


def _answering(report: nvml.NvmlReport) -> str:
    answering = [str(gpu.index) for gpu in report.gpus if gpu.uuid]
    problems = [gpu.problem for gpu in report.gpus if gpu.problem]
    return " ".join([f"answering are GPUs {', '.join(answering) or 'none'}", *problems])


def load_uvm(replica: str) -> None:
    """Have the driver's unified memory module loaded and its device there: CUDA needs it, NVML does not make it."""
    program = shutil.which("nvidia-modprobe")
    if program is None:
        return
    done = subprocess.run([program, "-u", "-c=0"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        what = f"{replica} cannot start: nvidia-modprobe -u -c=0 ended with {done.returncode}"
        fix = "see that the module nvidia-uvm of the running kernel is installed (dkms status) and loads"
        raise MachineCannot(Failure("replica.no_uvm", what, said[-1] if said else "it said nothing", fix))


def _pause(layout: Layout, replica: str) -> None:
    """Wait longer from one failing start to the next, so that the unit never has to give up.

    systemd can do so itself from 254 on (RestartSteps=), which Ubuntu 22.04 and Debian 12 do not have.
    """
    path = layout.starts(replica)
    now = time.monotonic()
    recent = [start for start in (read_json(path) or {}).get("starts", []) if 0 <= now - start < STEADY_SECONDS]
    make_folder(path.parent)
    write_text(path, as_json({"starts": [*recent[-9:], now]}))
    restarts = units.properties(units.unit_of(replica), "NRestarts").get("NRestarts", "")
    # A start that somebody asked for counts 0 restarts and waits for nothing.
    failing = min(int(restarts) if restarts.isdigit() else 0, len(recent))
    if failing > 1:
        time.sleep(min(LONGEST_PAUSE_SECONDS, 2**failing))


def _environment(layout: Layout, replica: str, plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of the engine: little of ours, the plan's, and its devices."""
    cache = str(layout.cache(replica))
    cuda = plan.get("cuda_home")
    path = [f"{plan['engine_folder']}/bin", *([f"{cuda}/bin"] if cuda else []), "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "PATH": ":".join(path),
        **({"CUDA_HOME": cuda} if cuda else {}),
        "HOME": cache,
        "XDG_CACHE_HOME": cache,
        "LANG": "C.UTF-8",
        # Nothing is reported to anyone, and nothing fetched: the model is on this server or the engine fails.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **_variables(plan, cache),
        **read_devices(layout, replica),
    }


def _variables(plan: Mapping[str, Any], cache: str) -> dict[str, str]:
    """Return the plan's variables, with the replica's own folder where they name it as systemd does."""
    known = plan["environment"]
    if isinstance(known, Mapping):  # a release that was made before variables had reasons
        return dict(known)
    return {one["name"]: one["value"].replace("${CACHE_DIRECTORY}", cache) for one in known}


def stay_near(replica: str, node: int | None) -> None:
    """Keep this process, and so the engine, on the CPUs of a NUMA node; its memory is then taken there, too."""
    cpus = next((one.cpus for one in host.numa_nodes() or () if one.number == node), ())
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        # Without it the engine is a little slower.
        print(f"{replica} is not kept on the CPUs of NUMA node {node}: {error}", flush=True)


def run_engine(layout: Layout, replica: str) -> NoReturn:
    """Become the engine: systemd then signals and watches the engine itself, not a wrapper."""
    start = running(layout, replica)
    plan = start.plan
    python = f"{plan['engine_folder']}/bin/python"
    if not Path(python).exists():
        what = f"the engine of {replica} is not installed: {plan['engine_folder']} has no Python"
        raise MachineCannot(Failure("replica.no_engine", what, "", "run site.yml for this server"))
    words = launch.words(plan, start.folder, start.part)
    stay_near(replica, start.part.get("numa_node"))
    os.chdir("/")
    os.execve(python, words, _environment(layout, replica, plan))  # noqa: S606 - replacing ourselves is the point


def start_seconds(plan: Mapping[str, Any]) -> float:
    """Return how long the engine may take to its first token; the planner knows it from the weights' bytes."""
    return float(plan.get("start_seconds") or DEFAULT_START_SECONDS)


def wait_ready(layout: Layout, replica: str, main_pid: int | None) -> Result:
    """Wait for one real token, then write ready.json: what gave it, on which GPUs, and what memory it has."""
    start = running(layout, replica)
    port, model = start.part["port"], start.plan["model"]
    try:
        asked = readiness.Asked(port, model, start.plan.get("task", "generate"))
        seconds = readiness.wait_for_token(asked, main_pid, start_seconds(start.plan))
    except readiness.NotReady as error:
        what = f"{replica} is not ready on release {start.number}"
        raise Failed(Failure("replica.not_ready", what, str(error), "see its journal")) from error
    pid = main_pid or 0
    # A unit file that systemd has not read yet is not the one that this engine runs under.
    unread = units.properties(units.unit_of(replica), "NeedDaemonReload").get("NeedDaemonReload") == "yes"
    uuids = [uuid for uuid in read_devices(layout, replica).get(_UUIDS, "").split(",") if uuid]
    proof = {
        **readiness.baseline(pid, port, model, seconds, "" if unread else units.digest(layout.engine_unit)),
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
        }
        found = readback.comparison(layout, replica)
        data[replica]["kv_cache"] = found.as_dict() if found else None
        lines.append(
            f"{replica}: {shown.get('ActiveState')} ({shown.get('SubState')}), release {data[replica]['release']}, "
            f"{data[replica]['restarts']} automatic restarts"
        )
        if found:
            lines.append(f"  {found.sentence(replica)}")
    return Result(summary="\n".join(lines) or "no deployment on this server", data={"replicas": data})
