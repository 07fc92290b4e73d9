"""Settings of the host: small files, kernel parameters, the clock."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Failed, Failure, Refusal, Result

MANAGED = "# Written by gpuready; a change made here by hand is lost on the next run."

# ------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class File:
    """A small file to be placed."""

    path: str
    content: str
    mode: str = "0644"
    validate: Sequence[str] = ()
    """A program that parses the file before it lands; `%s` stands for it. Skipped where it is not installed."""


def place_files(machine: Machine, files: Iterable[File], check: bool) -> Result:
    """Place every file whose text or mode differs; all are validated before the first one lands."""
    result = Result()
    pending: list[File] = []
    problems: list[Failure] = []
    for file in files:
        now = machine.read(file.path)
        mode = machine.path(file.path).stat().st_mode & 0o7777 if now is not None else None
        if now == file.content and mode == int(file.mode, 8):
            continue
        pending.append(file)
        before = now or ""
        if now == file.content:
            result.diff.append(Change(file.path, f"mode {mode:04o}\n", f"mode {file.mode}\n"))
        else:
            result.diff.append(Change(file.path, before, file.content))
        problems.extend(_problems_of(machine, file))
    if problems:
        raise Refusal(problems)
    result.changed = bool(pending)
    names = ", ".join(file.path for file in pending)
    if check:
        result.summary = f"would place {names}" if pending else "every file is as declared"
        return result
    for file in pending:
        machine.write(file.path, file.content, int(file.mode, 8))
    if any(file.path.startswith("/etc/systemd/system/") for file in pending):
        reload = machine.run(["systemctl", "daemon-reload"])
        if reload.code:
            raise Failed(
                Failure("files.reload", f"{names} placed, but systemd did not read its units again", reload.complaint)
            )
    result.summary = f"placed {names}" if pending else "every file is as declared"
    return result


def _problems_of(machine: Machine, file: File) -> list[Failure]:
    if not file.validate or machine.which(file.validate[0]) is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / Path(file.path).name
        draft.write_text(file.content, encoding="utf-8")
        verdict = machine.run([str(draft) if word == "%s" else word for word in file.validate])
    if verdict.code == 0:
        return []
    why = verdict.complaint.replace(str(draft), file.path)
    return [Failure("files.invalid", f"{file.path} does not pass {file.validate[0]}", why, "no file was changed")]


# ------------------------------------------------------------------------------------------------ sysctl

SYSCTL_FILE = "/etc/sysctl.d/60-gpuready.conf"
SYSCTL_FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d")
_KEY = re.compile(r"[A-Za-z0-9_]+([./][A-Za-z0-9_-]+)+")
_NOT_HERE = {
    errno.ENOENT: "this kernel does not have it",
    errno.EACCES: "this machine may not write it",
    errno.EPERM: "this machine may not write it",
    errno.EROFS: "it is read-only here",
}


@dataclass(frozen=True)
class Setting:
    """One kernel parameter, with the reason that the file tells."""

    key: str
    value: str
    reason: str


def sysctl_file(settings: Iterable[Setting]) -> str:
    """Return the text of our sysctl file: each parameter under its reason."""
    parts = [MANAGED]
    for setting in settings:
        comment = "\n".join(f"# {line}" for line in setting.reason.strip().splitlines())
        parts.append(f"{comment}\n{setting.key} = {setting.value}" if comment else f"{setting.key} = {setting.value}")
    return "\n\n".join(parts) + "\n"


def set_parameters(machine: Machine, settings: Sequence[Setting], check: bool) -> Result:
    """Place the file always; apply each parameter where the kernel allows it, and say where it does not.

    A parameter that another file sets after ours at boot is left to that file.
    """
    _refuse_bad_settings(settings)
    result = place_files(machine, [File(SYSCTL_FILE, sysctl_file(settings))], check)
    others = _set_after_ours(machine)
    applied: list[str] = []
    not_here: dict[str, str] = {}
    left: dict[str, str] = {}
    for setting in settings:
        where = others.get(setting.key)
        if where is not None:
            left[setting.key] = where
            continue
        now, reason = _read_parameter(machine, setting.key)
        if now == plain(setting.value):
            continue
        reason = reason or _write_parameter(machine, setting, check)
        if reason:
            not_here[setting.key] = reason
            continue
        applied.append(setting.key)
        result.diff.append(Change(f"sysctl {setting.key}", f"{now}\n", f"{plain(setting.value)}\n"))
    result.changed = result.changed or bool(applied)
    result.data = {"applied": applied, "not_applied": not_here, "left": left}
    notes = [f"{'would set' if check else 'set'} {', '.join(applied)}" if applied else "no kernel parameter changed"]
    notes += [f"not applied here: {keys} ({reason})" for reason, keys in _by_value(not_here)]
    notes += [f"left to {where}, which is read after ours: {keys}" for where, keys in _by_value(left)]
    result.summary = "; ".join(notes)
    return result


def _refuse_bad_settings(settings: Sequence[Setting]) -> None:
    problems = []
    for setting in settings:
        if not _KEY.fullmatch(setting.key):
            problems.append(Failure("sysctl.key", f"base_sysctl: {setting.key!r} is not a kernel parameter's name"))
        if "\n" in setting.value or not setting.value.strip():
            problems.append(Failure("sysctl.value", f"base_sysctl: {setting.key} has no value in one line"))
    if problems:
        raise Refusal(problems)


def _by_value(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Return each value once, with all its keys."""
    return [(value, ", ".join(key for key in texts if texts[key] == value)) for value in dict.fromkeys(texts.values())]


