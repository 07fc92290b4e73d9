"""Plants faults into the hardware of a simulated server, and takes them away."""

from __future__ import annotations

import contextlib
import difflib
import re
import time
from collections.abc import Iterable, Mapping, Sequence

from sim.gpusim import links
from sim.gpusim.faults import FAULTS, XID_CRITICAL, XIDS, Effect, Fault, Need, Option, Xid
from sim.gpusim.places import Place, changing, read
from sim.hardware.state_file import Section, State, as_number
from sim.machine.common import REFUSED, SimError

MIB = 1 << 20
NOBODY = "pid='<unknown>', name=<unknown>"
Values = Mapping[str, str | int]


def known(name: str, others: Iterable[str] = ()) -> str:
    """Return the name of a fault, or refuse it with the nearest one."""
    names = [*(fault.name for fault in FAULTS), *others]
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"the nearest is {near[0]}; " if near else ""
    raise SimError(f"there is no fault {name}", f"{hint}`./scripts/gpusim faults` lists them", REFUSED)


def flag(name: str) -> str:
    """Return an option as it stands on a command line."""
    return f"--{name.replace('_', '-')}"


def complete(fault: Fault, given: Values) -> Values:
    """Return what was said about a fault, with the defaults of what was not."""
    allowed = {option.name: option for option in fault.options}
    for name in given:
        if name not in allowed:
            can = ", ".join(map(flag, allowed)) or "none"
            raise SimError(f"{fault.name} has no option {flag(name)}", f"its options: {can}", REFUSED)
    for option in fault.options:
        if option.name in given:
            _refuse_value(option, given[option.name])
        elif option.default is None:
            raise SimError(f"{fault.name} needs {flag(option.name)} ({option.what})", "give a whole number", REFUSED)
    return {option.name: given.get(option.name, option.default or "") for option in fault.options}


def _refuse_value(option: Option, value: str | int) -> None:
    """Refuse what no option can be; what is possible on this very hardware is the library's to say."""
    if option.number and not (isinstance(value, int) and 0 <= value < 1 << 32):
        raise SimError(f"{flag(option.name)} {value} is out of range", "give a whole number from 0", REFUSED)
    if not option.number and not re.fullmatch(r"[A-Za-z0-9_-]{1,31}", str(value)):
        raise SimError(f"{flag(option.name)} {value} is not a name", "give letters, digits and _", REFUSED)


def _effect(fault: Fault, values: Values) -> tuple[Effect, dict[int, str]]:
    """Return what the fault does, and by XID how the kernel's line ends."""
    texts = {number: xid.text for number, xid in XIDS.items()}
    if fault.name != "xid":
        return fault.effect, texts
    number = int(values["xid"])
    plain = Xid("", Effect(events=((XID_CRITICAL, number),)))
    found = XIDS.get(number, plain)
    return (found.effect if found.effect.events else plain.effect), texts


def plant(place: Place, fault: Fault, gpus: Sequence[int], given: Values) -> list[str]:
    """Plant a fault into these GPUs, or into the system; return what there is to say."""
    values = complete(fault, given)
    effect, texts = _effect(fault, values)
    before = read(place)
    for gpu in gpus:
        _refuse_where_it_makes_no_sense(before, gpu, fault, effect.needs)
    with contextlib.ExitStack() as undo:
        held = _hold(place, before, fault, gpus, values, undo)
        with changing(place) as state:
            made = [section for gpu in gpus for section in _sections(state, fault, effect, gpu, values)]
            if fault.of == "system":
                made = _system_sections(fault, effect)
            new = [section for section in [*made, *held] if section not in state.faults or _counts(section)]
            if (made or held) and not new:
                raise SimError(f"{fault.name} is there already", "`./scripts/gpusim clear` takes it away", REFUSED)
            state.sections += new
            for gpu in gpus:
                for kind, data in effect.events:
                    state.add_event(gpu, kind, data)
        undo.pop_all()
    xids = [(gpu, data) for gpu in gpus for kind, data in effect.events if kind == XID_CRITICAL]
    lines = [_kernel_line(before.gpus[gpu], number, texts.get(number, "")) for gpu, number in xids]
    return [said for line in lines if (said := place.log_kernel(line))]


def _refuse_where_it_makes_no_sense(state: State, gpu: int, fault: Fault, needs: Sequence[Need]) -> None:
    section = state.effective(f"gpu {gpu}")
    for need in needs:
        if need.key == "compute_capability":
            found = [f"{section.get('compute_capability_major')}.{section.get('compute_capability_minor')}"]
        elif need.key == "nvlink":
            found = [value.split()[1] for value in section.all("nvlink")]
        else:
            found = [value] if (value := section.get(need.key)) is not None else []
        if not any(not need.values or one.startswith(need.values) for one in found):
            raise SimError(
                f"GPU {gpu} ({section.get('name')}) {need.lacking}", f"so it cannot have {fault.name}", REFUSED
            )


def _counts(section: Section) -> bool:
    """Say whether a fault can be there twice: an error that is counted, not a state that is reached."""
    return any(value.startswith("+") for _, value in section.lines)


# ---- the lines of a section ----


