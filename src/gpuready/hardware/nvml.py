"""GPUs as NVIDIA's driver tells them, through NVML; the one module that imports pynvml.

One failing call, or one lost GPU, never hides the rest: what could not be read is None, and the GPU's
`problem` says which call failed how.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")

_HINTS = {
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        "the loaded kernel module and the installed library are of different driver versions; reboot the server"
    ),
    "NVML_ERROR_NO_PERMISSION": "run this as root",
    "NVML_ERROR_GPU_IS_LOST": "it has fallen off the bus; drain the server and reset or reboot it",
    "NVML_ERROR_RESET_REQUIRED": "reset it (nvidia-smi --gpu-reset)",
    "NVML_ERROR_UNKNOWN": "look for Xid or NVRM lines in the kernel log",
}


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds a GPU; `nvidia-smi --query-compute-apps=pid,used_memory --format=csv`."""

    pid: int
    used_bytes: int | None
    """GPU memory of this process; None where the driver does not tell (inside a container, under vGPU)."""


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU, as the driver sees it; `nvidia-smi -q -i INDEX` shows the same."""

    index: int
    """NVML's index, which is nvidia-smi's: the order of PCI addresses."""
    uuid: str | None = None
    """E.g. `GPU-8c5c46a1-0564-55cd-9893-e62190166561`."""
    name: str | None = None
    """E.g. `NVIDIA H100 80GB HBM3`."""
    pci_address: str | None = None
    """In sysfs' spelling, e.g. `0000:1b:00.0`, so that it equals PciDevice.address."""
    pci_device_id: int | None = None
    """The PCI device id alone, e.g. 0x2330, so that it equals PciDevice.device."""
    memory_total_bytes: int | None = None
    """Total of the card; total = reserved + used + free."""
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    """What the driver and the firmware keep for themselves."""
    compute_capability: tuple[int, int] | None = None
    """E.g. (9, 0)."""
    mig_mode: str | None = None
    """`enabled`, `disabled`, or `not supported`."""
    mig_mode_pending: str | None = None
    """What the mode is after the next reset; differs from `mig_mode` on Ampere after a change."""
    nvlinks_active: int | None = None
    """How many NVLinks are up (`nvidia-smi nvlink -s`); None where the GPU has none or does not tell."""
    nvlink_peers: tuple[str, ...] | None = None
    """PCI addresses at the other ends of the links that are up: GPUs or NVSwitches; None where they are not told."""
    processes: tuple[GpuProcess, ...] | None = None
    """Every compute and graphics process on the GPU; empty when it is free."""
    problem: str | None = None
    """One sentence about what could not be read of this GPU, naming the NVML error."""


@dataclass(frozen=True)
class NvmlReport:
    """The driver and its GPUs; `nvidia-smi -q` shows the same."""

    driver_version: str | None = None
    """E.g. `550.163.01`."""
    nvml_version: str | None = None
    """E.g. `12.550.163.01`."""
    cuda_driver_version: tuple[int, int] | None = None
    """Highest CUDA version of the driver, e.g. (12, 4)."""
    gpus: tuple[NvmlGpu, ...] = ()
    problem: str | None = None
    """One sentence, when the library is there but could not be started or asked; then `gpus` is empty."""


class _Reader:
    """Makes NVML calls, and remembers what went wrong."""

    def __init__(self, pynvml: Any) -> None:
        self.pynvml = pynvml
        self.problems: list[str] = []
        self._quiet = {
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_NO_DATA,
        }

    def try_(self, what: str, call: Callable[..., _T], *arguments: Any) -> _T | None:
        """Return what the call returns, or None; a GPU that lacks a feature is no problem."""
        try:
            return call(*arguments)
        except self.pynvml.NVMLError as error:
            if error.value not in self._quiet:
                self.problems.append(f"{what}: {describe(self.pynvml, error)}")
            return None

    def problem(self, who: str) -> str | None:
        """Return all problems as one sentence, each once."""
        return f"{who}: {'; '.join(dict.fromkeys(self.problems))}." if self.problems else None


def probe() -> NvmlReport | None:
    """Return the driver's view of its GPUs, or None when there is no driver (no library, or no module loaded).

    A library that is there but cannot start, as after an upgrade without a reboot, gives a report with `problem`.
    Takes milliseconds with persistence mode, seconds without. Raises nothing.
    """
    import pynvml  # here, so that only who asks for GPUs needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return None
        return NvmlReport(problem=f"NVML cannot start: {describe(pynvml, error)}.")
    try:
        return _report(pynvml)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def describe(pynvml: Any, error: Any) -> str:
    """Return an NVML error as text: NVML's words, the error's name and number, and what to do about it."""
    names = (name for name in dir(pynvml) if name.startswith("NVML_ERROR_") and getattr(pynvml, name) == error.value)
    name = next(names, "NVML error")
    hint = _HINTS.get(name)
    return f"{str(error).rstrip('.')} ({name}, {error.value})" + (f", {hint}" if hint else "")


