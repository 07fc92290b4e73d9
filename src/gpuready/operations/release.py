"""Brings the deployments of one host to what was planned and rendered, and records what was verified."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuready.operations.service import place_unit
from gpuready.outcome import Change, Failed, Failure, Result
from gpuready.serving import units
from gpuready.serving.files import as_json, read_json, write_text
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import Store, replicas_on_disk


@dataclass(frozen=True)
class Wanted:
    """One deployment as planned and rendered."""

    name: str
    files: Mapping[str, str]
    indices: list[int]


@dataclass
class Applier:
    """Applies the wanted deployments; `check` only says what would change."""

    layout: Layout
    check: bool

    def apply(self, plan: Mapping[str, Any], files: Mapping[str, Mapping[str, str]], unit_text: str) -> Result:
        """Bring all deployments of the host to the plan; stop at the first that does not come up."""
        result = Result()
        words: list[str] = []
        unit = place_unit(self.layout.engine_unit.name, unit_text, self.check)
        if unit:
            result.diff.append(unit)
            words.append("the engines' unit is new")
        wanted = [self._wanted(one, files[one["name"]]) for one in plan["deployments"]]
        keep = {f"{one.name}.{index}" for one in wanted for index in one.indices}
        for replica in sorted(replicas_on_disk(self.layout) - keep):
            self._retire(replica, result, words)
        for one in wanted:
            self._bring(one, result, words)
        if not self.check:
            self._record(plan)
        result.changed = bool(words)
        result.summary = "; ".join(words) if words else "every deployment is as planned and serves"
        return result

    def _wanted(self, planned: Mapping[str, Any], files: Mapping[str, str]) -> Wanted:
        return Wanted(
            planned["name"],
            {**files, "plan.json": as_json(planned)},
            [replica["index"] for replica in planned["replicas"]],
        )

    def _record(self, plan: Mapping[str, Any]) -> None:
        text = as_json(plan)
        if not self.layout.plan.exists() or self.layout.plan.read_text(encoding="utf-8") != text:
            write_text(self.layout.plan, text)

    def _retire(self, replica: str, result: Result, words: list[str]) -> None:
        """Stop a replica that is no longer declared; its releases stay for a return."""
        name, index = split_replica(replica)
        words.append(f"{replica} is no longer declared: stopped")
        result.diff.append(Change(units.unit_of(replica), "enabled and running\n", ""))
        if not self.check:
            units.systemctl("disable", "--now", units.unit_of(replica))
            Store(self.layout, name).unpoint(index)

    def _bring(self, wanted: Wanted, result: Result, words: list[str]) -> None:
        store = Store(self.layout, wanted.name)
        number = store.find(wanted.files)
        for index in wanted.indices:
            replica = f"{wanted.name}.{index}"
            former = store.current(index)
            if former is None or former != number:
                result.diff += _changes(replica, store.files(former) if former else {}, wanted.files)
                words.append(f"{replica}: {'first release' if former is None else 'new release'}")
            elif self._stale(replica):
                words.append(f"{replica}: restarted, its unit changed")
            elif not self._serving(replica):
                words.append(f"{replica}: was not serving, started")
            else:
                continue
            if not self.check:
                if number is None:
                    number = store.add(wanted.files)
                self._switch(store, replica, index, number, former)
        if not self.check:
            store.prune({now for index in wanted.indices if (now := store.current(index)) is not None})

    def _serving(self, replica: str) -> bool:
        state = units.properties(units.unit_of(replica), "ActiveState", "UnitFileState")
        ready = read_json(self.layout.run(replica) / "ready.json")
        return state.get("ActiveState") == "active" and state.get("UnitFileState") == "enabled" and ready is not None

    def _stale(self, replica: str) -> bool:
        """Say whether a replica runs under another unit file than the one on disk."""
        ready = read_json(self.layout.run(replica) / "ready.json")
        return ready is not None and ready.get("unit_digest") != units.digest(self.layout.engine_unit)

    def _switch(self, store: Store, replica: str, index: int, number: int, former: int | None) -> None:
        """Start a replica on a release; back to the former one when it gives no token."""
        unit = units.unit_of(replica)
        store.point(index, number)
        units.systemctl("daemon-reload")
        units.systemctl("reset-failed", unit)
        units.systemctl("enable", unit)
        started = units.systemctl("restart", unit)
        if started.returncode == 0:
            ready = read_json(self.layout.run(replica) / "ready.json") or {}
            evidence = {**ready, "verified_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            store.mark_verified(number, evidence)
            return
        said = units.last_words(unit)
        if former is not None and former != number and store.verified(former):
            store.point(index, former)
            back = units.systemctl("restart", unit).returncode == 0
            state = f"back on release {former}" + (", serving" if back else ", which does not start either")
        else:
            units.systemctl("stop", unit)
            state = f"stopped; release {number} is kept for inspection and there is no verified one to go back to"
        raise Failed(
            Failure(
                "release.not_ready",
                f"{replica} did not give a token on release {number}; it is now {state}",
                f"its journal ends with: {said[-1500:]}",
                f"see journalctl -u {unit}, correct the deployment and run the command again",
            )
        )


def _changes(replica: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """Return one change per file that differs."""
    return [
        Change(f"{replica}: {name}", before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
