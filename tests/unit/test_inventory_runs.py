"""The generated inventories through the real ansible-playbook, against recorded servers: no machine is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.inventories import generate
from tests.inventories.case import (
    DECLARED,
    DEPLOYMENT,
    SECOND,
    Case,
    as_yaml,
    changed,
    faults_of,
    recorded_facts,
    write_inventory,
)
from tests.inventories.right import generate as generate_right

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STANDIN = {"ansible_connection": "ansible.legacy.recorded_standin", "ansible_become": False}
OF_ONE_HOST = generate.of_one_host()
OF_FILES = generate.of_files()
RIGHT = list(generate_right(generate.SEED))


@dataclass
class Run:
    """What a run of ansible-playbook said."""

    rc: int
    output: str
    asked: list[str]
    """What the recorded servers were asked, by host and command."""
    seconds: float

    def sentences(self) -> dict[str, list[str]]:
        """Return the refusals by host, each once."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for line in self.output.split("\nPLAY RECAP")[0].splitlines():
            if match := re.search(r"host (h\d+)\b.*[.?]$", line):
                found[match[1]][match[0]] = None
        return {host: list(lines) for host, lines in found.items()}

    def recap(self) -> dict[str, dict[str, int]]:
        """Return the counts of every host."""
        lines = re.findall(r"^(\S+)\s+: (ok=\d+ .*)$", self.output, re.MULTILINE)
        return {
            host: {name: int(count) for name, count in (pair.split("=") for pair in counts.split())}
            for host, counts in lines
        }


