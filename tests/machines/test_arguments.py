"""The engine's own argument parser on a booted server takes what runs there and refuses a mistake in its own words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sim.machine.machine import Machine

pytestmark = pytest.mark.machine

RELEASE = "/var/lib/gpuready/replicas/chat/0/current"
CHECK = """
import json, sys
from pathlib import Path
sys.path.insert(0, "/opt/gpuready/gpuready.pyz")
from gpuready.serving import arguments
release = Path({release!r}).resolve()
plan = json.loads((release / "plan.json").read_text())
found = arguments.ask(plan, Path({folder!r}), plan["replicas"][0])
print(json.dumps([found.checked, found.version, found.reason, list(found.refused)]))
"""


def asked(machine: Machine, folder: str) -> list[Any]:
    """Return what the engine of deployment chat makes of the serve.yaml in a folder of the machine."""
    found: list[Any] = json.loads(machine.ssh("python3 -", stdin=CHECK.format(release=RELEASE, folder=folder)).stdout)
    return found


def test_the_engines_parser_takes_what_runs(finished: Machine) -> None:
    checked, version, reason, refused = asked(finished, RELEASE)
    assert (checked, reason, refused) == (True, "", [])
    assert version.startswith("0.32.0")


def test_a_mistake_is_refused_in_the_engines_own_words(finished: Machine) -> None:
    folder = "/run/gpuready-arguments"
    copy = f"rm -rf {folder}; cp -rL {RELEASE} {folder}; chown -R root:gpuready-engine {folder}"
    finished.ssh(f"{copy}; printf 'max-num-seqz: 8\\n' >> {folder}/serve.yaml")
    checked, _, _, refused = asked(finished, folder)
    finished.ssh(f"rm -r {folder}")
    assert checked
    assert [(one["flag"], one["near"]) for one in refused] == [("max-num-seqz", "max-num-seqs")]
    assert refused[0]["said"].startswith("unrecognized arguments: --max-num-seqz")
