"""The faults that can be planted, as data: a new one is a new row of FAULTS (or of XIDS).

What an effect says of a key: a text or number is the value itself; `+1` adds to what is there; `=other` is the value
of another key, `=other|92` with a value for where that one is unknown; `50%other` is half of it. `{option}` stands for
what was asked for, and a line whose option is empty is left out. `key?` is laid only over a GPU that has the key.

Figures: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors), "GPU Memory Error Management"
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt) and the NVML reference (docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

XID_CRITICAL, DOUBLE_BIT = 8, 2
"""Of nvmlEventType*."""
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Need:
    """What a GPU must have for a fault to make sense."""

    key: str
    """The key that it must have; for a list, at least one."""
    lacking: str
    """What is said of one that does not."""
    values: tuple[str, ...] = ()
    """What the key must be one of, or begin with."""


ECC = Need("ecc_current", "does not have ECC on", ("1",))
ROW_REMAPPING = Need("remap_pending", "has no row remapping, which came with Ampere")
CONTAINMENT = Need(
    "compute_capability",
    "does not contain memory errors, which A100, H100 and Blackwell's data centre cards do",
    ("8.0", "9.0", "10."),
)
NVLINK = Need("nvlink", "has no NVLink")
NVSWITCH = Need("nvlink", "is not connected to an NVSwitch", ("switch",))
PCIE = Need("pcie_width_max", "does not tell its PCIe link")


@dataclass(frozen=True)
class Effect:
    """What a fault does to one GPU, or to the system."""

    until_clear: Mapping[str, str] = field(default_factory=dict)
    until_reset: Mapping[str, str] = field(default_factory=dict)
    until_reboot: Mapping[str, str] = field(default_factory=dict)
    events: tuple[tuple[int, int], ...] = ()
    """Type and data."""
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True)
class Option:
    """What can be said about a fault."""

    name: str
    what: str
    default: str | int | None = None
    """None: it must be given. Else what an effect can say, or empty."""
    number: bool = True


@dataclass(frozen=True)
class Fault:
    """A fault by its name."""

    name: str
    what: str
    effect: Effect = Effect()
    of: str = "gpu"
    """`gpu`, `gpus` (all of them at once), or `system`."""
    options: tuple[Option, ...] = ()
    holds: str = ""
    """A process runs on the GPU, with that many MiB; growing by `mib_per_minute` if there is such an option."""
    unless: str = ""
    """The option with which there is no such process."""


@dataclass(frozen=True)
class Xid:
    """An XID that does more than to be told, and how the kernel's line ends."""

    text: str
    effect: Effect = Effect()


def _xid(number: int) -> tuple[tuple[int, int], ...]:
    return ((XID_CRITICAL, number),)


# Of an uncorrectable error in memory: what outlives a reset, and what a reset mends.
_COUNTED = {
    "ecc_aggregate_uncorrected": "+1",
    "remapped_uncorrectable?": "+1",
    "retired_double_bit?": "+1",
}
_PENDING = {"ecc_volatile_uncorrected": "+1", "remap_pending?": "1", "retirement_pending?": "1"}
RESET, DRAIN_AND_RESET = "1", "4"
"""Of NVML_GPU_RECOVERY_ACTION_*."""

LOST = Effect(until_reboot={"lost": "1"}, events=_xid(79))

XIDS = {
    48: Xid(
        "pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected on GPU",
        Effect(
            until_clear=_COUNTED,
            until_reset={**_PENDING, "recovery_action?": RESET},
            events=((XID_CRITICAL, 48), (DOUBLE_BIT, 0)),
            needs=(ECC,),
        ),
    ),
    63: Xid("pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping, reset gpu to activate."),
    64: Xid("pid='<unknown>', name=<unknown>, Row Remapper: Failed to remap row"),
    74: Xid("pid='<unknown>', name=<unknown>, NVLink: fatal error detected"),
    79: Xid("pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", LOST),
    94: Xid(
        "pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No",
        Effect(
            until_clear=_COUNTED,
            until_reset={**_PENDING, "recovery_action?": DRAIN_AND_RESET},
            events=_xid(94),
            needs=(ECC, CONTAINMENT),
        ),
    ),
}

MIB = Option("mib", "memory that it holds, in MiB", 4096)