def preflight(
    inventory: Path, recorded: Path, *words: str, playbook: Path = ROOT / "playbooks" / "preflight.yml"
) -> Run:
    """Run preflight, or another playbook, on an inventory, with the stand-in for SSH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment |= {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_CONNECTION_PLUGINS": str(ROOT / "tests" / "inventories" / "connection"),
        "ANSIBLE_NOCOLOR": "1",
        "COLUMNS": "200",
        "GPUREADY_RECORDED": str(recorded),
    }
    (recorded / "asked.log").write_text("")
    start = time.monotonic()
    done = subprocess.run(
        [str(BIN / "ansible-playbook"), "-i", str(inventory), str(playbook), *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    asked = (recorded / "asked.log").read_text().splitlines()
    return Run(done.returncode, done.stdout, asked, time.monotonic() - start)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder of recorded servers."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    (folder / "default.json").write_text(json.dumps(recorded_facts()))
    return folder


def assert_refused(case: Case, sentences: list[str]) -> None:
    assert len(sentences) == 1, (case.kind, case.key, sentences)
    (sentence,) = sentences
    assert not faults_of(sentence), (faults_of(sentence), sentence)
    assert case.key in sentence, sentence
    for words in case.says:
        assert words in sentence, (words, sentence)


def assert_clean(output: str) -> None:
    for words in ("Traceback", "Unexpected Exception", "pydantic", "gpuready has a defect", "hunter2", "[WARNING]"):
        assert words not in output, output[max(0, output.index(words) - 500) :][:1500]
    raw = [one for one in output if not one.isprintable() and one != "\n"]
    assert not raw, f"raw control characters {sorted(set(raw))}"


def run_hosts(cases: list[Case], tmp_path: Path, recorded: Path) -> Run:
    files = {f"h{number}.yml": case.text.encode() for number, case in enumerate(cases)}
    write_inventory(tmp_path / "inventory", files, STANDIN)
    for number, case in enumerate(cases):
        if case.facts:
            (recorded / f"h{number}.json").write_text(json.dumps(recorded_facts(**case.facts)))
    return preflight(tmp_path / "inventory", recorded)


def first_of_each_kind(cases: list[Case]) -> list[Case]:
    """Return one case of each kind, and all that nothing but a run can judge."""
    seen: set[str] = set()
    return [case for case in cases if case.evaluated or not (case.kind in seen or seen.add(case.kind))]  # type: ignore[func-returns-value]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_wrong_hosts_are_each_refused_in_one_sentence(every: bool, tmp_path: Path, recorded: Path) -> None:
    cases = OF_ONE_HOST if every else first_of_each_kind(OF_ONE_HOST)
    run = run_hosts(cases, tmp_path, recorded)
    print(f"{len(cases)} wrong hosts of {len({case.kind for case in cases})} kinds in {run.seconds:.0f} s")
    assert run.rc == 2, run.output[-3000:]
    assert_clean(run.output)
    said, recap = run.sentences(), run.recap()
    for number, case in enumerate(cases):
        assert_refused(case, said.get(f"h{number}", []))
        assert recap[f"h{number}"]["failed"] == 1, case
        assert recap[f"h{number}"]["changed"] == 0, case
    assert {line.split()[1] for line in run.asked} <= {"facts"}, (
        "a refused server is asked what it is, and nothing else"
    )


def test_right_hosts_are_all_planned(tmp_path: Path, recorded: Path) -> None:
    files = {f"h{number}{one.ending}": one.content for number, one in enumerate(RIGHT)}
    write_inventory(tmp_path / "inventory", files, STANDIN)
    for number, one in enumerate(RIGHT):
        (recorded / f"h{number}.json").write_text(json.dumps(one.facts))
    run = preflight(tmp_path / "inventory", recorded)
    print(f"{len(RIGHT)} right hosts in {run.seconds:.0f} s")
    assert run.sentences() == {}
    assert run.rc == 0, run.output[-3000:]
    assert_clean(run.output)
    for number, one in enumerate(RIGHT):
        for deployment in one.variables["gpuready_deployments"]:
            assert f"h{number}: {deployment['name']}:" in run.output, one


def sampled(cases: list[Case]) -> list[object]:
    """Return every case as a parameter; those of the default run are one in twelve."""
    marks = [[] if number % 12 == 0 else [pytest.mark.long] for number in range(len(cases))]
    return [pytest.param(number, marks=marks[number], id=f"{number}") for number in range(len(cases))]


@pytest.mark.parametrize("number", sampled(OF_FILES))
def test_a_wrong_file_ends_the_run_before_it_begins(number: int, tmp_path: Path, recorded: Path) -> None:
    case = OF_FILES[number]
    for name, content in case.files.items():
        path = tmp_path / "inventory" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    run = preflight(tmp_path / "inventory", recorded)
    assert run.rc == 2, run.output
    assert_clean(run.output)
    assert "PLAY" not in run.output
    assert_refused(case, [line.removeprefix("[ERROR]: ") for line in run.output.splitlines()])
    assert run.asked == []


VALIDATE = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: "{{ role }}", tasks_from: validate}
"""
WRONG_OF_A_ROLE: dict[str, dict[str, object]] = {
    "preflight": {"gpuready_gpu_count": "x"},
    "agent": {},
    "base": {"base_shm_percent": 200},
    "cuda": {"cuda_version": "12"},
    "engines": {"engines_find_links": ["ftp://x"]},
    "models": {},
    "serving": {},
    "gateway": {"gateway_port": 22},
}


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    """An inventory of one right host."""
    write_inventory(tmp_path / "inventory", {"h1.yml": as_yaml(DECLARED).encode()}, STANDIN)
    return tmp_path / "inventory"


