"""Generated inventories against a booted server: the right ones are planned, the wrong ones change nothing on it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sim.machine.common import CHECKOUT
from tests.inventories import generate
from tests.inventories.case import Case
from tests.inventories.right import STYLES, Right
from tests.inventories.right import generate as generate_right
from tests.machines.conftest import Played, invocation, played

if TYPE_CHECKING:
    from sim.machine.common import Sim
    from sim.machine.machine import Machine

pytestmark = pytest.mark.machine

# All that a stage could leave: files, packages, users, listening sockets, units, kernel parameters.
STATE = """
for what in "dpkg-query -W" "getent passwd" "getent group" "ss -lntuH" "nft list ruleset" \
    "sysctl -n net.core.somaxconn vm.swappiness" \
    "systemctl list-unit-files --no-legend --state=enabled,disabled,masked"
do echo "$what: $($what 2>&1 | sha256sum)"; done
find /etc /opt /srv /usr /var/lib/gpuready /var/cache/gpuready -xdev -type f -printf '%p %s %T@\\n' 2>/dev/null \
    | grep -v -e __pycache__ -e /etc/.updated | sort | sha256sum
"""
KNOBS = re.compile(r"(base|gateway|engines)_|gpuready_replan|unrelated")


def for_the_simulation(one: Right) -> bytes:
    """Return a right host's file for a simulated server: its knobs and style, with what such a server serves."""
    (deployment, *_) = one.variables["gpuready_deployments"]
    served = {**deployment, "model": "gpuready-sim/tiny-qwen2", "gpus": 1, "flags": {"max_num_seqs": 4}}
    # What lies in folders of a real server, and in memory that this machine may not have.
    for name in ("model_path", "draft", "kv_offload_gib"):
        served.pop(name, None)
    values = {name: value for name, value in one.variables.items() if KNOBS.match(name)}
    values |= {"gpuready_gpu_model": "h100", "gpuready_gpu_count": "8", "gpuready_simulated": True}
    return STYLES[one.style]({**values, "gpuready_stack": "cpu", "gpuready_deployments": [served]})


def run(sim: Sim, machine: Machine, files: dict[str, bytes]) -> Played:
    """Run preflight on one machine under several names, each with its own file of variables."""
    hosts = {re.split(r"[./]", name)[0]: machine for name in files}
    # One sshd is asked for all of them, and from its tenth half-open connection on it drops some at random.
    with invocation(sim, hosts, "playbooks/preflight.yml", None, "--forks", "5") as (argv, env):
        for name, content in files.items():
            path = Path(argv[2]) / "host_vars" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        started = time.monotonic()
        done = subprocess.run(
            argv, cwd=CHECKOUT, env=env, capture_output=True, encoding="utf-8", timeout=600, check=False
        )
    return played(done.returncode, done.stdout + done.stderr, started)


def is_refused_before_the_server_is_asked(case: Case) -> bool:
    """Return whether a declaration cannot even be read, so that nothing is said about the server beside it."""
    of_the_plan = case.key.startswith(("deployment", "environment."))
    return not case.evaluated and "is refused" in case.says and not of_the_plan


def test_right_and_wrong_inventories_on_a_booted_server(sim: Sim, blank: Machine) -> None:
    right: list[Any] = [one for one in generate_right(generate.SEED) if one.style != "templates"][:12]
    wrong = [case for case in generate.of_one_host() if is_refused_before_the_server_is_asked(case)][::9][:20]
    assert len({one.style for one in right}) == len(STYLES) - 1
    assert len({case.kind for case in wrong}) >= 10
    before = blank.ssh(STATE).stdout
    good = run(sim, blank, {f"h100-sg-{n:02}{one.ending}": for_the_simulation(one) for n, one in enumerate(right)})
    assert good.rc == 0, good.stdout
    assert len(good.recap) == len(right)
    for number, one in enumerate(right):
        assert f"h100-sg-{number:02}: {one.variables['gpuready_deployments'][0]['name']}:" in good.stdout
    bad = run(sim, blank, {f"h100-sg-{n:02}.yml": case.text.encode() for n, case in enumerate(wrong)})
    assert bad.rc == 2, bad.stdout
    for number, case in enumerate(wrong):
        said = [line for line in bad.stdout.splitlines() if f"host h100-sg-{number:02}, " in line]
        assert any(case.key in line and all(words in line for words in case.says) for line in said), (case, said)
        assert bad.recap[f"h100-sg-{number:02}"]["failed"] == 1
        assert bad.recap[f"h100-sg-{number:02}"]["changed"] == 0
    assert "Traceback" not in good.stdout + bad.stdout
    assert blank.ssh(STATE).stdout == before
