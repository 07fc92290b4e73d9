"""A machine from nothing to booted, and everything back to nothing."""

from __future__ import annotations

import shutil
import time

from sim.hardware import state_file
from sim.machine import doctor, image, network, packages, pool, servers
from sim.machine.common import Say, Sim, quiet
from sim.machine.machine import Machine, machines, ready
from sim.machine.servers import Kind


def up(
    sim: Sim,
    name: str,
    source: str = "",
    kind: Kind | None = None,
    address: str = "",
    say: Say = quiet,
) -> Machine:
    """Make the machine if there is none, boot it, and wait until it answers; its kind follows from its name."""
    kind = kind or servers.kind_of(name)
    doctor.refuse_if_unfit(sim)
    machine = Machine(sim, name)
    packages.install(packages.missing())
    with sim.lock():
        ready(sim)
        if not machine.exists():
            _make(machine, source, kind, address, say)
        started = time.monotonic()
        machine.start()
    machine.wait_for_ssh()
    say(f"{name} is running at {machine.address}, {time.monotonic() - started:.1f} s after its start")
    return machine


def _make(machine: Machine, source: str, kind: Kind, address: str, say: Say) -> None:
    """Make the machine. One that is a copy keeps what it is a copy of, its GPUs' identity included."""
    name = source or image.ensure(machine.sim, kind, say)
    started = time.monotonic()
    machine.create(name, image.suite_of(machine.sim, name) or kind.suite, address)
    file = machine.root / state_file.PATH.lstrip("/")
    if not source and file.exists():
        state_file.rename(file, machine.name)
    say(f"copied the image {name} in {time.monotonic() - started:.2f} s")


def down(sim: Sim) -> list[str]:
    """Remove everything and restore the former settings; return what was done, in words."""
    if not sim.state.exists():
        return []
    done: list[str] = []
    with sim.lock():
        gone = machines(sim)
        if gone and not pool.is_up(sim):
            pool.up(sim)
        for machine in gone:
            machine.destroy()
            done.append(f"removed the machine {machine.name}")
        done += network.down(sim)
        pool.down(sim)
        shutil.rmtree(sim.state)
        done.append(f"removed {sim.state}, with the images")
    return done