@pytest.mark.parametrize("is_right", [True, False])
def test_the_entry_point_validate_alone_refuses_and_asks_nothing(
    is_right: bool, tmp_path: Path, recorded: Path
) -> None:
    roles = sorted(path.name for path in (ROOT / "roles").iterdir())
    wrong = {role: {} if is_right else WRONG_OF_A_ROLE[role] for role in roles}
    declared = {role: {**DECLARED, "role": role, **wrong[role]} for role in roles}
    files = {f"h{number}.yml": as_yaml(declared[role]).encode() for number, role in enumerate(roles)}
    write_inventory(tmp_path / "inventory", files, STANDIN)
    (tmp_path / "validate.yml").write_text(VALIDATE)
    run = preflight(tmp_path / "inventory", recorded, playbook=tmp_path / "validate.yml")
    assert run.rc == (0 if is_right else 2), run.output
    assert run.asked == []
    assert len(run.recap()) == len(roles)
    for number, role in enumerate(roles):
        sentences = run.sentences().get(f"h{number}", [])
        assert len(sentences) == len(wrong[role]), (role, run.output)
        for name, sentence in zip(wrong[role], sentences, strict=True):
            assert re.match(rf"host h{number}, \S+/h{number}\.yml:\d+, {name}\S* = .* is refused", sentence) or (
                role == "engines" and f"{name}[0] is refused" in sentence
            ), sentence


def test_what_the_command_line_sets_is_said_to_be_set_there(declared: Path, recorded: Path) -> None:
    run = preflight(declared, recorded, "-e", "gateway_prot=1 gpuready_gpu_count=many")
    assert run.rc == 2
    unknown, refused = run.sentences()["h1"]
    assert unknown.startswith("host h1, on the command line (-e), gateway_prot: no such variable")
    assert refused.startswith("host h1, on the command line (-e), gpuready_gpu_count = 'many' is refused")


def test_a_template_that_says_how_a_host_is_reached_is_named(declared: Path, recorded: Path) -> None:
    path = declared / "host_vars" / "h1.yml"
    path.write_text(path.read_text() + "ansible_python_interpreter: '{{ nobody_set_this }}'\n")
    run = preflight(declared, recorded)
    assert run.rc == 2
    (sentence,) = run.sentences()["h1"]
    assert ".yml:19, ansible_python_interpreter = '{{ nobody_set_this }}' cannot be evaluated: " in sentence
    assert run.asked == []


@pytest.mark.parametrize("whole", [False, True], ids=["the value alone", "its whole file"])
def test_a_value_out_of_a_vault_is_judged_and_never_shown(whole: bool, declared: Path, recorded: Path) -> None:
    password, value = declared.parent / "password", "hunter2 is no address"
    password.write_text("open sesame\n")
    path = declared / "host_vars" / "h1.yml"
    vault = [
        str(BIN / "ansible-vault"),
        "encrypt" if whole else "encrypt_string",
        "--vault-password-file",
        str(password),
    ]
    if whole:
        path.write_text(path.read_text() + f"gateway_bind: {value}\n")
        subprocess.run([*vault, str(path)], capture_output=True, check=True)
    else:
        words = [*vault, "--name", "gateway_bind", value]
        path.write_text(path.read_text() + subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    run = preflight(declared, recorded, "--vault-password-file", str(password))
    assert run.rc == 2
    (sentence,) = run.sentences()["h1"]
    assert ".yml:19, gateway_bind = (from a vault, not shown) is refused: allowed is * or an IPv4" in sentence
    assert_clean(run.output)


@pytest.mark.parametrize("whole", [False, True], ids=["a value", "a file"])
@pytest.mark.parametrize("text", ["{{ hidden }}", "Bearer {{ hidden }}"])
def test_a_flag_out_of_a_vault_is_refused_and_never_shown(
    text: str, whole: bool, declared: Path, recorded: Path
) -> None:
    password = declared.parent / "password"
    password.write_text("open sesame\n")
    vault, key = str(BIN / "ansible-vault"), ["--vault-password-file", str(password)]
    path, vaulted = declared / "host_vars" / "h1.yml", ""
    if whole:
        file = declared / "group_vars" / "all" / "vault.yml"
        file.parent.mkdir(parents=True)
        file.write_text("hidden: hunter2\n")
        subprocess.run([vault, "encrypt", *key, str(file)], capture_output=True, check=True)
    else:
        words = [vault, "encrypt_string", *key, "--name", "hidden", "hunter2"]
        vaulted = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    path.write_text(as_yaml(changed(("gpuready_deployments", 0, "flags"), {"x": [text]})) + vaulted)
    run = preflight(declared, recorded, "--vault-password-file", str(password))
    assert run.rc == 2
    (sentence,) = run.sentences()["h1"]
    assert "gpuready_deployments[0].flags.x[0] is a secret, and rendered files are no place for one" in sentence
    assert run.asked == []
    assert_clean(run.output)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("hosts.ini", "[servers]\nh1 gpuready_gpu_count=x\n", "gpuready_gpu_count = 'x' is refused"),
        ("hosts", "[servers]\nh1 gpuready_gpu_count=8\n", "gpuready_stack is not set"),
    ],
)
def test_an_inventory_in_ini_form_is_judged_too(
    name: str, content: str, words: str, tmp_path: Path, recorded: Path
) -> None:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / name).write_text(content)
    run = preflight(tmp_path / "inventory", recorded, "-e", json.dumps(STANDIN))
    assert run.rc == 2
    assert any(words in one for one in run.sentences()["h1"]), run.output
    assert_clean(run.output)
    only = preflight(Path("h1,"), recorded, "-e", json.dumps(STANDIN))
    assert only.rc == 2
    assert "gpuready_gpu_model is not set" in only.output


