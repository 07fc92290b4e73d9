"""The gateway: HAProxy brought to its files, then proved by one token of every deployment through it."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuready.operations import firewall, firewall_rules
from gpuready.operations.machine import Machine
from gpuready.operations.service import Service, bring
from gpuready.outcome import Failed, Failure, Result
from gpuready.serving import units
from gpuready.serving.files import as_json, read_json, write_text
from gpuready.serving.probes import Asked
from gpuready.serving.readiness import NotReady, one_token

UNIT = "gpuready-gateway.service"
RUNTIME = Path("/run/gpuready-gateway")
TOKEN_SECONDS = 30
LIST_SECONDS = 10
PAUSE_SECONDS = 0.5
WILDCARDS = ("", "*", "0.0.0.0")  # noqa: S104 - compared
LOOPBACK = ("127.", "localhost", "::1", "[::1]")
# The gateway is on this server: a proxy that the environment names must not stand between.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Gateway:
    """The gateway of one server; tests set the folders and the machine."""

    plan: Mapping[str, Any]
    runtime: Path = RUNTIME
    machine: Machine = field(default_factory=Machine)

    def apply(self, files: Mapping[str, str], unit_text: str, check: bool) -> Result:
        """Bring the gateway to its files and unit; every deployment must answer through it."""
        gateway = self.plan["gateway"]
        service = Service(
            unit=UNIT,
            unit_text=unit_text,
            folder=Path(gateway["folder"]),
            files=files,
            runtime=self.runtime,
            # Not -q: it keeps the reasons back, too.
            check_words=("haproxy", "-c", "-f"),
            main_file="haproxy.cfg",
        )
        result = bring(service, check)
        if check and result.changed:
            result.undecided.append("whether every deployment answers through the gateway")
        notes = [] if check else self._prove(service.digest, result.changed)
        notes += self._closed()
        result.data["notes"] = notes
        result.summary = "; ".join([result.summary, *notes])
        return result

    @property
    def _door(self) -> tuple[str, int]:
        return reachable(self.plan["gateway"]["bind"]), int(self.plan["gateway"]["port"])

    def _prove(self, digest: str, changed: bool) -> list[str]:
        """Ask for a token where this configuration has not given one yet; return what could not be proved now.

        The record lies in the unit's runtime folder, so it ends with the process that it speaks of.
        """
        record = self.runtime / "proved.json"
        known = read_json(record) or {}
        # What a run changed is proved anew, for every deployment.
        proved = set() if changed or known.get("files") != digest else set(known.get("deployments", []))
        wanted = [one for one in self.plan["deployments"] if one["name"] not in proved]
        notes = []
        if len(wanted) < len(self.plan["deployments"]) or not wanted:
            notes += self._answers()
        for deployment in wanted:
            busy = self._one_token(deployment)
            if busy:
                notes.append(busy)
            else:
                proved.add(deployment["name"])
        if wanted:
            write_text(record, as_json({"files": digest, "deployments": sorted(proved)}))
        return notes

    def _answers(self) -> list[str]:
        """Ask for the list of models, which HAProxy answers itself."""
        address, port = self._door
        try:
            with _DIRECT.open(f"http://{address}:{port}/v1/models", timeout=LIST_SECONDS) as answer:
                json.load(answer)
        except (OSError, ValueError) as error:
            if _is_timeout(error):
                return [f"the gateway is busy: no list of models within {LIST_SECONDS} s"]
            what = f"the gateway ({address}:{port}) does not answer /v1/models"
            raise Failed(Failure("gateway.no_answer", what, str(error), f"see journalctl -u {UNIT}")) from error
        return []

    def _one_token(self, deployment: Mapping[str, Any]) -> str:
        """Have a deployment give one token through the gateway; return why that is not known now, when it is busy.

        Raises:
            Failed: when it does not, and being busy does not explain it.
        """
        address, port = self._door
        name = deployment["name"]
        asked = Asked(port, deployment["model"], deployment.get("task", "generate"), address)
        end = time.monotonic() + TOKEN_SECONDS
        while True:
            try:
                one_token(asked)
            except NotReady as error:
                seen = error
            else:
                return ""
            if time.monotonic() > end:
                break
            time.sleep(PAUSE_SECONDS)
        if is_busy(seen) and self._runs(deployment):
            return (
                f"{name} is busy and gave no token through the gateway within {TOKEN_SECONDS} s ({seen}); "
                "its engine's unit is active and the next run asks again"
            )
        what = f"{name} does not answer through the gateway ({address}:{port})"
        fix = f"the gateway runs; see journalctl -u {UNIT} and gpuready deployment status"
        raise Failed(Failure("gateway.no_token", what, str(seen), fix)) from seen

    def _runs(self, deployment: Mapping[str, Any]) -> bool:
        replicas = [units.unit_of(f"{deployment['name']}.{one['index']}") for one in deployment["replicas"]]
        return any(units.properties(unit, "ActiveState").get("ActiveState") == "active" for unit in replicas)

    def _closed(self) -> list[str]:
        """Say when our packet filter is in place and does not let anybody in to the gateway's port."""
        bind, port = self.plan["gateway"]["bind"], int(self.plan["gateway"]["port"])
        if bind.startswith(LOOPBACK) or self.machine.read(firewall.FILE) is None:
            return []
        listed = self.machine.run(["nft", "--stateless", "list", "table", *firewall_rules.TABLE.split()])
        if listed.code != 0 or is_open(listed.out, port):
            return []
        return [
            f"port {port} is closed by the packet filter, so only this server itself reaches the gateway; "
            "the stage base opens it: ansible-playbook playbooks/base.yml"
        ]


def apply(plan: Mapping[str, Any], files: Mapping[str, str], unit_text: str, check: bool) -> Result:
    """Bring this server's gateway to its files and unit."""
    return Gateway(plan).apply(files, unit_text, check)


def reachable(bind: str) -> str:
    """Return the address, as it stands in a URL, at which this server reaches what it binds."""
    if bind in WILDCARDS:
        return "127.0.0.1"
    if bind in ("::", "[::]"):
        return "[::1]"
    return f"[{bind}]" if ":" in bind and not bind.startswith("[") else bind


def is_busy(error: NotReady) -> bool:
    """Say whether an answer, or its lack, is what a server under load gives."""
    cause = error.__cause__
    if isinstance(cause, urllib.error.HTTPError):
        return cause.code in (429, 503, 504)
    return _is_timeout(cause)


def _is_timeout(error: BaseException | None) -> bool:
    return isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)


def is_open(table: str, port: int) -> bool:
    """Say whether a table, as nft lists it, accepts TCP to a port, from everywhere or from some."""
    for ports in re.findall(r"\btcp dport (\{[^}]*\}|\S+)(?: counter(?: packets \d+ bytes \d+)?)? accept\b", table):
        for one in ports.strip("{} ").split(","):
            first, _, last = one.strip().partition("-")
            if first.isdigit() and int(first) <= port <= int(last or first):
                return True
    return False