def _report(pynvml: Any) -> NvmlReport:
    reader = _Reader(pynvml)
    driver_version = reader.try_("driver version", pynvml.nvmlSystemGetDriverVersion)
    nvml_version = reader.try_("NVML version", pynvml.nvmlSystemGetNVMLVersion)
    cuda = reader.try_("CUDA version", pynvml.nvmlSystemGetCudaDriverVersion_v2)
    count = reader.try_("number of GPUs", pynvml.nvmlDeviceGetCount)
    return NvmlReport(
        driver_version=driver_version,
        nvml_version=nvml_version,
        cuda_driver_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        gpus=tuple(_gpu(pynvml, index) for index in range(count or 0)),
        problem=reader.problem("NVML"),
    )


def _gpu(pynvml: Any, index: int) -> NvmlGpu:
    reader = _Reader(pynvml)
    handle = reader.try_("handle", pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return NvmlGpu(index=index, problem=reader.problem(f"GPU {index}"))
    pci = reader.try_("PCI address", pynvml.nvmlDeviceGetPciInfo_v3, handle)
    memory = _memory(reader, handle)
    uuid = reader.try_("UUID", pynvml.nvmlDeviceGetUUID, handle)
    name = reader.try_("name", pynvml.nvmlDeviceGetName, handle)
    capability = reader.try_("compute capability", pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig_mode, mig_mode_pending = _mig_mode(reader, handle)
    links = _nvlinks(reader, handle)
    nvlink_peers = _nvlink_peers(reader, handle, links)
    processes = _processes(reader, handle)
    return NvmlGpu(
        index=index,
        uuid=uuid,
        name=name,
        pci_address=None if pci is None else _address(pci),
        pci_device_id=None if pci is None else pci.pciDeviceId >> 16,
        memory_total_bytes=memory.get("total"),
        memory_used_bytes=memory.get("used"),
        memory_free_bytes=memory.get("free"),
        memory_reserved_bytes=memory.get("reserved"),
        compute_capability=capability,
        mig_mode=mig_mode,
        mig_mode_pending=mig_mode_pending,
        nvlinks_active=None if links is None else len(links),
        nvlink_peers=nvlink_peers,
        processes=processes,
        problem=reader.problem(f"GPU {index}"),
    )


def _memory(reader: _Reader, handle: Any) -> dict[str, int]:
    pynvml = reader.pynvml
    memory = reader.try_("memory", pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is not None:
        return {key: getattr(memory, key) for key in ("total", "used", "free", "reserved")}
    # Drivers before R510 have version 1 only, which folds what is reserved into `used`.
    memory = reader.try_("memory", pynvml.nvmlDeviceGetMemoryInfo, handle)
    return {} if memory is None else {key: getattr(memory, key) for key in ("total", "used", "free")}


def _mig_mode(reader: _Reader, handle: Any) -> tuple[str | None, str | None]:
    pynvml = reader.pynvml
    words = {pynvml.NVML_DEVICE_MIG_DISABLE: "disabled", pynvml.NVML_DEVICE_MIG_ENABLE: "enabled"}
    try:
        current, pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return "not supported", "not supported"
    except pynvml.NVMLError as error:
        reader.problems.append(f"MIG mode: {describe(pynvml, error)}")
        return None, None
    return words.get(current), words.get(pending)


def _nvlinks(reader: _Reader, handle: Any) -> list[int] | None:
    """Return the NVLinks that are up; None where the GPU has none or does not tell."""
    pynvml = reader.pynvml
    link = 0
    active = []
    try:
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED:
                active.append(link)
    except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported):
        return active if link > 0 else None  # no such link: the end, or a GPU without NVLink
    except pynvml.NVMLError as error:
        reader.problems.append(f"NVLink {link}: {describe(pynvml, error)}")
        return None
    return active


def _nvlink_peers(reader: _Reader, handle: Any, links: list[int] | None) -> tuple[str, ...] | None:
    """Return what is at the other end of the links, each once."""
    if links is None:
        return None
    ends = [
        reader.try_(f"NVLink {link}", reader.pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link) for link in links
    ]
    return None if None in ends else tuple(sorted({_address(end) for end in ends}))


def _address(pci: Any) -> str:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _processes(reader: _Reader, handle: Any) -> tuple[GpuProcess, ...] | None:
    pynvml = reader.pynvml
    compute = reader.try_("processes", pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    graphics = reader.try_("processes", pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle)
    if compute is None:
        return None
    found = {process.pid: process.usedGpuMemory for process in [*(graphics or []), *compute]}
    return tuple(GpuProcess(pid=pid, used_bytes=used) for pid, used in sorted(found.items()))