def plain(value: str) -> str:
    """Return a parameter's value as the kernel is compared with it: white space does not count."""
    return " ".join(value.split())


def _parameter_path(machine: Machine, key: str) -> Path:
    # As sysctl does it: the first separator decides which of the two is the separator.
    first = re.search(r"[./]", key)
    parts = key if first and first.group() == "/" else key.translate(str.maketrans("./", "/."))
    return machine.path(f"/proc/sys/{parts}")


def _read_parameter(machine: Machine, key: str) -> tuple[str, str]:
    """Return the value now, and why it cannot be read."""
    try:
        return plain(_parameter_path(machine, key).read_text(encoding="utf-8")), ""
    except OSError as error:
        return "", _NOT_HERE.get(error.errno or 0, os.strerror(error.errno or 0))


def _write_parameter(machine: Machine, setting: Setting, check: bool) -> str:
    """Set one parameter and read it back; return why that is not possible here."""
    path = _parameter_path(machine, setting.key)
    try:
        # Opening for writing tells what is not allowed here, under --check too, and changes nothing.
        os.close(os.open(path, os.O_WRONLY))
        if check:
            return ""
        path.write_text(f"{setting.value}\n", encoding="utf-8")
    except OSError as error:
        if error.errno in _NOT_HERE:
            return _NOT_HERE[error.errno]
        what = f"kernel parameter {setting.key} does not take {setting.value!r}"
        fix = f"correct base_sysctl; {SYSCTL_FILE} is placed, the parameter is as it was"
        raise Failed(Failure("sysctl.rejected", what, os.strerror(error.errno or 0), fix)) from error
    now, _ = _read_parameter(machine, setting.key)
    if now != plain(setting.value):
        what = f"kernel parameter {setting.key} was set to {setting.value!r} and reads {now!r}"
        raise Failed(Failure("sysctl.not_kept", what, "", "set in base_sysctl a value that this kernel keeps"))
    return ""


def _set_after_ours(machine: Machine) -> dict[str, str]:
    """Return the keys that files read after ours set at boot, and the last file that does."""
    ours = Path(SYSCTL_FILE).name
    files: dict[str, str] = {}
    for folder in reversed(SYSCTL_FOLDERS):
        where = machine.path(folder)
        if where.is_dir():
            files.update(
                {entry.name: f"{folder}/{entry.name}" for entry in where.iterdir() if entry.name.endswith(".conf")}
            )
    keys: dict[str, str] = {}
    for name in sorted(files):
        if name <= ours:
            continue
        for line in (machine.read(files[name]) or "").splitlines():
            key, equals, _ = line.strip().lstrip("-").partition("=")
            if equals and not key.startswith(("#", ";")):
                keys[key.strip().replace("/", ".")] = files[name]
    return keys


