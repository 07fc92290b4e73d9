"""What every interruption must lead to: one run finishes the job, the server is whole, the next changes nothing."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.machine.common import Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Played, run_playbook

MODEL = "gpuready-sim/tiny-qwen2"
HOST = "h100-sg-01"


@dataclass(frozen=True)
class Declared:
    """What the operator asks for while the interruption happens."""

    extra: Mapping[str, Any] | None = None
    port: int = 8080


class NotWhole(AssertionError):
    """The server is not what one run must have made of it."""


def demand_convergence(sim: Sim, machine: Machine, declared: Declared | None = None) -> Played:
    """Run site.yml once, audit the server, then see that nothing is left to do; return the first run."""
    declared = declared or Declared()
    first = run_playbook(sim, machine, "site.yml playbooks/verify.yml", declared.extra)
    if first.rc:
        raise NotWhole(f"the run after the interruption ended with {first.rc}:\n{first.stdout[-6000:]}")
    if "Traceback (most recent call last)" in first.stdout:
        raise NotWhole(f"the run after the interruption shows a traceback:\n{first.stdout[-6000:]}")
    demand_whole(machine, declared)
    again = run_playbook(sim, machine, "site.yml", declared.extra)
    if again.rc or again.recap[HOST]["changed"]:
        raise NotWhole(f"a further run ended with {again.rc} and changed something:\n{again.stdout[-6000:]}")
    return first


UNWHOLE = "import json, sys; [print(one) for one in json.load(sys.stdin)['data']['{0}s'] if not one['whole']]"
LOOKS = (
    "dpkg --audit; find /var/lib/dpkg/updates -type f; apt-get check -qq 2>&1",
    "find /usr /etc -xdev -name '*.dpkg-new' -o -xdev -name '*.dpkg-tmp'",
    "dpkg --verify haproxy nftables numactl pciutils libnuma1",
    *(f'gpuready {noun} list --json < /dev/null | python3 -c "{UNWHOLE.format(noun)}"' for noun in ("engine", "model")),
    "find /run/gpuready/.trial /run/gpuready/firewall -type f 2>/dev/null",
)
"""What the audit does not ask, as it judges what was declared: each prints what an interruption left half done."""


def demand_whole(machine: Machine, declared: Declared) -> None:
    """See that nothing half done is left, and that a client gets an answer."""
    left = machine.ssh("; ".join(LOOKS), check=False).stdout.strip()
    if left:
        raise NotWhole(f"the server holds what is half done: {left}")
    request = urllib.request.Request(
        f"http://{machine.address}:{declared.port}/v1/chat/completions",
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own test machine
        if json.load(answer)["usage"]["completion_tokens"] != 4:
            raise NotWhole("the gateway's answer is not the four tokens that were asked for")
