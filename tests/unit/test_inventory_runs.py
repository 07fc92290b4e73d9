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
from tests.inventories.case import Case, faults_of, recorded_facts, write_inventory
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
        for line in self.output.split("\n PLAY RECAP")[0].splitlines():
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


def preflight(inventory: Path, recorded: Path, *words: str) -> Run:
    """Run preflight on an inventory, with the stand-in for SSH."""
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
        [str(BIN / "ansible-playbook"), "-i", str(inventory), "playbooks/preflight.yml", *words],
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
