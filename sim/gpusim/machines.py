"""The verbs about machines: make, boot, stop, reach, keep, destroy."""

from __future__ import annotations

import argparse
import os

from sim.machine import doctor, identity, image, packages, pool, servers
from sim.machine.common import REFUSED, Sim, SimError
from sim.machine.lifecycle import down as take_down
from sim.machine.lifecycle import up
from sim.machine.machine import Machine, machines


def say(line: str) -> None:
    """Tell the person what happens."""
    print(line, flush=True)


def create(sim: Sim, args: argparse.Namespace) -> None:
    """Make a machine if there is none, and boot it."""
    if args.source and (args.preset or args.suite):
        raise SimError(
            f"the image {args.source} has its Debian release and its hardware",
            "leave out --suite and --preset",
            REFUSED,
        )
    kind = servers.kind_of(args.name, args.suite, args.preset)
    machine = Machine(sim, args.name)
    if machine.exists():
        _refuse_another(machine, args, image.family(kind))
    elif not args.source:
        image.check(kind)  # before anything is set up
    up(sim, args.name, args.source, kind, args.address, say)


def _refuse_another(machine: Machine, args: argparse.Namespace, family: str) -> None:
    """Refuse to take a machine that exists for the one that was asked for."""
    record = machine.record
    same = record.image == args.source if args.source else record.image.startswith(family)
    wanted = args.source or args.preset or args.suite
    if (wanted and not same) or args.address not in ("", record.address):
        raise SimError(
            f"the machine {args.name} exists, made from {record.image} at {record.address}",
            f"`./scripts/gpusim destroy {args.name}` first, or take another name",
            REFUSED,
        )


def start(sim: Sim, args: argparse.Namespace) -> None:
    """Boot a machine that was stopped."""
    _ = Machine(sim, args.name).record
    up(sim, args.name, say=say)


def stop(sim: Sim, args: argparse.Namespace) -> None:
    """Shut a machine down; its disk stays."""
    Machine(sim, args.name).stop()
    say(f"{args.name} is stopped")


def reboot(sim: Sim, args: argparse.Namespace) -> None:
    """Reboot a machine and wait for it."""
    machine = Machine(sim, args.name)
    machine.reboot()
    say(f"{args.name} has rebooted and is {machine.wait_until_booted()}")


def destroy(sim: Sim, args: argparse.Namespace) -> None:
    """Remove a machine with all that is on it."""
    machine = Machine(sim, args.name)
    _ = machine.record
    with sim.lock():
        pool.up(sim)
        machine.destroy()
    say(f"{args.name} is gone")


def list_all(sim: Sim, _args: argparse.Namespace) -> None:
    """Show machines and images."""
    for machine in machines(sim):
        record = machine.record
        say(f"{machine.name:<20} {machine.status():<9} {record.address:<16} from {record.image}")
    for name in pool.images(sim):
        say(f"image {name}")


def ssh(sim: Sim, args: argparse.Namespace) -> None:
    """Run a command on a machine as root."""
    machine = Machine(sim, args.name)
    # As with ssh itself, the words are joined and the machine's shell reads them.
    os.execvp("ssh", identity.ssh_argv(sim, machine.address, args.command, quote=False))  # noqa: S606


def snapshot(sim: Sim, args: argparse.Namespace) -> None:
    """Stop a machine and keep it as an image."""
    machine = Machine(sim, args.name)
    _ = machine.record
    with sim.lock():
        machine.save_as_image(args.image)
    say(f"{args.name} is stopped and kept as the image {args.image}")


def down(sim: Sim, _args: argparse.Namespace) -> None:
    """Remove everything, and restore the former settings."""
    for line in take_down(sim) or ["nothing was up"]:
        say(line)


def look(sim: Sim, _args: argparse.Namespace) -> None:
    """Say all that keeps the simulation from working here."""
    doctor.refuse_if_unfit(sim)
    lacking = packages.missing()
    say(f"fit; to be installed first: {' '.join(lacking)}" if lacking else "fit")
