"""Out-of-memory on this server: what engine, kernel and NVML say of a replica's last start, and what cures it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuready.hardware import host, nvml
from gpuready.memory import diagnosis
from gpuready.memory.diagnosis import TITLES, Diagnosis
from gpuready.memory.neighbours import Holder
from gpuready.operations import start
from gpuready.outcome import Failure, MachineCannot, Refusal, Result
from gpuready.planning.cures import BOUNDS
from gpuready.serving import units
from gpuready.serving.files import as_json, read_json, write_text
from gpuready.serving.layout import Layout
from gpuready.serving.releases import FILE_MODE

JOURNAL_LINES = 20_000
"""An engine's start with several workers writes some thousand."""
MOST_REPEATED = 3
"""Starts before the last one that are read, where systemd itself started the unit again."""
GIB = 1 << 30


def of_replica(layout: Layout, replica: str) -> Result:
    """Say which out-of-memory ended a replica's last start, if any did.

    Raises:
        MachineCannot: where there is no such replica, or it was never given a release.
    """
    found = last_start(layout, replica)
    seen, other = _judged(replica, found)
    result = answer(seen, other, found.plan["name"], f"{replica}, release {found.number}")
    if (former := last_failure(layout, found.plan["name"])) and seen is None:
        result.summary += f"\n{former}"
    return result


def last_failure(layout: Layout, deployment: str) -> str:
    """Return the out-of-memory of a release that failed and was not answered since, as a sentence; else nothing."""
    one = (read_json(layout.cures) or {}).get(deployment)
    return f"{deployment}: release {one['release']} failed: {one['what']}" if one else ""


def of_text(text: str, where: str) -> Result:
    """Say which out-of-memory a log tells of, if any.

    Raises:
        Refusal: when there is nothing in it, which must not read as if memory had sufficed.
    """
    if not text.strip():
        raise Refusal(Failure("input.empty", f"{where} is empty", "", "give the engine's log from its start"))
    seen = diagnosis.of_log(text)
    return answer(seen, None if seen else diagnosis.other_cause(text), "", where)


def last_start(layout: Layout, replica: str) -> start.Start:
    """Return what the replica was started on last; what it is recorded on where nothing tells."""
    if start.read_devices(layout, replica).get(start.RELEASE):
        return start.running(layout, replica)
    return start.next_start(layout, replica)[0]


def of_failed(layout: Layout, replica: str, declaration: str | None) -> str:
    """Return what ended a replica's failed start where it was a lack of memory, and record what would cure it.

    `declaration` is the plan's digest of what is declared of the deployment; None: nothing is recorded. Called before
    the replica goes back to another release, while its journal is still the last one.
    """
    try:
        found = last_start(layout, replica)
    except MachineCannot:
        return ""
    seen, _ = _judged(replica, found)
    if seen is None:
        return ""
    if declaration is not None:
        record(layout, found.plan["name"], declaration, found.number, seen)
    declared = seen.cure.declared(found.plan["name"])
    return f"{seen.sentence()}; declare it: {declared}" if declared else seen.sentence()


def record(layout: Layout, deployment: str, declaration: str, number: int, seen: Diagnosis) -> None:
    """Record what would cure a deployment, on top of what an earlier failure of the same declaration wants."""
    bounds = bounds_of(seen)
    kept = read_json(layout.cures) or {}
    former = kept.get(deployment) or {}
    former = former if former.get("declaration") == declaration else {}
    settings = {**former.get("settings", {}), **bounds["settings"]}
    # The failed plan had the former headroom already, so what was missing comes on top of it.
    before = float(former.get("headroom_gib") or 0.0) if former.get("release") != number else 0.0
    kept[deployment] = {
        "declaration": declaration,
        "release": number,
        "kind": seen.kind,
        "what": seen.sentence(),
        "settings": settings,
        "headroom_gib": round(before + bounds["headroom_gib"], 2),
    }
    write_text(layout.cures, as_json(kept), FILE_MODE)


def bounds_of(seen: Diagnosis) -> dict[str, Any]:
    """Return what a planner can take of a cure: nothing of more GPUs, another process, the host."""
    cure = seen.cure
    if cure.setting in BOUNDS and cure.value is not None:
        return {"settings": {cure.setting: int(cure.value)}, "headroom_gib": 0.0}
    if cure.direction == "lower" and cure.setting in ("memory_fraction", "kv_bytes") and cure.gib:
        return {"settings": {}, "headroom_gib": cure.gib}
    return {"settings": {}, "headroom_gib": 0.0}


def forget(layout: Layout, plan: Mapping[str, Any]) -> None:
    """Drop the records that a plan which serves does not take: they are answered, or their cause is gone."""
    kept = read_json(layout.cures)
    if kept is None:
        return
    declared, cured = plan.get("declarations", {}), plan.get("cured", ())
    still = {name: one for name, one in kept.items() if name in cured and one["declaration"] == declared.get(name)}
    if not still:
        layout.cures.unlink(missing_ok=True)
    elif still != kept:
        write_text(layout.cures, as_json(still), FILE_MODE)