# The plan that is only shown ------------------------------------------------------------------------------------------

PLAN = ROOT / "playbooks" / "plan.yml"


def test_a_plan_is_shown_with_what_it_would_change(tmp_path: Path, recorded: Path) -> None:
    two = [{**DEPLOYMENT, "gpus": 2}, {**SECOND, "gpus": {"shared": 7}}, {**SECOND, "name": "small", "model": "org/s"}]
    declared = {**DECLARED, "gpuready_deployments": two}
    write_inventory(tmp_path / "inventory", {"h1.yml": as_yaml(declared).encode()}, STANDIN)
    run = preflight(tmp_path / "inventory", recorded, playbook=PLAN)
    assert run.rc == 0, run.output
    assert run.recap()["h1"]["changed"] == 0
    assert_clean(run.output)
    for words in ("Plan of h1", "chat: org/llama on 2 x", "replica 1 on GPU 1", "on GPU 7 with others", "K KV cache"):
        assert words in run.output, run.output
    assert "the server has no plan yet: site.yml brings this one" in run.output
    assert run.asked == ["h1 facts"]


def test_slices_are_shown_with_what_keeps_them_from_being_served(tmp_path: Path, recorded: Path) -> None:
    declared = changed(("gpuready_deployments", 0, "gpus"), {"mig": "3g.40gb", "count": 2})
    write_inventory(tmp_path / "inventory", {"h1.yml": as_yaml(declared).encode()}, STANDIN)
    nvml = recorded_facts()["nvml"]
    divided = {**nvml, "gpus": [{**one, "mig_mode": "enabled"} for one in nvml["gpus"]]}
    (recorded / "h1.json").write_text(json.dumps(recorded_facts(nvml=divided)))
    run = preflight(tmp_path / "inventory", recorded, playbook=PLAN)
    assert run.rc == 0, run.output
    assert "2 x 3g.40gb of H100 SXM5 80GB" in run.output
    assert "replica 1 on slice 3g.40gb" in run.output
    assert "What has to be settled before site.yml brings it:" in run.output
    assert "MIG is enabled on GPU 0, 1, 2, 3, 4, 5, 6, 7" in run.output


def test_a_wrong_host_has_no_plan_to_show(tmp_path: Path, recorded: Path) -> None:
    declared = changed(("gpuready_deployments", 0, "gpus"), 9)
    write_inventory(tmp_path / "inventory", {"h1.yml": as_yaml(declared).encode()}, STANDIN)
    run = preflight(tmp_path / "inventory", recorded, playbook=PLAN)
    assert run.rc == 2
    assert "deployments ask for 9 GPUs (chat 9)" in run.sentences()["h1"][0]
