"""Completion of the command line for bash: `source <(./scripts/gpusim completion)`."""

from __future__ import annotations

import argparse

from sim.gpusim.faults import FAULTS
from sim.machine import image, machine
from sim.machine.common import Sim

SCRIPT = """\
_gpusim() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb=${COMP_WORDS[1]} choice
    case $before in
    --preset) choice="%(presets)s" ;;
    --suite) choice="%(suites)s" ;;
    --state) mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    *)
        case $COMP_CWORD in
        1) choice="%(verbs)s" ;;
        2) choice="$("${COMP_WORDS[0]}" completion --machines 2>/dev/null)" ;;
        *) case $verb in fault | clear) choice="%(faults)s" ;; esac ;;
        esac
        ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$choice" -- "$word")
}
complete -o default -F _gpusim gpusim ./scripts/gpusim scripts/gpusim
"""


def script(verbs: list[str]) -> str:
    """Return what bash is to read."""
    return SCRIPT % {
        "verbs": " ".join(verbs),
        "presets": " ".join(image.presets()),
        "suites": " ".join(image.SUITES),
        "faults": " ".join(fault.name for fault in FAULTS),
    }


def print_completion(args: argparse.Namespace) -> None:
    """Print the script, or the names of the machines that there are."""
    if args.machines:
        print("\n".join(one.name for one in machine.machines(Sim.from_environment())))
    else:
        print(script(args.verbs), end="")
