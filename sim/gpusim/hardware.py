"""The verbs about hardware: show, set, fault, clear, and what there is to choose from."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence

from sim.gpusim import keys, places, planting, show
from sim.gpusim.faults import FAULTS, find
from sim.gpusim.places import Place
from sim.machine.common import REFUSED, SimError


def _say(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


def _place(args: argparse.Namespace) -> tuple[Place, list[str]]:
    """Return the server that the words name, and the other words; with --state they name none."""
    words = list(args.words)
    if args.state:
        return places.find("", args.state), words
    if not words:
        raise SimError("which server is missing", "name a machine first, or a folder with --state", REFUSED)
    return places.find(words[0], ""), words[1:]


def _gpus(place: Place, wanted: str, what: str) -> list[int]:
    """Return the GPUs that `--gpu` names; the only one needs no name."""
    count = len(places.read(place).gpus)
    if wanted == "all" or (not wanted and count == 1):
        return list(range(count))
    if not wanted:
        raise SimError(f"which GPU {what} is missing", f"give --gpu 0 to {count - 1}, or --gpu all", REFUSED)
    return [_gpu(place, wanted)]


def _gpu(place: Place, wanted: str) -> int:
    count = len(places.read(place).gpus)
    if not wanted.isdecimal() or int(wanted) >= count:
        raise SimError(f"there is no GPU {wanted}", f"{place.title} has {count}, counted from 0", REFUSED)
    return int(wanted)


def _no_more(words: Sequence[str]) -> None:
    if words:
        raise SimError(f"{' '.join(words)} is one word too many", "see --help", REFUSED)


def show_all(args: argparse.Namespace) -> None:
    """Show the hardware of a server."""
    place, rest = _place(args)
    _no_more(rest)
    shown = show.describe(place, _gpu(place, args.gpu) if args.gpu else None)
    _say([json.dumps(shown, indent=2)] if args.json else show.lines(shown))


def set_keys(args: argparse.Namespace) -> None:
    """Change what the hardware says."""
    place, rest = _place(args)
    if not rest:
        _say([f"{key.name:34} {'' if key.of == 'gpu' else 'of the whole server: '}{key.form}" for key in keys.table()])
        return
    wanted = [_assignment(word) for word in rest]
    of_gpus = [(key, value) for key, value in wanted if key.of == "gpu"]
    gpus = _gpus(place, args.gpu, "has another value") if of_gpus else []
    hidden = []
    with places.changing(place) as state:
        for key, value in wanted:
            sections = [state.gpus[gpu] for gpu in gpus] if key.of == "gpu" else [state.system]
            for section in sections:
                section.set(key.name, value)
                if state.effective(section.title).get(key.name) != section.get(key.name):
                    hidden.append(f"{key.name} of {section.title} is hidden by a fault until that is cleared")
    _say([*hidden, "done"])


def _assignment(word: str) -> tuple[keys.Key, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise SimError(f"{word} is not KEY=VALUE", "e.g. temperature_celsius=80", REFUSED)
    key = keys.find(name.strip())
    refusal = key.refusal(value.strip())
    if refusal:
        raise SimError(refusal, "", REFUSED)
    return key, value.strip()


def plant(args: argparse.Namespace) -> None:
    """Plant a fault."""
    place, rest = _place(args)
    if not rest:
        raise SimError("which fault is missing", "`./scripts/gpusim faults` lists them", REFUSED)
    _no_more(rest[1:])
    fault = find(planting.known(rest[0]))
    assert fault is not None  # noqa: S101 - known() has refused all others
    given = {
        option.name: value
        for one in FAULTS
        for option in one.options
        if (value := getattr(args, option.name)) is not None
    }
    if fault.of != "gpu" and args.gpu not in ("", "all"):
        raise SimError(f"{fault.name} is of the whole server", "leave out --gpu", REFUSED)
    gpus = {"system": [], "gpus": _gpus(place, "all", "")}.get(fault.of)
    gpus = _gpus(place, args.gpu, f"has {fault.name}") if gpus is None else gpus
    said = planting.plant(place, fault, gpus, given)
    _say([*said, f"planted; `./scripts/gpusim clear {_named(args, place)} {fault.name}` takes it away"])


def _named(args: argparse.Namespace, place: Place) -> str:
    return f"--state {shlex.quote(place.title)}" if args.state else place.title


def clear(args: argparse.Namespace) -> None:
    """Take faults away."""
    place, rest = _place(args)
    _no_more(rest[1:])
    gpu = None if args.gpu in ("", "all") else _gpu(place, args.gpu)
    gone = planting.clear(place, rest[0] if rest else "", gpu)
    _say([f"cleared: {', '.join(gone)}" if gone else "there was nothing to clear"])


def faults(_args: argparse.Namespace) -> None:
    """List the faults that can be planted."""
    for fault in FAULTS:
        print(f"{fault.name:24} {fault.what}")
        for option in fault.options:
            default = f" ({option.default})" if isinstance(option.default, int) else ""
            print(f"{'':24}   {planting.flag(option.name)}: {option.what}{default}")


def presets(_args: argparse.Namespace) -> None:
    """List the hardware that there is to choose from."""
    from sim.hardware.describe import load_server, names  # needs what reads YAML

    _say([f"{name:24} {load_server(name).description}" for name in names("presets")])
