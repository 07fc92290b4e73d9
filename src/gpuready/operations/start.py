"""What a replica starts on, and what its unit's first step wrote for this start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready.outcome import Failure, MachineCannot
from gpuready.serving.files import read_json
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import Store, trial_release

RELEASE = "GPUREADY_RELEASE"
UUIDS = "GPUREADY_GPU_UUIDS"


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
    number = read_devices(layout, replica).get(RELEASE, "")
    return _read(layout, replica, int(number) if number.isdigit() else None)


def read_devices(layout: Layout, replica: str) -> dict[str, str]:
    """Return what the first step of the unit wrote for this start; empty before it."""
    _split(replica)
    path = layout.run(replica) / "devices.env"
    if not path.exists():
        return {}
    return dict(line.partition("=")[::2] for line in path.read_text(encoding="utf-8").splitlines())
