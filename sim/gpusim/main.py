"""Reads the command line of `./scripts/gpusim` and calls the verb."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence

from sim.gpusim import hardware, machines, run
from sim.gpusim.completion import print_completion
from sim.gpusim.faults import FAULTS
from sim.machine import doctor, image
from sim.machine.common import FAILED, Sim, SimError

Action = Callable[[argparse.Namespace], int | None]
OF_MACHINES = (
    ("start", machines.start, "boot a machine that was stopped"),
    ("stop", machines.stop, "shut a machine down; its disk stays"),
    ("reboot", machines.reboot, "reboot a machine and wait for it"),
    ("destroy", machines.destroy, "remove a machine with all that is on it"),
)


class Parser:
    """The parser of the command line, to which verbs are added."""

    def __init__(self) -> None:
        self.top = argparse.ArgumentParser(
            prog="./scripts/gpusim",
            description="Simulated GPU servers: make and boot them, show and change their hardware, break it.",
            epilog="docs/simulator.md tells what is simulated and what is not.",
        )
        self.verbs = self.top.add_subparsers(required=True, metavar="COMMAND")

    def verb(self, name: str, action: Action, text: str) -> argparse.ArgumentParser:
        """Add a verb."""
        made = self.verbs.add_parser(name, help=text, description=text)
        made.set_defaults(action=action)
        return made

    def machine_verb(
        self, name: str, action: Callable[[Sim, argparse.Namespace], None], text: str
    ) -> argparse.ArgumentParser:
        """Add a verb that needs the simulation, and so root."""
        return self.verb(name, functools.partial(_as_root, action), text)

    def hardware_verb(self, name: str, action: Action, text: str, words: str) -> argparse.ArgumentParser:
        """Add a verb about the hardware of a machine, or of a folder that `run` uses."""
        made = self.verb(name, action, text)
        made.usage = f"%(prog)s [-h] {{NAME | --state DIR}} {words}".replace("%(prog)s", made.prog)
        made.add_argument("words", nargs="*", metavar="NAME", help="the machine, then what the usage line says")
        made.add_argument("--state", default="", metavar="DIR", help="instead of a machine: a folder of `run --state`")
        return made


def _as_root(action: Callable[[Sim, argparse.Namespace], None], args: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise doctor.need_root()
    action(Sim.from_environment(), args)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = Parser()
    _add_machines(made)
    _add_hardware(made)
    verb = made.verb("run", run.run, "run a command on this machine with simulated GPUs: run --preset P -- COMMAND")
    verb.add_argument("--preset", default="", metavar="P|FILE.yaml", help="hardware (default: 8 x H100)")
    verb.add_argument("--state", default="", metavar="DIR", help="a folder that keeps the hardware for the next time")
    verb.add_argument("command", nargs="*", metavar="COMMAND")
    made.verb("presets", hardware.presets, "list the hardware that there is to choose from")
    verb = made.verb(
        "completion", print_completion, "print what completes these words in bash: source <(... completion)"
    )
    verb.add_argument("--machines", action="store_true", help=argparse.SUPPRESS)
    verb.set_defaults(verbs=list(made.verbs.choices))
    return made.top


def _add_machines(made: Parser) -> None:
    verb = made.machine_verb("create", machines.create, "make the machine if there is none, and boot it")
    verb.add_argument("name")
    verb.add_argument("--preset", default="", metavar="P|FILE.yaml", help="hardware (default: by its name)")
    verb.add_argument("--suite", default="", choices=image.SUITES, help="Debian release (default: by its name)")
    verb.add_argument("--from", dest="source", default="", metavar="IMAGE", help="a snapshot instead of a blank server")
    verb.add_argument("--address", default="", help="its address (default: the next free one)")
    for name, action, text in OF_MACHINES:
        made.machine_verb(name, action, text).add_argument("name")
    made.machine_verb("list", machines.list_all, "show machines and images")
    verb = made.machine_verb("ssh", machines.ssh, "run a command on a machine as root: ssh NAME -- CMD")
    verb.add_argument("name")
    verb.add_argument("command", nargs="*")
    verb = made.machine_verb("snapshot", machines.snapshot, "stop a machine and keep it as an image")
    verb.add_argument("name")
    verb.add_argument("image")
    made.machine_verb("down", machines.down, "remove everything, and restore the former settings")
    made.machine_verb("doctor", machines.look, "say all that keeps the simulation from working here")


def _add_hardware(made: Parser) -> None:
    verb = made.hardware_verb("show", hardware.show_all, "show GPUs, MIG, processes, faults", "[--gpu N] [--json]")
    verb.add_argument("--gpu", default="", metavar="N", help="only this GPU")
    verb.add_argument("--json", action="store_true", help="as JSON")
    verb = made.hardware_verb(
        "set",
        hardware.set_keys,
        "change what the hardware says; without a key, list the keys",
        "KEY=VALUE ... [--gpu N|all]",
    )
    verb.add_argument("--gpu", default="", metavar="N|all", help="which GPU")
    verb = made.hardware_verb("fault", hardware.plant, "plant a fault", "FAULT [--gpu N|all] [options of the fault]")
    verb.add_argument("--gpu", default="", metavar="N|all", help="which GPU")
    for option in {option.name: option for fault in FAULTS for option in fault.options}.values():
        verb.add_argument(
            f"--{option.name.replace('_', '-')}", type=int if option.number else str, metavar="N", help=option.what
        )
    verb = made.hardware_verb("clear", hardware.clear, "take faults away", "[FAULT] [--gpu N]")
    verb.add_argument("--gpu", default="", metavar="N", help="only this GPU's")
    made.verb("faults", hardware.faults, "list the faults that there are")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; every problem ends as one sentence."""
    given = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(given)
    try:
        if args.action in (run.run, hardware.presets):
            run.through_environment(given)
        return args.action(args) or 0
    except SimError as problem:
        print(problem, file=sys.stderr)
        return problem.code
    except OSError as problem:
        print(f"this failed: {problem}.", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on.", file=sys.stderr)
        return FAILED
