"""The points at which a run is interrupted, and the lanes in which each is taken to its end."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sim.machine import pool
from sim.machine.common import Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Factory
from tests.machines.interruption.convergence import Declared, demand_convergence
from tests.machines.interruption.playing import Done, Run, Step
from tests.machines.interruption.tally import Point, Tally

LANES = 2
"""Machines at work at the same time: the tests' own limit is two cores."""
MOMENTS = (0.1, 1.5, 6.0, 20.0)
"""Seconds after a step's start at which the plug could be pulled; short steps see the first alone."""


@dataclass(frozen=True)
class Act:
    """One interruption to be carried out, by a function that takes the label for its machine."""

    side: str
    name: str
    run: Callable[[str], None]


@dataclass(frozen=True)
class Snapshot:
    """What a power cut would have left of a server at that moment, had everything written reached the disk.

    apt's downloads are not part of it: test machines have them mounted from outside.
    """

    step: Step
    after: float
    image: str


@dataclass
class Recorded:
    """An undisturbed run: its steps, and what a power cut in the middle of each would have left."""

    done: list[Done]
    snapshots: list[Snapshot] = field(default_factory=list)


def _photograph(sim: Sim, machine: Machine, run: Run, images: list[str]) -> list[Snapshot]:
    taken: list[Snapshot] = []
    step: Step | None = None
    began = 0.0
    moments: list[float] = []
    while not run.is_over():
        now = run.running()
        if now != step:
            step, began, moments = now, time.monotonic(), list(MOMENTS)
        after = time.monotonic() - began
        if step is not None and moments and after >= moments[0]:
            # A busy disk may have kept the former picture so long that this moment has passed.
            moments = [moment for moment in moments if moment > after]
            images.append(f"cut-{os.getpid()}-{len(images)}")
            pool.snapshot(sim, machine.root, sim.pool / "images" / images[-1])
            # The step may have ended while the disk was busy; then the picture is of the time between two steps.
            taken.append(Snapshot(step, round(after, 1), images[-1]))
        time.sleep(0.01)
    return taken


def _remove_leftovers(sim: Sim) -> None:
    """Delete the pictures of test runs that were killed."""
    with sim.lock():
        for name in pool.images(sim):
            owner = re.fullmatch(r"cut-(\d+)-\d+", name)
            if owner and not Path(f"/proc/{owner[1]}").exists():
                pool.delete(sim, sim.pool / "images" / name)


@dataclass
class Lanes:
    """Takes points to their end, some at a time, each on a machine of its own."""

    sim: Sim
    machines: Factory
    tally: Tally
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def take(self, points: Sequence[Act]) -> list[Point]:
        """Take every point, note what became of it, and return those after which one run did not converge."""
        before = len(self.tally.points)
        with ThreadPoolExecutor(LANES) as lanes:
            list(lanes.map(self._one, points))
        return [point for point in self.tally.points[before:] if point.problem]

    def _one(self, act: Act) -> None:
        # A failure is noted, and the next point follows.
        with contextlib.suppress(Exception), self.tally.point(act.side, act.name):
            act.run(f"cut{next(self._numbers)}")

    @contextlib.contextmanager
    def machine(self, label: str, image: str) -> Iterator[Machine]:
        """Give a booted machine from an image for one point."""
        machine = self.machines(label, image)
        try:
            yield machine
        finally:
            self.machines.give_back(machine)

    def start_again(self, machine: Machine) -> None:
        """Boot a machine whose plug was pulled."""
        with self.sim.lock():
            machine.start()
        machine.wait_until_booted()

    @contextlib.contextmanager
    def recorded(self, image: str, *, photograph: bool = True) -> Iterator[Recorded]:
        """Run site.yml undisturbed and take a picture of the server in the middle of every step.

        A btrfs snapshot holds all that was written until then, also what a real disk had not got from the page cache.
        """
        _remove_leftovers(self.sim)
        images: list[str] = []
        try:
            with self.machine("recorded", image) as machine, Run(self.sim, machine) as run:
                snapshots = _photograph(self.sim, machine, run, images) if photograph else []
                played = run.wait()
                assert played.rc == 0, f"the undisturbed run ended with {played.rc}:\n{played.stdout[-3000:]}"
                done = run.finished()
            steps = {one.step for one in done}
            yield Recorded(done, [one for one in snapshots if one.step in steps])
        finally:
            with self.sim.lock():
                for picture in images:
                    pool.delete(self.sim, self.sim.pool / "images" / picture)

    def power_cut(self, snapshot: Snapshot) -> Act:
        """Return the point of a server that lost its power: boot what was left, and converge."""

        def act(label: str) -> None:
            with self.machine(label, snapshot.image) as machine:
                demand_convergence(self.sim, machine)

        return Act("server", f"{snapshot.step}, after {snapshot.after} s", act)

    def controller_killed(self, image: str, done: Done, fraction: float = 0.5, declared: Declared | None = None) -> Act:
        """Return the point of a controller that is killed in the middle of a step, and started again at once."""
        extra = declared.extra if declared else None

        def act(label: str) -> None:
            with self.machine(label, image) as machine:
                with Run(self.sim, machine, "site.yml", extra) as run:
                    kill_in_the_middle(run, done, fraction)
                demand_convergence(self.sim, machine, declared)

        return Act("controller", str(done.step), act)


def kill_in_the_middle(run: Run, done: Done, fraction: float = 0.5) -> None:
    """Kill a run when a step has gone on for a share of the time that it took undisturbed."""
    assert run.wait_for(done.step), f"the run never came to {done.step}:\n{run.said[-3000:]}"
    time.sleep(done.seconds * fraction)
    assert not run.is_over(), "the run was over before it could be killed"
    run.kill()
