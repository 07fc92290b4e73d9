"""The packet filter: one nftables table of our own, put in place so that SSH is never lost.

`apply` loads new rules for a trial: a timer of systemd brings the former ones back unless `confirm` is called
over a connection that was opened under the new rules. /etc/gpuready/firewall.nft, which the boot unit loads, is
written by `confirm` alone, so a crash or a reboot during the trial also ends with the former rules. No other
table is ever touched.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import Any

from gpuready.operations.firewall_rules import CLEAR, TABLE, UNIT, Wanted, render
from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Failed, Failure, MachineCannot, Refusal, Result

FILE = "/etc/gpuready/firewall.nft"
RECORD = "/var/lib/gpuready/firewall.json"
"""What was confirmed: the rules as the kernel lists them, so that a change by hand is seen."""

TRIAL = "/run/gpuready/firewall"
PENDING = f"{TRIAL}/pending.nft"
PENDING_STATE = f"{TRIAL}/pending.json"
FORMER = f"{TRIAL}/former.nft"

REVERT = "gpuready-firewall-revert"


# ------------------------------------------------------------------------------------------------ the way of SSH


def sshd_ports(machine: Machine) -> set[int]:
    """Return the ports on which sshd listens, and the one through which this very call came."""
    ports: set[int] = set()
    for line in machine.run(["sshd", "-T"]).out.splitlines():
        found = re.fullmatch(r"port (\d+)|listenaddress \S*:(\d+)", line.strip().lower())
        if found:
            ports.add(int(found.group(1) or found.group(2)))
    came_through = _session(machine).port
    return ports | {came_through} if came_through else ports


@dataclass
class _Session:
    """The SSH session that we run in; nothing is set on a console or over a local connection."""

    port: int | None = None
    started: float | None = None
    """Seconds after boot at which the connection was opened."""


def _session(machine: Machine) -> _Session:
    """Walk up the processes that started us: the shell of a session knows the port, sshd its age."""
    session = _Session()
    pid = os.getpid()
    while pid > 1:
        stat = machine.read(f"/proc/{pid}/stat")
        if stat is None:
            break
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat[stat.rindex(")") + 2 :].split()
        if name.startswith("sshd"):
            session.started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            break
        environment = _environment(machine, pid)
        found = re.search(r"(?:^|\0)SSH_CONNECTION=\S+ \d+ \S+ (\d+)(?:\0|$)", environment)
        if found and session.port is None:
            session.port = int(found.group(1))
        pid = int(fields[1])
    return session


def _environment(machine: Machine, pid: int) -> str:
    try:
        return machine.read(f"/proc/{pid}/environ") or ""
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------ apply


@dataclass
class _Now:
    """What there is before anything is done."""

    file: str | None
    table: str | None
    record: dict[str, Any] = field(default_factory=dict)
    pending: bool = False
    boots: bool = False

    def settled(self, text: str) -> bool:
        """Return whether the rules are confirmed, on disk and in the kernel."""
        return (
            not self.pending
            and self.file == text == self.record.get("file")
            and self.table is not None
            and self.table == self.record.get("table")
        )


def apply(machine: Machine, wanted: Wanted, check: bool) -> Result:
    """Put the rules on trial; `data.confirm` says that `confirm` has to follow, else they are taken back."""
    text = render(wanted, {*wanted.ssh_ports, *sshd_ports(machine)})
    has_nft = machine.which("nft") is not None
    if not has_nft and not check:
        raise MachineCannot(Failure("firewall.no_nft", "nft is not installed", "", "install the package nftables"))
    now = _look(machine) if has_nft else _Now(machine.read(FILE), None)
    if has_nft:
        _validate(machine, text)
    result = Result(data={"confirm": False, "revert_seconds": wanted.revert_seconds})
    if now.settled(text):
        if now.boots:
            result.summary = "the packet filter is as declared"
            return result
        result.changed = True
        result.diff.append(Change(UNIT, "not active and enabled\n", "active and enabled\n"))
        result.summary = f"the packet filter is as declared; {UNIT} {'would be' if check else 'is'} started and enabled"
        if not check:
            _boot_with_it(machine)
        return result
    result.changed = True
    result.diff = _changes(now, text)
    if check:
        if not has_nft:
            result.undecided.append("whether nft takes the packet filter's rules")
        result.summary = "the packet filter would be changed"
        return result
    if now.pending:
        _take_back(machine)
        now = _look(machine)
    _trial(machine, text, now, wanted.revert_seconds)
    result.data["confirm"] = True
    result.summary = (
        f"the packet filter is on trial; it is taken back in {wanted.revert_seconds} seconds unless it is confirmed"
    )
    return result


def _changes(now: _Now, text: str) -> list[Change]:
    changes = []
    if now.file != text:
        changes.append(Change(FILE, now.file or "", text))
    recorded = str(now.record.get("table", ""))
    if now.file == text and now.table != recorded:
        changes.append(Change(f"table {TABLE}, as the kernel has it", now.table or "", recorded))
    if not changes:
        changes.append(Change(f"table {TABLE}", "not confirmed\n", "confirmed\n"))
    return changes


def _look(machine: Machine) -> _Now:
    try:
        record = json.loads(machine.read(RECORD) or "{}")
    except ValueError:
        record = {}
    states = (
        machine.run(["systemctl", "is-active", UNIT]).out.strip(),
        machine.run(["systemctl", "is-enabled", UNIT]).out.strip(),
    )
    return _Now(
        file=machine.read(FILE),
        table=_table(machine),
        record=record if isinstance(record, dict) else {},
        pending=machine.read(PENDING) is not None,
        boots=states == ("active", "enabled"),
    )


def _table(machine: Machine) -> str | None:
    """Return our table as the kernel has it, without counters; None where there is none."""
    done = machine.run(["nft", "--stateless", "list", "table", *TABLE.split()])
    if done.code == 0:
        return done.out
    if "No such file or directory" in done.err:
        return None
    raise MachineCannot(Failure("firewall.nft", "nft cannot read the packet filter of this machine", done.complaint))


def _validate(machine: Machine, text: str) -> None:
    draft = f"{TRIAL}/draft.nft"
    machine.write(draft, text, 0o600)
    done = machine.run(["nft", "--check", "--file", str(machine.path(draft))])
    machine.remove(draft)
    if done.code:
        raise Refusal(
            Failure("firewall.invalid", "nft refuses the rules", done.complaint, "the packet filter is as it was")
        )


def _trial(machine: Machine, text: str, now: _Now, seconds: int) -> None:
    """Arm the way back first, then load; whatever ends us in between, the former rules return."""
    machine.write(FORMER, CLEAR + (now.table or ""), 0o600)
    machine.write(PENDING, text, 0o600)
    former, pending = str(machine.path(FORMER)), str(machine.path(PENDING))
    # Should even the former rules not load any more, the table is removed: reachable beats closed.
    script = (
        f"nft --file {former} || nft delete table {TABLE}; rm -f {pending}; "
        "echo 'The packet filter was not confirmed in time; the former rules are back.'"
    )
    armed = machine.run([
        "systemd-run", "--quiet", "--collect", f"--unit={REVERT}", f"--on-active={seconds}",
        "--timer-property=AccuracySec=100ms", "--description=Take back the packet filter's rules on trial",
        "--", "/bin/sh", "-c", script,
    ])  # fmt: skip
    active = machine.run(["systemctl", "is-active", f"{REVERT}.timer"]).out.strip()
    if armed.code or active != "active":
        _disarm(machine)
        machine.remove(PENDING)
        why = armed.complaint if armed.code else f"{REVERT}.timer is {active}"
        what = "the packet filter was left as it is, because its way back could not be armed"
        raise MachineCannot(Failure("firewall.not_armed", what, why))
    loaded = machine.run(["nft", "--file", pending])
    if loaded.code:
        _take_back(machine)
        raise Failed(
            Failure("firewall.not_loaded", "nft did not load the rules, the former ones are in place", loaded.complaint)
        )
    state = {"table": _table(machine), "loaded": time.clock_gettime(time.CLOCK_BOOTTIME)}
    machine.write(PENDING_STATE, json.dumps(state), 0o600)


def _disarm(machine: Machine) -> None:
    machine.run(["systemctl", "stop", f"{REVERT}.timer", f"{REVERT}.service"])
    machine.run(["systemctl", "reset-failed", f"{REVERT}.service"])


def _take_back(machine: Machine) -> None:
    """End a trial: the former rules, as the timer would have brought them."""
    _disarm(machine)
    back = machine.run(["nft", "--file", str(machine.path(FORMER))])
    if back.code and _table(machine) is not None:
        machine.run(["nft", "delete", "table", *TABLE.split()])
    for path in (PENDING, PENDING_STATE):
        machine.remove(path)


# ------------------------------------------------------------------------------------------------ confirm


def confirm(machine: Machine, check: bool) -> Result:
    """Keep the rules on trial: called over a connection that was opened under them, which proves that SSH works."""
    text = machine.read(PENDING)
    state = json.loads(machine.read(PENDING_STATE) or "{}")
    if text is None or not state:
        what = "there are no rules on trial: they were taken back before they were confirmed, or never loaded"
        raise Failed(Failure("firewall.nothing_pending", what, "", "apply them again"))
    opened = _session(machine).started
    if opened is not None and opened < float(state["loaded"]):
        what = "the packet filter is not confirmed: this SSH connection is older than the rules, so it proves nothing"
        raise Refusal(
            Failure("firewall.old_connection", what, "", "confirm over a new connection, else the former rules return")
        )
    if check:
        return Result(changed=True, summary="the packet filter's rules would be kept")
    _disarm(machine)
    table = _table(machine)
    if machine.read(PENDING) is None or table is None or table != state["table"]:
        _take_back(machine)
        what = "the rules on trial were changed or taken back meanwhile; the former ones are in place"
        raise Failed(Failure("firewall.trial_over", what, "", "apply them again"))
    machine.write(FILE, text)
    machine.write(RECORD, json.dumps({"file": text, "table": table}))
    for path in (PENDING, PENDING_STATE, FORMER):
        machine.remove(path)
    _boot_with_it(machine)
    return Result(changed=True, summary="the packet filter's rules are kept, now and at boot")


def _boot_with_it(machine: Machine) -> None:
    done = machine.run(["systemctl", "enable", "--now", UNIT])
    if done.code:
        what = f"the packet filter is in place now, but {UNIT} would not load it at boot"
        raise Failed(Failure("firewall.boot", what, done.complaint, f"see `systemctl status {UNIT}`"))
