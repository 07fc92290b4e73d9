"""The stage base in one call: packages, the clock, small files, kernel parameters, shared memory, the packet filter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuready.operations import firewall, firewall_rules, host, packages, shared_memory
from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Result

RECORD = "/var/lib/gpuready/host.json"
"""What this stage brought about; an audit compares the server with it."""
ON_TRIAL = f"{firewall.TRIAL}/host.json"
"""The record to be, while the packet filter's rules are on trial; a reboot takes both away."""


@dataclass(frozen=True)
class Wanted:
    """What the host is to be like."""

    packages: packages.Wanted
    files: Sequence[host.File] = ()
    parameters: Sequence[host.Setting] = ()
    shm_percent: int | None = None
    """Share of the RAM that /dev/shm has at least; None leaves it alone."""
    firewall: firewall_rules.Wanted | None = None
    """None leaves the packet filter alone."""


def settle(machine: Machine, wanted: Wanted, check: bool) -> Result:
    """Bring the host to what is wanted, in the order in which one thing needs another.

    `data.notes` says what this machine does not allow; `data.confirm` that rules of the packet filter are on trial.
    """
    result = Result(data={"confirm": False})
    with result.kept_by_failures(check):
        _settle(machine, wanted, check, result)
    return result


def _settle(machine: Machine, wanted: Wanted, check: bool, result: Result) -> None:
    notes: list[str] = []
    clock = _packages_and_clock(machine, wanted, check, result, notes)
    result.include(host.place_files(machine, wanted.files, check))
    parameters = host.set_parameters(machine, wanted.parameters, check)
    result.include(parameters)
    if parameters.data["not_applied"] or parameters.data["left"]:
        notes.append(parameters.summary)
    if wanted.shm_percent is not None:
        shm = shared_memory.set_shm(machine, wanted.shm_percent, check)
        result.include(shm)
        if not shm.data["applied"]:
            notes.append(shm.summary)
    if wanted.firewall is not None:
        rules = firewall.apply(machine, wanted.firewall, check)
        result.include(rules)
        result.data["confirm"] = rules.data["confirm"]
    without = {*parameters.data["not_applied"], *parameters.data["left"]}
    record = _record(wanted, clock, [one for one in wanted.parameters if one.key not in without])
    if result.data["confirm"]:
        machine.write(ON_TRIAL, json.dumps(record))
    elif not result.undecided:
        result.include(_keep(machine, record, check))
    result.data["notes"] = notes
    result.summary = "; ".join([_word(result, check), *notes])


def _word(result: Result, check: bool) -> str:
    if not result.changed:
        return "the host is as declared"
    return "the host would be brought to what is declared" if check else "the host was brought to what is declared"


def _packages_and_clock(machine: Machine, wanted: Wanted, check: bool, result: Result, notes: list[str]) -> str | None:
    """Install the packages, and a time service where there is none; return the unit that keeps the time."""
    clock = host.keep_time(machine, check)
    lacking = list(clock.data["install"])
    names = [*wanted.packages.names, *(name for name in lacking if name not in wanted.packages.names)]
    result.include(packages.ensure(machine, replace(wanted.packages, names=names), check))
    if lacking and not check:
        clock = host.keep_time(machine, check)
    if lacking and check:
        result.undecided.append(f"whether {', '.join(lacking)} can keep the time on this machine")
    result.include(clock)
    if "note" in clock.data and not (lacking and check):
        notes.append(clock.data["note"])
    return str(clock.data["unit"]) if clock.data["active"] else None


def _record(wanted: Wanted, clock: str | None, parameters: Sequence[host.Setting]) -> dict[str, Any]:
    """Return what is written down about the host; `parameters` are those that this machine lets be set."""
    files = {file.path: file.content for file in wanted.files}
    files[host.SYSCTL_FILE] = host.sysctl_file(wanted.parameters)
    return {
        "packages": sorted(wanted.packages.names),
        "files": {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()},
        "parameters": {one.key: host.plain(one.value) for one in parameters},
        "shm_percent": wanted.shm_percent,
        "clock": clock,
        "firewall": wanted.firewall is not None,
    }


def _keep(machine: Machine, record: dict[str, Any], check: bool) -> Result:
    """Write the record where it differs."""
    before, after = machine.read(RECORD) or "", json.dumps(record, indent=2, sort_keys=True) + "\n"
    if before == after:
        return Result()
    if not check:
        machine.write(RECORD, after)
    return Result(changed=True, diff=[Change(RECORD, before, after)])


def confirm(machine: Machine, check: bool) -> Result:
    """Keep the packet filter's rules that are on trial, and write down what the host is like with them."""
    result = firewall.confirm(machine, check)
    record = machine.read(ON_TRIAL)
    if record is not None:
        result.include(_keep(machine, json.loads(record), check))
        if not check:
            machine.remove(ON_TRIAL)
    return result