def _lines(gpu: Section, changes: Mapping[str, str], values: Values) -> list[tuple[str, str]]:
    """Return the lines that changes of the table come to on one GPU."""
    lines = []
    for key, form in changes.items():
        name = key.removesuffix("?")
        said = form.format(**values)
        if said and (name == key or gpu.get(name) is not None):
            lines.append((name, _value(gpu, said)))
    return lines


def _value(gpu: Section, form: str) -> str:
    if form.startswith("="):
        other, _, fallback = form[1:].partition("|")
        return gpu.get(other) or fallback
    share, percent, other = form.partition("%")
    if percent:
        return str((gpu.number(other) or 0) * int(share) // 100)
    return form


def _sections(state: State, fault: Fault, effect: Effect, gpu: int, values: Values) -> list[Section]:
    """Return the sections of a fault of one GPU: one for each way in which it can end."""
    now = state.effective(f"gpu {gpu}")
    parts = {"clear": effect.until_clear, "reset": effect.until_reset, "reboot": effect.until_reboot}
    sections = []
    for until, changes in parts.items():
        lines = _lines(now, changes, values)
        if lines:
            sections.append(Section(f"fault {fault.name} {gpu}", [("until", until), *lines]))
        for key, value in lines:
            other = links.other_end(state, gpu, as_number(value)) if key == "nvlink_down" else None
            if other:
                down = [("until", until), (key, str(other[1]))]
                sections.append(Section(f"fault {fault.name} {other[0]}", down))
    return sections


def _system_sections(fault: Fault, effect: Effect) -> list[Section]:
    parts = {"clear": effect.until_clear, "reset": effect.until_reset, "reboot": effect.until_reboot}
    return [
        Section(f"fault {fault.name} system", [("until", until), *changes.items()])
        for until, changes in parts.items()
        if changes
    ]


def _kernel_line(gpu: Section, xid: int, text: str) -> str:
    address = (gpu.get("pci_address") or "").rpartition(".")[0]
    return f"NVRM: Xid (PCI:{address}): {xid}, {text or NOBODY}"


# ---- processes ----


def unit_of(fault: str, gpu: int) -> str:
    """Return the name under which a fault's process runs."""
    return f"gpusim-{fault}-{gpu}"


def _hold(
    place: Place, state: State, fault: Fault, gpus: Sequence[int], values: Values, undo: contextlib.ExitStack
) -> list[Section]:
    """Start a process for each GPU and return the sections that tell of them."""
    if not fault.holds or values.get(fault.unless):
        return []
    sections = []
    for gpu in gpus:
        title = f"fault {fault.name} {gpu}"
        if any(section.title == title and section.all("process") for section in state.faults):
            raise SimError(
                f"{fault.name} is on GPU {gpu} already", "`./scripts/gpusim clear` takes it away first", REFUSED
            )
        instance = _instance(state, gpu)
        unit = unit_of(fault.name, gpu)
        undo.callback(place.stop_process, unit)
        pid = place.start_process(unit)
        size = int(fault.holds.format(**values)) * MIB
        grows = int(values.get("mib_per_minute", 0)) * MIB
        growth = f" {grows} {int(time.time())}" if grows else ""
        sections.append(Section(title, [("until", "reboot"), ("process", f"{pid} {size} compute {instance}{growth}")]))
    return sections


def _instance(state: State, gpu: int) -> str:
    """Return GPU instance and compute instance on which a process of the GPU runs."""
    section = state.effective(f"gpu {gpu}")
    if section.get("mig_current") != "1":
        return "- -"
    first = next((value.split()[:2] for value in section.all("compute_instance")), None)
    if first is None:
        raise SimError(
            f"GPU {gpu} has MIG on and no compute instance, so no process can run on it", "make one first", REFUSED
        )
    return " ".join(first)


# ---- taking away ----


def clear(place: Place, name: str, gpu: int | None) -> list[str]:
    """Take away the faults of that name (empty: all), of one GPU or everywhere; return their titles."""
    if name:
        known(name, (section.title.split()[1] for section in read(place).faults))
    with changing(place) as state:
        gone = [section for section in state.faults if _is_meant(section, name, gpu)]
        ends = _other_ends(state, gone)
        state.sections = [section for section in state.sections if section not in gone + ends]
        held = {_unit(section) for section in state.faults if section.all("process")}
    for unit in {_unit(section) for section in gone if section.all("process")} | {*place.started()} - held:
        place.stop_process(unit)
    return list(dict.fromkeys(section.title.removeprefix("fault ") for section in gone + ends))


def _unit(section: Section) -> str:
    _, fault, of = section.title.split()
    return unit_of(fault, int(of))


def _is_meant(section: Section, name: str, gpu: int | None) -> bool:
    _, fault, of = section.title.split()
    return (not name or fault == name) and (gpu is None or of == str(gpu))


def _other_ends(state: State, gone: Sequence[Section]) -> list[Section]:
    found = []
    for section in gone:
        _, fault, of = section.title.split()
        for link in section.all("nvlink_down"):
            other = links.other_end(state, int(of), as_number(link))
            down = ("nvlink_down", str(other[1])) if other else ("", "")
            title = f"fault {fault} {other[0]}" if other else ""
            found += [one for one in state.faults if one.title == title and down in one.lines and one not in gone]
    return found
