"""One server as the tests see it: what it said, and sentences about what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TOLD = 4


@dataclass(frozen=True)
class Server:
    """What a server said of itself; `snapshot` is what tests/verify/probe returns."""

    name: str
    snapshot: dict[str, Any]

    @property
    def plan(self) -> dict[str, Any]:
        """Return the recorded plan."""
        self.demand_answer()
        return dict(self.snapshot["plan"])

    @property
    def run_site(self) -> str:
        """Return what mends most things."""
        return f"run ansible-playbook site.yml -l {self.name}"

    def demand_answer(self) -> None:
        """Fail where the server cannot be judged at all."""
        if why := self.snapshot.get("unreachable"):
            pytest.fail(str(why), pytrace=False)
        if why := self.snapshot.get("refused"):
            self.fail(why, "a finished server, seen by root")

    def topic(self, name: str) -> Any:
        """Return what the server said on one topic; what is unknown fails, it is never good."""
        self.demand_answer()
        said = self.snapshot["topics"][name]
        if isinstance(said, dict) and "unknown" in said:
            self.fail(f"{name} could not be read ({said['unknown']})", "an answer", "look at it on the server")
        return said

    def recorded(self, key: str) -> Any:
        """Return one of the recorded settings of the host."""
        self.demand_answer()
        host = self.snapshot["host"]
        if not isinstance(host, dict) or key not in host:
            self.fail(f"/var/lib/gpuready/host.json does not tell {key}", "the record of the host's settings")
        return host[key]

    def fail(self, found: str, expected: str, step: str = "") -> NoReturn:
        """Say in one sentence what was found, what was expected and what to do."""
        pytest.fail(f"host {self.name}: {found}, expected {expected}; {step or self.run_site}.", pytrace=False)

    def demand(self, findings: Iterable[str], expected: str, step: str = "") -> None:
        """Fail where there is any finding."""
        found = list(findings)
        more = f" and {len(found) - TOLD} more" if len(found) > TOLD else ""
        if found:
            self.fail(", ".join(found[:TOLD]) + more, expected, step)


def ask(names: Sequence[str], inventory: str | None) -> dict[str, dict[str, Any]]:
    """Have Ansible ask all servers at once, with the connection that the inventory declares."""
    with tempfile.TemporaryDirectory(prefix="gpuready-verify-") as folder:
        source = ["-i", inventory] if inventory else []
        words = ["-m", "gpuready_verify", "-a", '{"judge": false}', "--become", "--tree", folder]
        done = subprocess.run(
            [str(Path(sys.executable).parent / "ansible"), *source, ":".join(names), *words],
            env={"ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), **os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return {name: _answer(Path(folder) / name, done) for name in names}


def _answer(path: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if not path.exists():
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        return {"refused": f"Ansible did not ask it ({last.rstrip('.')})"}
    answer = json.loads(path.read_text(encoding="utf-8"))
    if "snapshot" in answer:
        return dict(answer["snapshot"])
    said = str(answer.get("msg", "no word")).removeprefix("Task failed: ")
    return {"unreachable": said} if answer.get("unreachable") else {"refused": f"Ansible failed ({said.rstrip('.')})"}
