"""Brings the deployments of one host to what was planned and rendered, and records what was verified.

A replica starts on its recorded release, or on trial on a new one as long as the run that asks for it lives. Only a
token moves the record. So a run that is killed at any point leaves a server that boots into what was proved, and the
next run, which compares what runs with what is wanted, finishes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuready.hardware import nvml
from gpuready.operations import beforehand, claims, drop_ins, engine_unit, memory, order, readback, targets
from gpuready.operations.drain import Drain
from gpuready.operations.targets import Situation, Target, runs
from gpuready.operations.trial import Settings, Trial
from gpuready.outcome import Change, Failed, Failure, Refusal, Result
from gpuready.serving import arguments, releases, units
from gpuready.serving.files import as_json, has_access, write_text
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import FILE_MODE, Store, replicas_on_disk


@dataclass
class Applier:
    """Applies the wanted deployments; `check` only says what would change."""

    layout: Layout
    check: bool
    settings: Settings = field(default_factory=Settings)
    drain: Drain | None = None
    """The gateway's side; tests set it."""
    _result: Result = field(default_factory=Result)
    _words: list[str] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _unit_digest: str = ""

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
                self._apply(plan, files, unit_text, beside or {})
            finally:
                self._result.changed = bool(self._words)
        self._result.summary = "; ".join(self._words) if self._words else "every deployment is as planned and serves"
        return self._result

    def _apply(
        self,
        plan: Mapping[str, Any],
        files: Mapping[str, Mapping[str, str]],
        unit_text: str,
        beside: Mapping[str, str],
    ) -> None:
        deployments = claims.divided(plan["deployments"])
        found = [one for each in deployments for one in targets.of_deployment(self.layout, each, files[each["name"]])]
        after = {target.replica: target.part.get("start_after", ()) for target in found}
        places = {replica: place for place, replica in enumerate(order.in_order(after))}
        wanted = sorted(found, key=lambda target: places[target.replica])
        report = nvml.probe()
        situation = Situation(self.layout, report.gpus if report else ())
        drain = self.drain or Drain(self.settings.drain_seconds)
        drain.notes = self._notes
        trial = Trial(self.layout, situation, drain, self.settings, wanted, self._notes, plan.get("declarations", {}))
        self._look_beforehand(wanted)
        self._place_units(unit_text, beside)
        if ordered := order.bring(self.layout, after, self.check):
            self._result.diff += ordered
            self._words.append(f"the order of start {self._say('changed', 'would change')}")
        self._tighten()
        gone = sorted(replicas_on_disk(self.layout) - {target.replica for target in wanted})
        last = [replica for replica in gone if _may_serve_on(situation, replica, wanted)]
        for replica in gone:
            if replica not in last:
                self._retire(trial, replica)
        if not self.check:
            # A full disk must show before anything is stopped.
            for target in wanted:
                target.number()
        self._bring_all(trial)
        for replica in last:
            self._retire(trial, replica)
        self._result.data["notes"] = [*self._notes, *readback.sentences(self.layout, plan["deployments"])]
        if not self.check:
            for store in {target.store for target in wanted}:
                store.prune()
            self._record(plan)
            memory.forget(self.layout, plan)

    def _say(self, done: str, would: str) -> str:
        return would if self.check else done

    def _look_beforehand(self, wanted: list[Target]) -> None:
        """Refuse a new release that its engine would not start on, before anything is changed."""
        failures: list[Failure] = []
        seen: list[Mapping[str, str]] = []
        for target in wanted:
            number = target.store.find(target.files)
            if target.files in seen or (number is not None and target.store.verified(number)):
                continue
            seen.append(target.files)
            if self.check and not beforehand.is_there(target):
                self._result.undecided.append(f"whether the engine of {target.store.deployment} takes its arguments")
                continue
            for failure in beforehand.refusals(self.layout, target):
                if failure.code == arguments.NOT_CHECKED:
                    self._notes.append(failure.sentence().removesuffix("."))
                else:
                    failures.append(failure)
        if failures:
            raise Refusal(failures)

    def _place_units(self, unit_text: str, beside: Mapping[str, str]) -> None:
        self._unit_digest = units.digest_of(unit_text)
        if placed := engine_unit.place(self.layout, unit_text, beside, self.check):
            self._result.diff += placed
            self._words.append("the engines' unit is new")

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

    def _retire(self, trial: Trial, replica: str) -> None:
        self._words.append(f"{replica} is no longer declared: {self._say('stopped', 'would be stopped')}")
        self._result.diff.append(Change(units.unit_of(replica), "enabled and running\n", ""))
        if not self.check:
            trial.retire(replica)

    # What each replica needs ------------------------------------------------------------------------------------

    def _needed(self, trial: Trial, target: Target) -> tuple[str, str]:
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
        ready = trial.situation.ready(target.replica, state)
        restarted, started = self._say("restarted", "would be restarted"), self._say("started", "would be started")
        if number is None or (former != number and not runs(target.store, number, ready)):
            return "start", f"{'first' if former is None else 'new'} release, {started if not ready else restarted}"
        if not runs(target.store, number, ready):
            return "start", f"was not serving release {number}, {restarted if ready else started}"
        if ready["unit_digest"] != self._unit_digest:
            return "start", f"its unit changed, {restarted}"
        if moved := trial.situation.moved(target, ready):
            return "start", f"its GPU is {moved} by now, {restarted}"
        if former != number or target.store.proof(number, target.index) is None:
            return "record", f"serves release {number}, {self._say('recorded', 'would be recorded')}"
        if state.get("UnitFileState") != "enabled":
            return "enable", f"{self._say('enabled', 'would be enabled')}, it serves already"
        return "", ""

    # Bringing them there ----------------------------------------------------------------------------------------

    def _bring_all(self, trial: Trial) -> None:
        pending = {target.replica: needed for target in trial.targets if (needed := self._needed(trial, target))[0]}
        for target in trial.targets:
            if target.replica not in pending:
                self._mend(trial, target)
        stopped: list[Target] = []
        try:
            self._make_room(trial, pending, stopped)
            for target in trial.targets:
                if target.replica in pending:
                    action, words = pending[target.replica]
                    self._announce(target, words)
                    if target in stopped:
                        stopped.remove(target)
                        action = "start"
                    if not self.check:
                        trial.bring(target, action)
                    elif action == "start":
                        self._result.undecided.append(f"whether {target.replica} comes up and gives a token")
        except Failed as failed:
            said = [Failure("release.stopped_for_room", trial.start_again(target)) for target in stopped]
            raise Failed([*failed.failures, *said]) from failed

    def _mend(self, trial: Trial, target: Target) -> None:
        """Undo what a killed run left of a replica that serves as it should."""
        if trial.drain.is_out(target.replica, target.part["port"]):
            self._words.append(f"{target.replica}: {self._say('let', 'would be let')} in again by the gateway")
            self._result.diff.append(Change(target.unit, "drained\n", "serving\n"))
            if not self.check:
                trial.drain.let_in(target.replica, target.part["port"])
        if found := drop_ins.differing(self.layout, target.replica):
            self._words.append(f"{target.replica}: the drop-in of its unit {self._say('corrected', 'would change')}")
            self._result.diff += found
            if not self.check:
                drop_ins.follow(self.layout, target.replica)

    def _announce(self, target: Target, words: str) -> None:
        self._words.append(f"{target.replica}: {words}")
        former, number = target.store.current(target.index), target.store.find(target.files)
        if former is None or former != number:
            before = target.store.files(former) if former else {}
            self._result.diff += _changes(target.replica, before, target.files)
        else:
            self._result.diff.append(Change(target.unit, "not serving as recorded\n", f"{words}\n"))

    def _make_room(self, trial: Trial, pending: Mapping[str, tuple[str, str]], stopped: list[Target]) -> None:
        """Stop the replicas that hold what another one needs to start, so that no two ever meet on it."""
        for holder in trial.targets:
            held = trial.situation.held(holder.store, holder.index)
            takers = [
                (taker, wanted)
                for taker in trial.targets
                if taker is not holder and pending.get(taker.replica, ("", ""))[0] == "start"
                if (wanted := claims.clash(taker.claims, held))
            ]
            if not takers or units.is_stopped(holder.unit):
                continue
            taken = ", ".join(f"{taker.replica} takes {claims.named(wanted)}" for taker, wanted in takers)
            self._words.append(f"{holder.replica}: {self._say('stopped', 'would be stopped')} first, because {taken}")
            if not self.check:
                trial.stop(holder, f"it holds what another replica needs ({taken})")
                stopped.append(holder)


def _may_serve_on(situation: Situation, replica: str, wanted: list[Target]) -> bool:
    """Say whether a replica that is no longer declared may go last: it serves while others of its kind restart."""
    name, index = split_replica(replica)
    held = situation.held(Store(situation.layout, name), index)
    declared = name in {target.store.deployment for target in wanted}
    return declared and not any(claims.clash(target.claims, held) for target in wanted)


def _changes(replica: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """Return one change per file that differs."""
    return [
        Change(f"{replica}: {name}", before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
