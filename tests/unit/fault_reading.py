"""What pynvml says about the hardware that a fault can change; run in a process of its own, prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pynvml as nvml


def said(call: Callable[..., Any], *words: Any) -> Any:
    """Return what a call says, or its error."""
    try:
        return call(*words)
    except nvml.NVMLError as error:
        return {"error": error.value}


def fabric(gpu: Any) -> Any:
    """Return the state of the GPU in its fabric."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    info.version = nvml.nvmlGpuFabricInfo_v2
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, nvml.byref(info))
    return info.state


def field(gpu: Any, number: int) -> Any:
    """Return the value of a field."""
    value = nvml.nvmlDeviceGetFieldValues(gpu, [number])[0]
    return {"error": value.nvmlReturn} if value.nvmlReturn else value.value.uiVal


def processes(gpu: Any) -> list[tuple[int, int]]:
    """Return id and memory of each compute process."""
    return [(one.pid, one.usedGpuMemory) for one in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]


def ecc(gpu: Any) -> list[int]:
    """Return the counts: volatile corrected and uncorrected, aggregate corrected and uncorrected."""
    return [nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, counter) for counter in (0, 1) for kind in (0, 1)]


def links(gpu: Any) -> list[int]:
    """Return the links that are down."""
    return [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if said(nvml.nvmlDeviceGetNvLinkState, gpu, link) == 0]


def peers(gpu: Any) -> list[int]:
    """Return how NVLink leads to the other GPUs that answer: 0 where it does, the reason where it does not."""
    handles = [said(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(nvml.nvmlDeviceGetCount())]
    own = nvml.nvmlDeviceGetIndex(gpu)
    others = [handle for index, handle in enumerate(handles) if index != own and not isinstance(handle, dict)]
    return sorted({nvml.nvmlDeviceGetP2PStatus(gpu, one, nvml.NVML_P2P_CAPS_INDEX_NVLINK) for one in others})


CALLS: dict[str, Callable[[Any], Any]] = {
    "name": nvml.nvmlDeviceGetName,
    "temperature": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
    "throttling": nvml.nvmlDeviceGetCurrentClocksEventReasons,
    "clock": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "clock_max": lambda gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "ecc": ecc,
    "remapped": nvml.nvmlDeviceGetRemappedRows,
    "retirement_pending": nvml.nvmlDeviceGetRetiredPagesPendingStatus,
    "links_down": links,
    "fabric": fabric,
    "nvlink_peers": peers,
    "pcie_width": nvml.nvmlDeviceGetCurrPcieLinkWidth,
    "pcie_generation": nvml.nvmlDeviceGetCurrPcieLinkGeneration,
    "processes": processes,
    "used": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "recovery": lambda gpu: field(gpu, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
}


def read() -> Any:
    """Return all of it, by GPU; the error of nvmlInit where that fails."""
    started = said(nvml.nvmlInit)
    if started:
        return started
    return [read_gpu(said(nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(nvml.nvmlDeviceGetCount())]


def read_gpu(handle: Any) -> Any:
    """Return what one GPU says; a lost one does not even have a handle."""
    return handle if isinstance(handle, dict) else {name: said(call, handle) for name, call in CALLS.items()}


if __name__ == "__main__":
    json.dump(read(), sys.stdout)