def answer(seen: Diagnosis | None, other: str | None, deployment: str, where: str) -> Result:
    """Return a diagnosis as a command's result; that it was no lack of memory is an answer as well."""
    data = {"diagnosis": seen.as_dict() if seen else None, "other_cause": other, "of": where}
    if seen is None:
        told = f"something else: {other}" if other else "nothing that is known"
        return Result(summary=f"{where}: no lack of memory in it; it says {told}", data=data)
    lines = [f"{where}: out of memory, {TITLES[seen.kind]} ({seen.kind})", f"  {seen.what}", "  what says so:"]
    lines += [f"    {line[:400]}" for line in seen.evidence]
    lines += ["  figures:", *(f"    {line}" for line in seen.arithmetic)] if seen.arithmetic else []
    lines.append(f"  cure: {seen.cure.words()}")
    if deployment and (declared := seen.cure.declared(deployment)):
        lines.append(f"  declare it: {declared}")
    return Result(summary="\n".join(lines), data=data)


def starts(unit: str) -> Iterator[str]:
    """Yield what the starts of a unit wrote, systemd's own words included: the last one, and those that it repeats.

    The last one may say nothing yet, or only that the one before was given up.
    """
    units.sync_journal()
    known = units.properties(unit, "InvocationID", "NRestarts")
    repeated = int(known.get("NRestarts") or 0)
    # systemd forgets the start of a unit that has ended well, or whose failure was reset; the journal does not.
    found = _invocations(unit) if repeated or not known.get("InvocationID") else [known["InvocationID"]]
    words = ["journalctl", "--lines", str(JOURNAL_LINES), "--no-pager", "--output", "cat"]
    for invocation in found[: 1 + min(repeated, MOST_REPEATED)]:
        # The first is what its processes wrote, the second what systemd wrote about them.
        yield _said([*words, f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"])


def _invocations(unit: str) -> list[str]:
    """Return the starts of a unit that its journal's end tells of, the last one first."""
    fields = ("_SYSTEMD_INVOCATION_ID", "INVOCATION_ID")
    words = ["journalctl", "--unit", unit, "--lines", "2000", "--no-pager", "--output", "json"]
    found: dict[str, None] = {}
    for line in reversed(_said([*words, f"--output-fields={','.join(fields)}"]).splitlines()):
        entry = json.loads(line)
        # Of systemd's own lines, the other field is systemd's start.
        name = entry.get("INVOCATION_ID") or entry.get("_SYSTEMD_INVOCATION_ID")
        if isinstance(name, str):
            found[name] = None
    return list(found)


def _judged(replica: str, found: start.Start) -> tuple[Diagnosis | None, str | None]:
    """Return the diagnosis of a replica's last start that says what it died of, or else what else it was."""
    unit = units.unit_of(replica)
    kernel, others = kernel_log(unit), holders(replica, found.part)
    for log in starts(unit):
        seen = diagnosis.diagnose(log, kernel, others, found.plan)
        other = None if seen else diagnosis.other_cause(log)
        if seen or other:
            return seen, other
    seen = diagnosis.diagnose("", kernel, others, found.plan)
    return seen, None if seen else diagnosis.other_cause(kernel)


def kernel_log(unit: str) -> str:
    """Return what the kernel said since the unit was last started, by the wall clock."""
    began = units.properties(unit, "InactiveExitTimestampMonotonic").get("InactiveExitTimestampMonotonic", "")
    words = ["journalctl", "--dmesg", "--no-pager", "--output", "cat"]
    if began.isdigit() and int(began):
        seconds = time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - int(began) / 1e6)
        return _said([*words, f"--since=@{seconds:.0f}"])
    return _said([*words, "--lines", "2000"])


def _said(words: list[str]) -> str:
    try:
        ended = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except FileNotFoundError:
        return ""
    return ended.stdout


def holders(replica: str, part: Mapping[str, Any]) -> list[Holder]:
    """Return who else holds the GPUs of a replica now; empty where there is no driver."""
    report = nvml.probe()
    own = units.unit_of(replica)
    given = part.get("shares") or {}
    found = []
    for gpu in report.gpus if report else ():
        if gpu.index not in part["gpus"]:
            continue
        for one in gpu.processes or ():
            unit = host.unit(one.pid)
            if unit == own:
                continue
            deployment = _deployment_of(unit)
            found.append(
                Holder(
                    gpu=gpu.index,
                    pid=one.pid,
                    gib=None if one.used_bytes is None else one.used_bytes / GIB,
                    program=_program(one.pid),
                    unit=unit,
                    deployment=deployment,
                    part_gib=given.get(deployment),
                )
            )
    return found


def _deployment_of(unit: str | None) -> str | None:
    """Return the deployment that a unit of ours serves."""
    name = (unit or "").removesuffix(".service")
    prefix, _, replica = name.partition("@")
    return replica.rpartition(".")[0] or None if prefix == "gpuready-engine" else None


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
