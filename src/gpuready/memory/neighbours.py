"""Who else holds a replica's GPUs, as NVML tells: other programs, leftovers, deployments beyond their part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_GIB = 1.0
"""What counts: a monitor or the display server holds less."""
TOLERANCE_GIB = 0.5
"""By how much a deployment may exceed its part of a shared GPU unnoticed: contexts are shared out roughly."""


@dataclass(frozen=True)
class Holder:
    """A process on a GPU that is none of the replica's."""

    gpu: int
    pid: int
    gib: float | None
    """None: the driver does not tell."""
    program: str = ""
    unit: str | None = None
    """Its systemd unit; None: it belongs to none."""
    deployment: str | None = None
    """The deployment of gpuready that it serves."""
    part_gib: float | None = None
    """What that deployment was given of a GPU that several share; None: it should not be there at all."""

    @property
    def exceeds(self) -> bool:
        """Say whether it holds more than it was given."""
        return self.gib is not None and self.part_gib is not None and self.gib > self.part_gib + TOLERANCE_GIB

    def words(self) -> str:
        """Return who it is and what it holds."""
        size = "memory that the driver does not tell" if self.gib is None else f"{self.gib:.2f} GiB"
        who = f"process {self.pid}" + (f" ({self.program})" if self.program else "")
        where = f" of unit {self.unit}" if self.unit else " of no unit"
        given = f", {self.part_gib:.2f} GiB were planned for it" if self.part_gib is not None else ""
        return f"GPU {self.gpu}: {who}{where} holds {size}{given}"


def counted(holders: Sequence[Holder]) -> list[Holder]:
    """Return those that hold what they were not given."""
    return [one for one in holders if (one.gib or 0) >= LEAST_GIB and (one.part_gib is None or one.exceeds)]


def exceeding(holders: Sequence[Holder]) -> list[Holder]:
    """Return the deployments that hold more than their part of a shared GPU."""
    return [one for one in holders if one.exceeds]


def said(holders: Sequence[Holder]) -> str:
    """Return what happened, as a clause."""
    if more := exceeding(holders):
        one = more[0]
        return f"deployment {one.deployment} holds {one.gib:.2f} GiB of the shared GPU; its part is {one.part_gib:.2f}"
    return "; ".join(one.words() for one in holders)


def remedy(holders: Sequence[Holder]) -> str:
    """Return what to do about them."""
    if more := exceeding(holders):
        return f"restart deployment {more[0].deployment}, or give it a larger part"
    units = sorted({one.unit for one in holders if one.unit})
    loose = sorted(one.pid for one in holders if not one.unit)
    steps = [f"stop or move {', '.join(units)}"] if units else []
    steps += [f"end {', '.join(f'process {pid}' for pid in loose)}, which no unit holds"] if loose else []
    return "; ".join(steps)