# ------------------------------------------------------------------------------------------------ time

CLOCK_UNITS = {
    "chrony.service": "chrony",
    "chronyd.service": "chrony",
    "ntpsec.service": "ntpsec",
    "ntp.service": "ntp",
    "openntpd.service": "openntpd",
    "systemd-timesyncd.service": "systemd-timesyncd",
}
CLOCK_PACKAGE = "systemd-timesyncd"


AT_BOOT_NO = ("disabled", "enabled-runtime")
"""States of a unit that the next boot does not start and that can be enabled; a static or alias one has its reasons."""


def keep_time(machine: Machine, check: bool) -> Result:
    """Adopt the time service that is active; start one that is installed; else name the package that is missing."""
    units = list(CLOCK_UNITS)
    listed = machine.run(["systemctl", "list-unit-files", "--no-legend", "--no-pager", *units]).out
    installed = {fields[0]: fields[1] for line in listed.splitlines() if len(fields := line.split()) >= 2}
    states = machine.run(["systemctl", "is-active", *units]).out.split()
    for unit, state in zip(units, states):  # noqa: B905 - Python 3.10 reads it, and systemctl answers once per unit
        if state == "active":
            return _adopt_clock(machine, unit, installed.get(unit, ""), check)
    usable = [unit for unit in units if installed.get(unit, "masked") not in ("masked", "alias")]
    if not usable:
        note = "no time service is installed"
        return Result(
            summary=note, data={"daemon": None, "unit": None, "active": False, "install": [CLOCK_PACKAGE], "note": note}
        )
    unit = usable[0]
    return _start_clock(machine, unit, enabled=installed[unit] == "enabled", check=check)


def _adopt_clock(machine: Machine, unit: str, state: str, check: bool) -> Result:
    """Keep the service that is active, at the next boot too."""
    name = CLOCK_UNITS[unit]
    data = {"daemon": name, "unit": unit, "active": True, "install": []}
    result = Result(summary=f"time is kept by {name}", data=data)
    if state not in AT_BOOT_NO:
        return result
    result.changed = True
    result.diff.append(Change(unit, f"{state}\n", "enabled\n"))
    if not check:
        enabled = machine.run(["systemctl", "enable", unit])
        if enabled.code:
            what = f"{name} keeps the time and could not be enabled for the next boot"
            fix = f"see `systemctl status {unit}`; a wrong clock breaks TLS and the order of logs"
            raise Failed(Failure("time.not_enabled", what, enabled.complaint, fix))
    return result


def _start_clock(machine: Machine, unit: str, *, enabled: bool, check: bool) -> Result:
    name = CLOCK_UNITS[unit]
    container = machine.run(["systemd-detect-virt", "--container"])
    result = Result(data={"daemon": name, "unit": unit, "active": False, "install": []})
    if not enabled:
        result.changed = True
        result.diff.append(Change(unit, "disabled\n", "enabled\n"))
    if container.code == 0:
        note = f"{name} is installed and cannot run here: a container ({container.out.strip()}) has its host's clock"
        result.data["note"] = note
        result.summary = note
    else:
        result.changed = True
        result.diff.append(Change(unit, "inactive\n", "active\n"))
        result.summary = f"time {'would be' if check else 'is'} kept by {name}"
    if check or not result.changed:
        return result
    started = machine.run(["systemctl", "enable", *([] if container.code == 0 else ["--now"]), unit])
    if container.code != 0:
        active = machine.run(["systemctl", "is-active", unit]).out.strip()
        if started.code or active != "active":
            what = f"{name} is installed and does not run"
            why = started.complaint if started.code else f"{unit} is {active}"
            fix = f"see `journalctl -u {unit}`; a wrong clock breaks TLS and the order of logs"
            raise Failed(Failure("time.not_running", what, why, fix))
        result.data["active"] = True
    return result
