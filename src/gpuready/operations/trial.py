"""A replica tried on a release: out of the gateway, started, proved and recorded, or back on what was proved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuready.operations import claims, drop_ins, memory, pace, readback
from gpuready.operations.drain import Drain
from gpuready.operations.targets import Situation, Target, runs
from gpuready.outcome import Failed, Failure
from gpuready.serving import last_words, releases, units
from gpuready.serving.files import read_json
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import Store

PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Settings:
    """How a change of replicas is carried out."""

    drain_seconds: float = 120
    """How long requests in flight may take to end before their replica is stopped."""
    settle_seconds: float = 10
    """How long a replica is watched after its token before its release counts as proved."""
    memory_limits: bool = False
    """Whether a replica that holds more of a GPU than planned is refused, and not only said."""
    start_seconds: float = 0
    """How long a start may take; 0 for what follows from the weights and the disk."""


@dataclass
class Trial:
    """Puts replicas on releases, among the other wanted ones."""

    layout: Layout
    situation: Situation
    drain: Drain
    settings: Settings
    targets: list[Target]
    notes: list[str]
    declarations: Mapping[str, str]
    """What the operator declared of each deployment, by its name."""

    def bring(self, target: Target, action: str) -> None:
        """Start a replica on its files, record that it serves them, or only enable it.

        Raises:
            Failed: when it does not serve them; the message says what it serves now.
        """
        number = target.number()
        if action != "start":
            self._record(target, number, action)
            return
        with self.drain.out(target.replica, target.part["port"], lambda: self._requests(target)):
            self._try(target, number)
            self._record(target, number, action)

    def stop(self, target: Target, why: str) -> None:
        """Stop a replica for another one; it stays out of the gateway until it is started again."""
        self.drain.take_out(target.replica, lambda: self._requests(target))
        answer = units.systemctl("stop", target.unit)
        _demand_stopped(target.unit, why, answer.stderr)

    def start_again(self, target: Target) -> str:
        """Start what was stopped to make room, where that room is still free; say what became of it."""
        number = target.store.current(target.index)
        what = f"{target.replica}, stopped to make room, "
        if number is None or not target.store.verified(number):
            return f"{what}stays stopped: its place is taken or was never proved"
        if self.situation.clashes(target, number, self.targets):
            return f"{what}stays stopped: another replica holds its GPUs or port"
        if units.systemctl("start", target.unit).returncode != 0:
            return f"{what}does not start on release {number} any more"
        part = target.store.part(number, target.index) or target.part
        self.drain.let_in(target.replica, part["port"])
        return f"{what}serves release {number} again"

    def retire(self, replica: str) -> None:
        """Stop a replica that is no longer declared; its releases stay for a return."""
        name, index = split_replica(replica)
        store = Store(self.layout, name)
        self.drain.take_out(replica, lambda: self.situation.requests(store, index))
        _end(replica, "it is no longer declared, but still runs and keeps its link")
        store.unpoint(index)
        drop_ins.remove(self.layout, replica)
        releases.end_trial(self.layout, replica)

    def _requests(self, target: Target) -> int | None:
        return self.situation.requests(target.store, target.index)

    def _record(self, target: Target, number: int, action: str) -> None:
        if action != "enable":
            self._prove(target, number)
        enabled = units.systemctl("enable", target.unit)
        if enabled.returncode != 0:
            what = f"{target.replica} serves, but its unit cannot be enabled, so a reboot would not start it"
            fix = f"see systemctl status {target.unit} and run the command again"
            raise Failed(Failure("release.not_enabled", what, enabled.stderr.strip(), fix))
        releases.end_trial(self.layout, target.replica)

    def _prove(self, target: Target, number: int) -> None:
        """Record that a replica serves a release; whoever is recorded on its GPUs or port no longer is."""
        ready = read_json(self.layout.run(target.replica) / "ready.json") or {}
        evidence = {**ready, "verified_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        target.store.mark_verified(number, target.index, evidence)
        for other in self.targets:
            held = other.store.current(other.index)
            if other is target or held is None:
                continue
            if not claims.clash(target.claims, self.situation.claims_of(other.store, held, other.index)):
                continue
            units.systemctl("disable", other.unit)
            other.store.unpoint(other.index)
        target.store.point(target.index, number)
        drop_ins.follow(self.layout, target.replica)

    def _try(self, target: Target, number: int) -> None:
        """Start a replica on a release; back to the last proved one when it does not serve it."""
        limit = pace.limit(target.store, target.index, target.plan, self.settings.start_seconds)
        if limit.note:
            self.notes.append(f"{target.replica}: {limit.note}")
        releases.begin_trial(self.layout, target.replica, number, limit.seconds)
        drop_ins.try_on(self.layout, target.replica, target.files)
        units.systemctl("daemon-reload")
        units.systemctl("reset-failed", target.unit)
        began = time.time()
        started = units.systemctl("restart", target.unit)
        why = self._why_not(target, number, started.returncode == 0)
        if not why:
            return
        # Before the unit is started on something else, which would speak in the same journal.
        said = last_words.of_unit(target.unit, began)
        lack = memory.of_failed(self.layout, target.replica, self.declarations.get(target.store.deployment))
        releases.end_trial(self.layout, target.replica)
        state = self._go_back(target, number)
        told = [lack, said.sentence() or started.stderr.strip()]
        raise Failed(
            Failure(
                "release.not_ready",
                f"{target.replica} did not serve release {number}: {said.verdict or why}; it is now {state}",
                "; ".join([*filter(None, told), f"its limit was {limit.seconds:.0f} s"]),
                f"see journalctl -u {target.unit}, correct the deployment and run the command again",
            )
        )

    def _why_not(self, target: Target, number: int, started: bool) -> str:
        """Watch a replica that gave its token for a while; return why it does not serve, or nothing."""
        if not started:
            return "it gave no token"
        ready = self.situation.serving(target.replica)
        if not runs(target.store, number, ready):
            return "what runs is not what was started"
        end = time.monotonic() + self.settings.settle_seconds
        while time.monotonic() < end:
            time.sleep(PAUSE_SECONDS)
            now = self.situation.serving(target.replica)
            if now.get("main_pid") != ready["main_pid"]:
                return "its engine ended within seconds after its first token"
        too_much = readback.beyond(target.part, target.plan, ready)
        if not too_much:
            return ""
        if too_much.takes_from_others or self.settings.memory_limits:
            return too_much.sentence
        self.notes.append(f"{target.replica}: {too_much.sentence}")
        return ""

    def _go_back(self, target: Target, failing: int) -> str:
        """Put a replica back on a release that was proved, or out of the record; return where it is now."""
        back = self._way_back(target, failing)
        store = target.store
        if back is None and store.current(target.index) == failing and store.verified(failing):
            drop_ins.follow(self.layout, target.replica)
            return f"not serving; release {failing} gave a token before, so systemd keeps trying it"
        if back is None:
            _end(target.replica, "it has no proved release to go back to, but does not stop")
            store.unpoint(target.index)
            drop_ins.remove(self.layout, target.replica)
            return (
                f"stopped and will not start at boot: there is no verified release to go back to; "
                f"release {failing} is kept for inspection"
            )
        store.point(target.index, back)
        drop_ins.follow(self.layout, target.replica)
        units.systemctl("enable", target.unit)
        units.systemctl("reset-failed", target.unit)
        serves = units.systemctl("restart", target.unit).returncode == 0
        return f"back on release {back}, " + ("serving" if serves else "which does not start either")

    def _way_back(self, target: Target, failing: int) -> int | None:
        """Return the proved release to go back to: the recorded one, else the newest that fits beside the others."""
        store = target.store
        numbers = [store.current(target.index), *reversed(store.numbers())]
        for number in numbers:
            if number is None or number == failing or not store.verified(number):
                continue
            if store.part(number, target.index) and not self.situation.clashes(target, number, self.targets):
                return number
        return None


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


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return settings as the role gives them; what it does not give has its default.

    A template of Ansible may have made text of a number.
    """
    usual = Settings()
    return Settings(
        drain_seconds=float(given.get("drain_seconds", usual.drain_seconds)),
        settle_seconds=float(given.get("settle_seconds", usual.settle_seconds)),
        memory_limits=str(given.get("memory_limits", usual.memory_limits)).lower() == "true",
        start_seconds=float(given.get("start_seconds", usual.start_seconds)),
    )
