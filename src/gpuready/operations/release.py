"""Brings the deployments of one host to what was planned and rendered, and records what was verified.

A replica starts on its recorded release, or on trial on a new one as long as the run that asks for it lives. Only a
token moves the record. So a run that is killed at any point leaves a server that boots into what was proved, and the
next run, which compares what runs with what is wanted, finishes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuready.hardware import nvml
from gpuready.operations import claims, engine_unit, memory, order, readback
from gpuready.operations.claims import Claim
from gpuready.operations.replica import start_seconds
from gpuready.outcome import Change, Failed, Failure, Result
from gpuready.serving import releases, units
from gpuready.serving.files import as_json, has_access, read_json, write_text
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import FILE_MODE, Store, replicas_on_disk


@dataclass
class Target:
    """One replica as planned and rendered."""

    store: Store
    index: int
    files: Mapping[str, str]
    part: Mapping[str, Any]
    start_seconds: float

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


@dataclass
class Applier:
    """Applies the wanted deployments; `check` only says what would change."""

    layout: Layout
    check: bool
    _result: Result = field(default_factory=Result)
    _words: list[str] = field(default_factory=list)
    _declarations: Mapping[str, str] = field(default_factory=dict)
    _unit_digest: str = ""
    _gpus: tuple[nvml.NvmlGpu, ...] = ()

    def apply(
        self,
        plan: Mapping[str, Any],
        files: Mapping[str, Mapping[str, str]],
        unit_text: str,
        beside: Mapping[str, str] | None = None,
    ) -> Result:
        """Bring all deployments of the host to the plan; stop at the first that does not come up.

        `beside` are the units, by name, that the engines' own wants.
        """
        with self._result.kept_by_failures(self.check):
            try:
                self._place_units(unit_text, beside or {})
                self._apply(plan, files)
            finally:
                self._result.changed = bool(self._words)
        self._result.summary = "; ".join(self._words) if self._words else "every deployment is as planned and serves"
        return self._result

    def _place_units(self, unit_text: str, beside: Mapping[str, str]) -> None:
        self._unit_digest = units.digest_of(unit_text)
        if placed := engine_unit.place(self.layout, unit_text, beside, self.check):
            self._result.diff += placed
            self._words.append("the engines' unit is new")

    def _apply(self, plan: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> None:
        self._declarations = plan.get("declarations", {})
        deployments = claims.divided(plan["deployments"])
        found = [target for one in deployments for target in self._targets(one, files[one["name"]])]
        after = {target.replica: target.part.get("start_after", ()) for target in found}
        places = {replica: place for place, replica in enumerate(order.in_order(after))}
        targets = sorted(found, key=lambda target: places[target.replica])
        report = nvml.probe()
        self._gpus = report.gpus if report else ()
        if ordered := order.bring(self.layout, after, self.check):
            self._result.diff += ordered
            self._words.append(f"the order of start {self._say('changed', 'would change')}")
        self._tighten()
        gone = sorted(replicas_on_disk(self.layout) - {target.replica for target in targets})
        last = [replica for replica in gone if self._may_serve_on(replica, targets)]
        for replica in gone:
            if replica not in last:
                self._retire(replica)
        if not self.check:
            # A full disk must show before anything is stopped.
            for target in targets:
                _number(target)
        self._bring_all(targets)
        for replica in last:
            self._retire(replica)
        self._result.data["notes"] = readback.sentences(self.layout, plan["deployments"])
        if not self.check:
            for store in {target.store for target in targets}:
                store.prune()
            self._record(plan)
            memory.forget(self.layout, plan)

    def _say(self, done: str, would: str) -> str:
        return would if self.check else done

    def _targets(self, planned: Mapping[str, Any], files: Mapping[str, str]) -> list[Target]:
        store = Store(self.layout, planned["name"])
        whole = {**files, "plan.json": as_json(planned)}
        seconds = start_seconds(planned)
        return [Target(store, part["index"], whole, part, seconds) for part in planned["replicas"]]

    def _record(self, plan: Mapping[str, Any]) -> None:
        """Keep the plan; it holds what operators set as flags, so only root reads it."""
        path, text = self.layout.plan, as_json(plan)
        if path.exists() and path.read_text(encoding="utf-8") == text and has_access(path, FILE_MODE):
            return
        write_text(path, text, FILE_MODE)

    def _tighten(self) -> None:
        """Correct modes that an earlier run, or somebody, left looser or tighter than they shall be."""
        found = releases.loose(self.layout)
        if not found:
            return
        self._words.append(f"access to {len(found)} files {self._say('corrected', 'would be corrected')}")
        self._result.diff += [
            Change(str(path), f"mode {path.stat().st_mode & 0o7777:04o}\n", f"mode {mode:04o}\n")
            for path, mode, _ in found
        ]
        if not self.check:
            releases.tighten(found)

    def _may_serve_on(self, replica: str, targets: list[Target]) -> bool:
        """Say whether a replica that is no longer declared may go last: it serves while others of its kind restart."""
        name, index = split_replica(replica)
        held = self._held(Store(self.layout, name), index)
        declared = name in {target.store.deployment for target in targets}
        return declared and not any(claims.clash(target.claims, held) for target in targets)

    def _retire(self, replica: str) -> None:
        """Stop a replica that is no longer declared; its releases stay for a return."""
        name, index = split_replica(replica)
        self._words.append(f"{replica} is no longer declared: {self._say('stopped', 'would be stopped')}")
        self._result.diff.append(Change(units.unit_of(replica), "enabled and running\n", ""))
        if not self.check:
            _end(replica, "it is no longer declared, but still runs and keeps its link")
            Store(self.layout, name).unpoint(index)
            releases.end_trial(self.layout, replica)

    # What each replica needs ------------------------------------------------------------------------------------

    def _needed(self, target: Target) -> tuple[str, str]:
        """Return what a replica needs (start, record, enable or nothing), and the words for it."""
        former, number = target.store.current(target.index), target.store.find(target.files)
        state = units.properties(target.unit, "ActiveState", "UnitFileState", "MainPID")
        if state["ActiveState"] == "activating" and former == number and target.store.proof(former or 0, target.index):
            # As after a boot: it loads what is wanted, and would load it a second time.
            if self.check:
                self._result.undecided.append(f"whether {target.replica}, which is starting, gives a token")
                return "", ""
            units.systemctl("start", target.unit)
            state = units.properties(target.unit, "ActiveState", "UnitFileState", "MainPID")
        ready = self._ready(target.replica, state)
        restarted, started = self._say("restarted", "would be restarted"), self._say("started", "would be started")
        if number is None or (former != number and not _runs(target.store, number, ready)):
            return "start", f"{'first' if former is None else 'new'} release, {started if not ready else restarted}"
        if not _runs(target.store, number, ready):
            return "start", f"was not serving release {number}, {restarted if ready else started}"
        if ready["unit_digest"] != self._unit_digest:
            return "start", f"its unit changed, {restarted}"
        if moved := self._moved(target, ready):
            return "start", f"its GPU is {moved} by now, {restarted}"
        if former != number or target.store.proof(number, target.index) is None:
            return "record", f"serves release {number}, {self._say('recorded', 'would be recorded')}"
        if state.get("UnitFileState") != "enabled":
            return "enable", f"{self._say('enabled', 'would be enabled')}, it serves already"
        return "", ""

    def _ready(self, replica: str, state: Mapping[str, str]) -> dict[str, Any]:
        """Return the proof of the process that runs now; empty where it has given none."""
        ready = read_json(self.layout.run(replica) / "ready.json") or {}
        serves = state.get("ActiveState") == "active" and str(ready.get("main_pid")) == state.get("MainPID")
        return ready if serves else {}

    def _moved(self, target: Target, ready: Mapping[str, Any]) -> str:
        """Return the planned GPUs where the engine runs on others, as after one was replaced; else nothing."""
        uuid_of = {gpu.index: gpu.uuid for gpu in self._gpus}
        planned = [uuid_of.get(index) for index in target.part["gpus"]]
        return "" if None in planned or planned == ready.get("gpu_uuids") else ", ".join(map(str, planned))

    def _held(self, store: Store, index: int) -> set[Claim]:
        """Return what a replica holds now: what its engine was proved on, or all that it may be starting on."""
        replica = f"{store.deployment}.{index}"
        ready = self._ready(replica, units.properties(units.unit_of(replica), "ActiveState", "MainPID"))
        if part := store.part(ready.get("release", 0), index):
            return claims.of_part(part, self._now(ready.get("gpu_uuids"), part["gpus"]))
        tried = releases.trial_release(self.layout, replica, only_live=False)
        numbers = (store.current(index), tried)
        return {one for number in numbers if number for one in self._claims_of(store, number, index)}

    def _claims_of(self, store: Store, number: int, index: int) -> set[Claim]:
        """Return what a replica holds on a release: its recorded GPUs wherever they are now, and its port."""
        part = store.part(number, index)
        return claims.of_part(part, self._now(store.gpu_uuids(number, index), part["gpus"])) if part else set()

    def _now(self, uuids: list[str] | None, planned: list[int]) -> list[int]:
        """Return the indices that GPUs have now; the planned ones where they were not recorded or are gone."""
        index_of = {gpu.uuid: gpu.index for gpu in self._gpus}
        now = [index_of[uuid] for uuid in uuids or [] if uuid in index_of]
        return now if len(now) == len(planned) else planned

    # Bringing them there ----------------------------------------------------------------------------------------

    def _bring_all(self, targets: list[Target]) -> None:
        pending = {target.replica: needed for target in targets if (needed := self._needed(target))[0]}
        stopped: list[Target] = []
        try:
            self._make_room(targets, pending, stopped)
            for target in targets:
                if target.replica in pending:
                    action, words = pending[target.replica]
                    self._announce(target, words)
                    if target in stopped:
                        stopped.remove(target)
                        action = "start"
                    if not self.check:
                        self._bring(target, action, targets)
                    elif action == "start":
                        self._result.undecided.append(f"whether {target.replica} comes up and gives a token")
        except Failed as failed:
            raise Failed([*failed.failures, *self._restore(stopped, targets)]) from failed

    def _announce(self, target: Target, words: str) -> None:
        self._words.append(f"{target.replica}: {words}")
        former, number = target.store.current(target.index), target.store.find(target.files)
        if former is None or former != number:
            before = target.store.files(former) if former else {}
            self._result.diff += _changes(target.replica, before, target.files)
        else:
            self._result.diff.append(Change(target.unit, "not serving as recorded\n", f"{words}\n"))

    def _make_room(self, targets: list[Target], pending: Mapping[str, tuple[str, str]], stopped: list[Target]) -> None:
        """Stop the replicas that hold what another one needs to start, so that no two ever meet on it."""
        for holder in targets:
            held = self._held(holder.store, holder.index)
            takers = [
                (taker, wanted)
                for taker in targets
                if taker is not holder and pending.get(taker.replica, ("", ""))[0] == "start"
                if (wanted := claims.clash(taker.claims, held))
            ]
            if not takers or units.is_stopped(holder.unit):
                continue
            taken = ", ".join(f"{taker.replica} takes {claims.named(wanted)}" for taker, wanted in takers)
            self._words.append(f"{holder.replica}: {self._say('stopped', 'would be stopped')} first, because {taken}")
            if not self.check:
                _stop(holder.unit, f"it holds what another replica needs ({taken})")
                stopped.append(holder)

    def _restore(self, stopped: Iterable[Target], targets: list[Target]) -> list[Failure]:
        """Start again what was stopped to make room, where that room is still free; say what became of each."""
        said = []
        for target in stopped:
            number = target.store.current(target.index)
            if number is None or not target.store.verified(number):
                what = f"{target.replica}, stopped to make room, stays stopped: its place is taken or was never proved"
            elif self._clashes(target, number, targets):
                what = f"{target.replica}, stopped to make room, stays stopped: another replica holds its GPUs or port"
            elif units.systemctl("start", target.unit).returncode == 0:
                what = f"{target.replica}, stopped to make room, serves release {number} again"
            else:
                what = f"{target.replica}, stopped to make room, does not start on release {number} any more"
            said.append(Failure("release.stopped_for_room", what))
        return said

    def _bring(self, target: Target, action: str, targets: list[Target]) -> None:
        number = _number(target)
        if action == "start":
            self._try(target, number, targets)
        if action != "enable":
            self._prove(target, number, targets)
        enabled = units.systemctl("enable", target.unit)
        if enabled.returncode != 0:
            what = f"{target.replica} serves, but its unit cannot be enabled, so a reboot would not start it"
            fix = f"see systemctl status {target.unit} and run the command again"
            raise Failed(Failure("release.not_enabled", what, enabled.stderr.strip(), fix))
        releases.end_trial(self.layout, target.replica)

    def _prove(self, target: Target, number: int, targets: list[Target]) -> None:
        """Record that a replica serves a release; whoever is recorded on its GPUs or port no longer is."""
        ready = read_json(self.layout.run(target.replica) / "ready.json") or {}
        evidence = {**ready, "verified_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        target.store.mark_verified(number, target.index, evidence)
        for other in targets:
            held = other.store.current(other.index)
            if other is target or held is None:
                continue
            if not claims.clash(target.claims, self._claims_of(other.store, held, other.index)):
                continue
            units.systemctl("disable", other.unit)
            other.store.unpoint(other.index)
        target.store.point(target.index, number)

    def _try(self, target: Target, number: int, targets: list[Target]) -> None:
        """Start a replica on a release; back to the last proved one when it gives no token."""
        releases.begin_trial(self.layout, target.replica, number)
        units.systemctl("daemon-reload")
        units.systemctl("reset-failed", target.unit)
        started = units.systemctl("restart", target.unit)
        if started.returncode == 0 and self._proved(target, number):
            return
        said = units.last_words(target.unit) or started.stderr.strip()
        # Before another start makes this one's journal a former one.
        lack = memory.of_failed(self.layout, target.replica, self._declarations.get(target.store.deployment))
        lack = lack and f"{lack}; "
        releases.end_trial(self.layout, target.replica)
        state = self._go_back(target, number, targets)
        raise Failed(
            Failure(
                "release.not_ready",
                f"{target.replica} did not give a token on release {number}; it is now {state}",
                f"{lack}its limit was {target.start_seconds:.0f} s and its journal ends with: {said[-1500:]}",
                f"see journalctl -u {target.unit}, correct the deployment and run the command again",
            )
        )

    def _proved(self, target: Target, number: int) -> bool:
        state = units.properties(target.unit, "ActiveState", "MainPID")
        return _runs(target.store, number, self._ready(target.replica, state))

    def _go_back(self, target: Target, failing: int, targets: list[Target]) -> str:
        """Put a replica back on a release that was proved, or out of the record; return where it is now."""
        back = self._way_back(target, failing, targets)
        if back is None and target.store.current(target.index) == failing and target.store.verified(failing):
            return f"not serving; release {failing} gave a token before, so systemd keeps trying it"
        if back is None:
            _end(target.replica, "it has no proved release to go back to, but does not stop")
            target.store.unpoint(target.index)
            return (
                f"stopped and will not start at boot: there is no verified release to go back to; "
                f"release {failing} is kept for inspection"
            )
        target.store.point(target.index, back)
        units.systemctl("enable", target.unit)
        units.systemctl("reset-failed", target.unit)
        serves = units.systemctl("restart", target.unit).returncode == 0
        return f"back on release {back}, " + ("serving" if serves else "which does not start either")

    def _way_back(self, target: Target, failing: int, targets: list[Target]) -> int | None:
        """Return the proved release to go back to: the recorded one, else the newest that fits beside the others."""
        store = target.store
        numbers = [store.current(target.index), *reversed(store.numbers())]
        for number in numbers:
            if number is None or number == failing or not store.verified(number):
                continue
            if store.part(number, target.index) and not self._clashes(target, number, targets):
                return number
        return None

    def _clashes(self, target: Target, number: int, targets: list[Target]) -> bool:
        """Say whether another replica is recorded on what this one would hold on a release."""
        wanted = self._claims_of(target.store, number, target.index)
        return any(
            claims.clash(wanted, self._claims_of(other.store, held, other.index))
            for other in targets
            if other is not target and (held := other.store.current(other.index)) is not None
        )


def _number(target: Target) -> int:
    """Return the release with the target's files, written where there is none yet."""
    return target.store.find(target.files) or target.store.add(target.files)


def _runs(store: Store, number: int, ready: Mapping[str, Any]) -> bool:
    """Say whether what is ready was started on this release as it is on disk."""
    return ready.get("release") == number and ready.get("release_digest") == store.digest(number)


def _stop(unit: str, why: str) -> None:
    answer = units.systemctl("stop", unit)
    _demand_stopped(unit, why, answer.stderr)


def _end(replica: str, why: str) -> None:
    unit = units.unit_of(replica)
    answer = units.systemctl("disable", "--now", unit)
    _demand_stopped(unit, why, answer.stderr)
    units.systemctl("reset-failed", unit)


def _demand_stopped(unit: str, why: str, said: str) -> None:
    """Raise where a unit still runs: what follows counts on its GPUs and port being free."""
    if not units.is_stopped(unit):
        state = units.properties(unit, "ActiveState").get("ActiveState") or "in an unknown state"
        what = f"{unit} could not be stopped and is {state}: {why}"
        raise Failed(Failure("release.not_stopped", what, said.strip(), f"see systemctl status {unit}, then run again"))


def _changes(replica: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """Return one change per file that differs."""
    return [
        Change(f"{replica}: {name}", before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
