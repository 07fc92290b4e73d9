"""One replica as wanted, and what it holds and serves now: asked of systemd, of its record and of its last proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuready.hardware import nvml
from gpuready.operations import claims
from gpuready.operations.claims import Claim
from gpuready.serving import figures, releases, units
from gpuready.serving.files import as_json, read_json
from gpuready.serving.layout import Layout
from gpuready.serving.releases import Store


@dataclass
class Target:
    """One replica as planned and rendered."""

    store: Store
    index: int
    files: Mapping[str, str]
    part: Mapping[str, Any]
    plan: Mapping[str, Any] = field(repr=False)
    """The plan of its deployment."""

    @property
    def replica(self) -> str:
        """Its name, e.g. `chat.0`."""
        return f"{self.store.deployment}.{self.index}"

    @property
    def unit(self) -> str:
        """Its unit."""
        return units.unit_of(self.replica)

    @property
    def claims(self) -> set[Claim]:
        """What it needs for itself."""
        return claims.of_part(self.part)

    def number(self) -> int:
        """Return the release with its files, written where there is none yet."""
        return self.store.find(self.files) or self.store.add(self.files)


def of_deployment(layout: Layout, planned: Mapping[str, Any], files: Mapping[str, str]) -> list[Target]:
    """Return the replicas of a deployment: its plan is one of the files of its release."""
    store = Store(layout, planned["name"])
    whole = {**files, "plan.json": as_json(planned)}
    return [Target(store, part["index"], whole, part, planned) for part in planned["replicas"]]


@dataclass(frozen=True)
class Situation:
    """What replicas hold and serve now, on today's GPUs."""

    layout: Layout
    gpus: tuple[nvml.NvmlGpu, ...]

    def ready(self, replica: str, state: Mapping[str, str]) -> dict[str, Any]:
        """Return the proof of the process that runs now; empty where it has given none."""
        ready = read_json(self.layout.run(replica) / "ready.json") or {}
        serves = state.get("ActiveState") == "active" and str(ready.get("main_pid")) == state.get("MainPID")
        return ready if serves else {}

    def serving(self, replica: str) -> dict[str, Any]:
        """Return the same, with its unit asked now."""
        return self.ready(replica, units.properties(units.unit_of(replica), "ActiveState", "MainPID"))

    def requests(self, store: Store, index: int) -> int | None:
        """Return how many requests a replica's engine says that it has; None where nobody says."""
        ready = self.serving(f"{store.deployment}.{index}")
        plan = read_json(store.folder(ready.get("release", 0)) / "plan.json") or {}
        return figures.running(str(plan.get("engine")), int(ready["port"])) if ready and plan else None

    def moved(self, target: Target, ready: Mapping[str, Any]) -> str:
        """Return the planned GPUs where the engine runs on others, as after one was replaced; else nothing."""
        uuid_of = {gpu.index: gpu.uuid for gpu in self.gpus}
        planned = [uuid_of.get(index) for index in target.part["gpus"]]
        return "" if None in planned or planned == ready.get("gpu_uuids") else ", ".join(map(str, planned))

    def held(self, store: Store, index: int) -> set[Claim]:
        """Return what a replica holds now: what its engine was proved on, or all that it may be starting on."""
        replica = f"{store.deployment}.{index}"
        ready = self.serving(replica)
        if part := store.part(ready.get("release", 0), index):
            return claims.of_part(part, self._now(ready.get("gpu_uuids"), part["gpus"]))
        tried = releases.trial_release(self.layout, replica, only_live=False)
        numbers = (store.current(index), tried)
        return {one for number in numbers if number for one in self.claims_of(store, number, index)}

    def claims_of(self, store: Store, number: int, index: int) -> set[Claim]:
        """Return what a replica holds on a release: its recorded GPUs wherever they are now, and its port."""
        part = store.part(number, index)
        return claims.of_part(part, self._now(store.gpu_uuids(number, index), part["gpus"])) if part else set()

    def clashes(self, target: Target, number: int, targets: list[Target]) -> bool:
        """Say whether another replica is recorded on what this one would hold on a release."""
        wanted = self.claims_of(target.store, number, target.index)
        return any(
            claims.clash(wanted, self.claims_of(other.store, held, other.index))
            for other in targets
            if other is not target and (held := other.store.current(other.index)) is not None
        )

    def _now(self, uuids: list[str] | None, planned: list[int]) -> list[int]:
        """Return the indices that GPUs have now; the planned ones where they were not recorded or are gone."""
        index_of = {gpu.uuid: gpu.index for gpu in self.gpus}
        now = [index_of[uuid] for uuid in uuids or [] if uuid in index_of]
        return now if len(now) == len(planned) else planned


def runs(store: Store, number: int, ready: Mapping[str, Any]) -> bool:
    """Say whether what is ready was started on this release as it is on disk."""
    return ready.get("release") == number and ready.get("release_digest") == store.digest(number)