FAULTS = (
    Fault("gpu-lost", "the GPU has fallen off the bus, until the next boot", LOST),
    Fault(
        "xid",
        "an XID event; 79 also loses the GPU, 48 and 94 also count uncorrectable memory errors",
        options=(Option("xid", "its number"),),
    ),
    Fault(
        "nvlink-down",
        "one NVLink is down, until the GPU is reset",
        Effect(until_reset={"nvlink_down": "{link}"}, events=_xid(74), needs=(NVLINK,)),
        options=(Option("link", "which link"),),
    ),
    Fault(
        "fabric-not-started",
        "the fabric manager does not run: no GPU is part of a fabric",
        Effect(until_clear={"fabric_state": "1"}, needs=(NVSWITCH,)),
        of="gpus",
    ),
    Fault(
        "row-remap-pending",
        "a row of memory is to be replaced at the next reset",
        Effect(
            until_clear={"remapped_uncorrectable": "+1"},
            until_reset={"remap_pending": "1", "recovery_action?": DRAIN_AND_RESET},
            events=_xid(63),
            needs=(ROW_REMAPPING,),
        ),
    ),
    Fault(
        "row-remap-failure",
        "a row of memory could not be replaced: the card is to be exchanged",
        Effect(until_clear={"remap_failure": "1"}, events=_xid(64), needs=(ROW_REMAPPING,)),
    ),
    Fault(
        "ecc-errors",
        "memory errors were counted",
        Effect(
            until_clear={"ecc_aggregate_corrected": "+{corrected}", "ecc_aggregate_uncorrected": "+{uncorrected}"},
            until_reset={"ecc_volatile_corrected": "+{corrected}", "ecc_volatile_uncorrected": "+{uncorrected}"},
            needs=(ECC,),
        ),
        options=(
            Option("corrected", "how many were corrected", 12),
            Option("uncorrected", "how many were not", 0),
        ),
    ),
    Fault(
        "driver-library-mismatch",
        "libraries and loaded driver are of different versions, until the next boot",
        Effect(until_reboot={"init_error": "18"}),
        of="system",
    ),
    Fault("driver-not-loaded", "the driver is not loaded", Effect(until_clear={"init_error": "9"}), of="system"),
    Fault(
        "busy",
        "a process holds the GPU, or a kernel module does: it cannot be reset, nor its MIG mode changed",
        Effect(until_clear={"held_by_module": "{module}"}),
        options=(MIB, Option("module", "a module instead of a process, e.g. nvidia_drm", "", number=False)),
        holds="{mib}",
        unless="module",
    ),
    Fault(
        "memory-creep",
        "a process on the GPU grows",
        options=(MIB, Option("mib_per_minute", "by how much it grows, in MiB a minute")),
        holds="{mib}",
    ),
    Fault(
        "thermal-throttle",
        "the GPU is too hot and has slowed its clocks to a half",
        Effect(
            until_clear={
                "temperature_celsius": "=temperature_slowdown_celsius|90",
                "throttle_reasons": "|0x48",  # hardware slowdown, for thermal reasons
                "clock_graphics?": "50%clock_graphics_max",
                "clock_sm?": "50%clock_sm_max",
            }
        ),
    ),
    Fault(
        "power-brake",
        "the power supply asked the GPU to slow down",
        Effect(
            until_clear={
                "throttle_reasons": "|0x88",  # hardware slowdown, for the power brake
                "clock_graphics?": "50%clock_graphics_max",
                "clock_sm?": "50%clock_sm_max",
            }
        ),
    ),
    Fault("stuck-reset", "a reset of the GPU fails, until the next boot", Effect(until_reboot={"reset_stuck": "1"})),
    Fault(
        "pcie-degraded",
        "the PCIe link has fallen back to fewer lanes or an older generation",
        Effect(until_clear={"pcie_width": "{width}", "pcie_generation": "{generation}"}, needs=(PCIE,)),
        options=(
            Option("width", "its lanes (default: half of them)", "50%pcie_width_max"),
            Option("generation", "its generation (default: as it is)", ""),
        ),
    ),
)


def find(name: str) -> Fault | None:
    """Return a fault by its name."""
    return next((fault for fault in FAULTS if fault.name == name), None)
