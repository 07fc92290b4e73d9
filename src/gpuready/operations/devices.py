"""The first step of a replica's unit: which GPUs it has at this start, and whether all that it needs is there.

It fails, and systemd tries again, as long as a driver, a GPU or a filesystem is not there yet. The engine is not to
blame for that, so such a start does not count against it (operations/crashes.py).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpuready.hardware import nvml
from gpuready.operations import crashes
from gpuready.operations.start import RELEASE, UUIDS, Start, next_start
from gpuready.outcome import Failure, MachineCannot, Result
from gpuready.serving.files import make_folder, write_text
from gpuready.serving.layout import Layout

DEVICE_FILES = ("nvidia*", "nvidia-caps/*", "infiniband/uverbs*")
"""Below /dev, what CUDA and NCCL open."""


def write_devices(layout: Layout, replica: str, limit: crashes.Limit = crashes.USUAL) -> Result:
    """Write devices.env: the replica's release and GPUs at this start.

    Engines take indices only (vLLM 0.19.1 reads each entry of CUDA_VISIBLE_DEVICES as a number), and indices shift
    when a GPU is gone. So on trial the planned indices hold, which were made from today's GPUs, and the proof records
    their UUIDs; every later start looks those UUIDs up and takes the indices that they have now.
    """
    if crashes.gives_up(layout, replica, limit):
        return Result(summary=f"{replica} is not started again")
    crashes.pause(layout, replica)
    start, trial = next_start(layout, replica)
    demand_files(replica, start)
    report = nvml.probe()
    if report is None or report.problem:
        why = "there is no NVIDIA driver" if report is None else str(report.problem)
        raise MachineCannot(
            Failure("replica.no_nvml", f"the GPUs of {replica} cannot be named", why, "repair the driver")
        )
    demand_open(replica)
    recorded = None if trial else start.store.gpu_uuids(start.number, start.index)
    found = by_uuids(replica, report, recorded) if recorded else by_indices(replica, report, start.part["gpus"])
    indices = ",".join(str(gpu.index) for gpu in found)
    uuids = ",".join(str(gpu.uuid) for gpu in found)
    folder = layout.run(replica)
    make_folder(folder)
    lines = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": indices,
        UUIDS: uuids,
        RELEASE: start.number,
    }
    # Proof of another start must not stand beside it.
    (folder / "ready.json").unlink(missing_ok=True)
    write_text(folder / "devices.env", "".join(f"{key}={value}\n" for key, value in lines.items()))
    tried = ", on trial" if trial else ""
    return Result(summary=f"{replica} starts on release {start.number}{tried}, GPU {indices} ({uuids})")


def demand_files(replica: str, start: Start) -> None:
    """Raise where the engine or the model cannot be seen, as on a filesystem that is not mounted yet."""
    python = f"{start.plan['engine_folder']}/bin/python"
    if not Path(python).exists():
        what = f"the engine of {replica} is not there: {start.plan['engine_folder']} has no Python"
        raise MachineCannot(Failure("replica.no_engine", what, "", "mount its filesystem, or run site.yml"))
    model = start.plan.get("model_path")
    if model and (why := _unseen(Path(model))):
        what = f"the model of {replica} is not there: {model}"
        raise MachineCannot(Failure("replica.no_model", what, why, "mount its filesystem, or run site.yml"))


def _unseen(model: Path) -> str:
    """Return why a model's folder cannot be seen, or that nothing lies in it; empty where it can be."""
    try:
        # Of a remote filesystem root may be the one user that must not look; the engine will see for itself.
        return "" if any(model.iterdir()) else "the folder is empty"
    except PermissionError:
        return ""
    except OSError as error:
        return os.strerror(error.errno or 0)


# ------------------------------------------------------------------------------------------------ by NVML


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


# ------------------------------------------------------------------------------------------------ device files


def load_uvm() -> Result:
    """Have the driver's unified memory module loaded and its device there: CUDA needs it, NVML does not make it."""
    program = shutil.which("nvidia-modprobe")
    if program is None:
        return Result(summary="nvidia-modprobe is not installed; the module's own rules make the device files")
    done = subprocess.run([program, "-u", "-c=0"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        what = f"CUDA has no unified memory: nvidia-modprobe -u -c=0 ended with {done.returncode}"
        fix = "see that the module nvidia-uvm of the running kernel is installed (dkms status) and loads"
        raise MachineCannot(Failure("replica.no_uvm", what, said[-1] if said else "it said nothing", fix))
    return Result(summary="the module nvidia-uvm is loaded")


def files_of_gpus(root: Path = Path("/dev")) -> list[Path]:
    """Return the device files that CUDA and NCCL open, as far as this server has them."""
    found = [path for pattern in DEVICE_FILES for path in sorted(root.glob(pattern))]
    return [path for path in found if stat.S_ISCHR(path.stat().st_mode)]


def locked(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the device files that this process may not open, though the device behind them may be there.

    What a cgroup's list of devices forbids is EPERM, for root too; a driver that is away says ENXIO or ENODEV.
    """
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                yield path


def demand_open(replica: str) -> None:
    """Raise where this unit may not open the GPUs' device files.

    systemd reads /proc/devices when it starts a unit. A module that was loaded after that is on its list from the
    next start on.
    """
    closed = list(locked(files_of_gpus()))
    if closed:
        what = f"the unit of {replica} may not open {', '.join(map(str, closed))}"
        fix = "where it stays so, set serving_restrict_devices: false and run site.yml"
        raise MachineCannot(Failure("replica.devices_locked", what, "its DeviceAllow= does not name the driver", fix))
