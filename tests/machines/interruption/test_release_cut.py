"""The power goes between any two steps of a release: the server boots into one of two, whole, and one run goes on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sim.machine import pool
from tests.machines.conftest import run_playbook
from tests.machines.interruption.playing import Run
from tests.machines.interruption.points import Act
from tests.machines.test_release import spoil
from tests.machines.test_serving import MODEL, chat, declared, deployment, replicas, wait_until_serving

if TYPE_CHECKING:
    from sim.machine.common import Sim
    from sim.machine.machine import Machine
    from tests.machines.interruption.points import Lanes

pytestmark = [pytest.mark.machine, pytest.mark.long]

BOOK = "playbooks/serving.yml"
HOST = "h100-sg-01"
KEPT = ("var/lib/gpuready", "etc/systemd/system")
HALTING = (Path(__file__).parent / "halting.py").read_text()
FORMER = declared(deployment("chat"))
NEXT = declared(deployment("chat", flags={"max-num-seqs": 3}))


@dataclass
class Pictures:
    """What the disk held between the steps of a run, each state once."""

    sim: Sim
    taken: dict[str, str] = field(default_factory=dict)
    """The image of each state, by the step before which it was."""
    _seen: set[str] = field(default_factory=set)

    def take(self, machine: Machine, run: Run) -> None:
        """Take pictures until the run is over."""
        at, on = (machine.root / f"var/halt/{name}" for name in ("at", "on"))
        last = ""
        while not run.is_over():
            said = at.read_text() if at.exists() else ""
            if said == last:
                time.sleep(0.002)
                continue
            last = said
            self._keep(machine.root, said)
            on.write_text(said.split()[0])
        self._keep(machine.root, "the end")

    def _keep(self, root: Path, step: str) -> None:
        state = state_of(root)
        if state in self._seen:
            return
        self._seen.add(state)
        image = f"cut-{os.getpid()}-{len(self.taken)}-{state}"
        pool.snapshot(self.sim, root, self.sim.pool / "images" / image)
        self.taken[step] = image

    def remove(self) -> None:
        """Delete the pictures."""
        with self.sim.lock():
            for image in self.taken.values():
                pool.delete(self.sim, self.sim.pool / "images" / image)


def state_of(root: Path) -> str:
    """Return a digest of what counts on the disk; of what is only half written, whether there is any."""
    told = hashlib.sha256()
    for folder in KEPT:
        for path in sorted((root / folder).rglob("*")):
            name = str(path.relative_to(root))
            if any(part.startswith(".") and part.endswith(".new") for part in path.parts):
                name = "half written"
            elif path.is_symlink():
                name += f" -> {path.readlink()}"
            elif path.is_file():
                name += f" {path.stat().st_mode} {hashlib.sha256(path.read_bytes()).hexdigest()}"
            told.update(f"{name}\n".encode())
    return told.hexdigest()[:12]


@contextlib.contextmanager
def pictures(
    sim: Sim, lanes: Lanes, image: str, wanted: Callable[[Machine], Mapping[str, Any]], rc: int
) -> Iterator[dict[str, str]]:
    """Run a release, and give what a power cut would have left between its steps."""
    found = Pictures(sim)
    try:
        with lanes.machine("steps", image) as machine:
            wait_until_serving(machine)
            place = "/usr/lib/python3/dist-packages/halting"
            machine.ssh(f"mkdir -p /var/halt; cat > {place}.py; echo import halting > {place}.pth", stdin=HALTING)
            extra = wanted(machine)
            machine.ssh("touch /run/halt-at-changes")
            with Run(sim, machine, BOOK, extra) as run:
                found.take(machine, run)
                played = run.wait()
            assert played.rc == rc, played.stdout
        yield found.taken
    finally:
        found.remove()


def release_of(machine: Machine) -> int:
    """Return the release on which the replica serves, once it gave a token."""
    wait_until_serving(machine, "none")
    assert chat(machine)["usage"]["completion_tokens"] == 8
    one = replicas(machine)["chat.0"]
    assert one["state"] == "active"
    assert int(one["release"]) == one["ready"]["release"]
    return int(one["release"])


def cut(lanes: Lanes, step: str, image: str, allowed: tuple[int, ...], then: Callable[[Machine], None]) -> Act:
    """Return the point of a power cut: the server comes back on one of the releases, whole, and goes on from there."""

    def act(label: str) -> None:
        with lanes.machine(label, image) as machine:
            assert release_of(machine) in allowed
            then(machine)

    return Act("server", f"before {step}", act)


def converges(sim: Sim, extra: Mapping[str, Any], line: str) -> Callable[[Machine], None]:
    """Return the demand that one run ends on a release with this line, and leaves nothing half done."""

    def then(machine: Machine) -> None:
        played = run_playbook(sim, machine, BOOK, extra)
        assert played.rc == 0, played.stdout
        assert not machine.ssh("find /var/lib/gpuready /etc/systemd -name '.*.new'").stdout
        again = run_playbook(sim, machine, BOOK, extra)
        assert (again.rc, again.recap[HOST]["changed"]) == (0, 0), again.stdout
        serves = release_of(machine)
        assert line in machine.ssh(f"cat /var/lib/gpuready/releases/chat/{serves}/serve.yaml").stdout.splitlines()

    return then


def test_between_any_two_steps_of_a_release_that_serves(sim: Sim, lanes: Lanes, finished_image: str) -> None:
    goal = converges(sim, NEXT, "max-num-seqs: 3")
    with pictures(sim, lanes, finished_image, lambda _: NEXT, 0) as taken:
        print(f"{len(taken)} states", flush=True)
        assert len(taken) > 5
        assert not lanes.take([cut(lanes, step, image, (1, 2), goal) for step, image in taken.items()])


def test_between_any_two_steps_of_a_release_that_does_not(sim: Sim, lanes: Lanes, finished_image: str) -> None:
    goal = converges(sim, FORMER, f'served-model-name: "{MODEL}"')
    with pictures(sim, lanes, finished_image, spoil, 2) as taken:
        print(f"{len(taken)} states", flush=True)
        assert len(taken) > 2
        assert not lanes.take([cut(lanes, step, image, (1,), goal) for step, image in taken.items()])
