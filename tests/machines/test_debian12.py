"""The second server of inventories/sim, a100-la-01: Debian 12, A100, CUDA under NVIDIA's names, the same site.yml."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from sim.machine.common import CHECKOUT
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, Play

pytestmark = pytest.mark.machine

HOST = "a100-la-01"
BLANK = "dpkg-query -W | sha256sum; ls -d /opt/gpuready /etc/gpuready /var/lib/gpuready; getent passwd | sha256sum"


def ask(machine: Machine, path: str, body: dict[str, Any] | None = None) -> Any:
    code = (
        "import json,sys,urllib.request as u;"
        "print(u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode() or None,"
        "{'Content-Type': 'application/json'}), timeout=60).read().decode())"
    )
    sent = "" if body is None else json.dumps(body)
    return json.loads(machine.ssh(["python3", "-c", code, f"http://127.0.0.1:8080{path}", sent]).stdout)


def test_debians_own_toolkit_is_refused_by_name_before_any_change(machines: Factory, play: Play) -> None:
    blank = machines("bookworm-blank", suite="bookworm")
    before = blank.ssh(BLANK, check=False).stdout
    own = {"cuda_source": "debian", "cuda_packages": ["nvidia-cuda-toolkit"]}
    played = play(blank, "site.yml", own)
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert f"host {HOST}, " in said
    assert "a100-la.yml:7, gpuready_stack = 'cpu' takes CUDA 12.4 from Debian's own archive" in said
    assert "the archive of debian 12 holds 11.8" in said
    assert "set cuda_source: configured and cuda_packages to NVIDIA's names" in said
    # As declared, and without the repository that the operator must add.
    played = play(blank, "site.yml")
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert "no package source of the server offers cuda-toolkit-12-4; add NVIDIA's CUDA repository" in said
    assert blank.ssh(BLANK, check=False).stdout == before
    machines.give_back(blank)


@pytest.mark.long
def test_a_chat_answer_comes_through_the_gateway(finished_bookworm: Machine) -> None:
    model = ask(finished_bookworm, "/v1/models")["data"][0]["id"]
    question = {"model": model, "messages": [{"role": "user", "content": "Which GPU?"}], "max_tokens": 8}
    answer = ask(finished_bookworm, "/v1/chat/completions", question)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.long
def test_the_second_run_changes_nothing_and_check_mode_is_silent(finished_bookworm: Machine, play: Play) -> None:
    again = play(finished_bookworm)
    assert again.rc == 0, again.stdout
    assert (again.recap[HOST]["changed"], again.recap[HOST]["failed"]) == (0, 0), again.stdout
    checked = play(finished_bookworm, "site.yml", None, "--check", "--diff")
    assert checked.rc == 0, checked.stdout
    assert checked.recap[HOST]["changed"] == 0
    assert "+++ after" not in checked.stdout


@pytest.mark.long
def test_it_is_what_it_is_declared_to_be(finished_bookworm: Machine) -> None:
    assert "VERSION_CODENAME=bookworm" in finished_bookworm.ssh(["cat", "/etc/os-release"]).stdout
    versions = finished_bookworm.ssh(["dpkg-query", "-Wf", "${Package} ${Version}\\n"]).stdout.splitlines()
    assert "cuda-toolkit-12-4 12.4.1-1" in versions
    assert not [line for line in versions if line.startswith(("nvidia-cuda-toolkit ", "nvidia-driver "))]
    proof = json.loads(finished_bookworm.ssh(["cat", "/var/lib/gpuready/cuda.json"]).stdout)
    assert (proof["nvcc"], proof["version"], proof["sm"]) == ("/usr/local/cuda-12.4/bin/nvcc", "12.4", "sm_80")
    plan = json.loads(finished_bookworm.ssh(["cat", "/var/lib/gpuready/plan.json"]).stdout)
    assert [engine["lock"] for engine in plan["engines"]] == ["vllm-0.32.0-cpu-py311"]
    (one,) = plan["deployments"]
    assert one["replicas"][0]["gpus"] == [3]
    assert one["cuda_home"] == "/usr/local/cuda-12.4"


@pytest.mark.long
def test_the_real_compiler_makes_machine_code_for_the_a100(finished_bookworm: Machine) -> None:
    finished_bookworm.ssh("echo '__global__ void k(int *x) { x[threadIdx.x] += 1; }' > /tmp/k.cu")
    home = "/usr/local/cuda-12.4/bin"
    finished_bookworm.ssh(f"cd /tmp && {home}/nvcc -cubin -arch=sm_80 -o k.cubin k.cu")
    head = bytes.fromhex(finished_bookworm.ssh("od -An -v -tx1 -N64 /tmp/k.cubin | tr -d ' \\n'").stdout)
    machine, architecture = struct.unpack_from("<H", head, 18)[0], struct.unpack_from("<I", head, 48)[0] & 0xFF
    assert (head[:4], machine, architecture) == (b"\x7fELF", 190, 80), "an ELF file of EM_CUDA, for sm_80"


@pytest.mark.long
def test_the_audit_from_outside_passes(finished_bookworm: Machine, play: Play) -> None:
    played = play(finished_bookworm, "playbooks/verify.yml")
    assert played.rc == 0, played.stdout


@pytest.mark.long
def test_both_servers_in_one_run(finished: Machine, finished_bookworm: Machine, play: Play) -> None:
    both: dict[str, Machine | str] = {"h100-sg-01": finished, HOST: finished_bookworm}
    played = play(both)
    assert played.rc == 0, played.stdout
    assert {host: counts["changed"] for host, counts in played.recap.items()} == {"h100-sg-01": 0, HOST: 0}


def test_the_repository_is_a_stand_in_that_only_tests_make() -> None:
    users = [
        path
        for folder in ("roles", "playbooks", "plugins", "src", "sim", "scripts")
        for path in (CHECKOUT / folder).rglob("*")
        if path.is_file() and path.suffix != ".md" and "standin_cuda" in path.read_text(errors="replace")
    ]
    assert users == []
