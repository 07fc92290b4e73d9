"""The command: `python3 -m sim.machine up | stop | start | reboot | destroy | list | ssh | save | down | doctor`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from sim.machine import doctor, identity, image, packages, pool, servers
from sim.machine.common import FAILED, Sim, SimError
from sim.machine.lifecycle import down, up
from sim.machine.machine import Machine, machines


def say(line: str) -> None:
    """Tell the person what happens."""
    print(line, flush=True)


def _up(sim: Sim, args: argparse.Namespace) -> None:
    started = time.monotonic()
    kind = servers.kind_of(args.name, args.suite, args.preset)
    machine = up(sim, args.name, args.source, kind, args.address, say)
    say(f"{machine.name} is up at {machine.address} ({time.monotonic() - started:.1f} s)")


def _start(sim: Sim, args: argparse.Namespace) -> None:
    machine = Machine(sim, args.name)
    _ = machine.record
    _up(sim, argparse.Namespace(name=args.name, source="", suite="", preset="", address=""))


def _stop(sim: Sim, args: argparse.Namespace) -> None:
    Machine(sim, args.name).stop()
    say(f"{args.name} is stopped")


def _reboot(sim: Sim, args: argparse.Namespace) -> None:
    machine = Machine(sim, args.name)
    machine.reboot()
    say(f"{args.name} has rebooted and is {machine.wait_until_booted()}")


def _destroy(sim: Sim, args: argparse.Namespace) -> None:
    machine = Machine(sim, args.name)
    _ = machine.record
    with sim.lock():
        pool.up(sim)
        machine.destroy()
    say(f"{args.name} is gone")


def _list(sim: Sim, _args: argparse.Namespace) -> None:
    for machine in machines(sim):
        record = machine.record
        say(f"{machine.name:<20} {machine.status():<9} {record.address:<16} from {record.image}")
    for name in pool.images(sim):
        say(f"image {name}")


def _ssh(sim: Sim, args: argparse.Namespace) -> None:
    machine = Machine(sim, args.name)
    # As with ssh itself, the words are joined and the machine's shell reads them.
    os.execvp("ssh", identity.ssh_argv(sim, machine.address, args.command, quote=False))  # noqa: S606


def _save(sim: Sim, args: argparse.Namespace) -> None:
    with sim.lock():
        Machine(sim, args.name).save_as_image(args.image)
    say(f"{args.name} is stopped and kept as the image {args.image}")


def _down(sim: Sim, _args: argparse.Namespace) -> None:
    for line in down(sim) or ["nothing was up"]:
        say(line)


def _doctor(sim: Sim, _args: argparse.Namespace) -> None:
    doctor.refuse_if_unfit(sim)
    lacking = packages.missing()
    say(f"fit; to be installed first: {' '.join(lacking)}" if lacking else "fit")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python3 -m sim.machine", description="Simulated GPU servers.")
    verbs = top.add_subparsers(required=True, metavar="COMMAND")

    def verb(name: str, action: Callable[[Sim, argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.set_defaults(action=action)
        return made

    made = verb("up", _up, "make the machine if there is none, and boot it")
    made.add_argument("name")
    made.add_argument("--from", dest="source", default="", metavar="IMAGE", help="a saved image instead of a blank one")
    made.add_argument("--suite", default="", choices=image.SUITES, help="Debian release (default: by its name)")
    made.add_argument("--preset", default="", choices=image.presets(), help="hardware (default: by its name)")
    made.add_argument("--address", default="", help="its address (default: the next free one)")
    for name, action, text in (
        ("start", _start, "boot a machine that was stopped"),
        ("stop", _stop, "shut a machine down; its disk stays"),
        ("reboot", _reboot, "reboot a machine and wait for it"),
        ("destroy", _destroy, "remove a machine with all that is on it"),
    ):
        verb(name, action, text).add_argument("name")
    verb("list", _list, "show machines and images")
    made = verb("ssh", _ssh, "run a command on a machine as root: ssh NAME -- CMD")
    made.add_argument("name")
    made.add_argument("command", nargs="*")
    made = verb("save", _save, "stop a machine and keep it as an image")
    made.add_argument("name")
    made.add_argument("image")
    verb("down", _down, "remove everything, and restore the former settings")
    verb("doctor", _doctor, "say all that keeps the simulation from working here")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; every problem ends as one sentence."""
    args = parser().parse_args(argv)
    try:
        if os.geteuid() != 0:
            raise doctor.need_root()
        args.action(Sim.from_environment(), args)
    except SimError as problem:
        print(problem, file=sys.stderr)
        return problem.code
    except OSError as problem:
        print(f"this failed: {problem}.", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on.", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
