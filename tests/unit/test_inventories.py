"""Hundreds of generated inventories: each wrong one is refused in one sentence with host, key and value.

Here every case is judged by the code itself, without a run of Ansible; tests/unit/test_inventory_runs.py runs it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from tests.inventories import generate
from tests.inventories.case import Case, faults_of, recorded_facts, write_inventory
from tests.inventories.right import STYLES
from tests.inventories.right import generate as generate_right

from gpuready.outcome import Failure
from gpuready.planning.host import decide
from gpuready.planning.plan import effective_stack
from gpuready.spec.check import with_place
from gpuready.spec.declared import Declared
from gpuready.spec.inventory import locator

ROOT = Path(__file__).resolve().parents[2]
ROLES = ROOT / "roles"
LLAMA = recorded_facts()["models"]["/data/llama"]
GENERATED = {"gpuready-sim/tiny-qwen2": {**LLAMA, "revision": "1"}}
OF_ONE_HOST = generate.of_one_host()
OF_FILES = generate.of_files()
RIGHT = list(generate_right(generate.SEED))


def judged(host: str, text: str, folder: Path, facts: dict[str, Any]) -> tuple[dict[str, Any] | None, list[Failure]]:
    """Return the plan of a host and every refusal, as gpuready_plan would, from its file and recorded facts."""
    (folder / "host_vars").mkdir(exist_ok=True)
    (folder / "host_vars" / f"{host}.yml").write_text(text, encoding="utf-8")
    variables = yaml.safe_load(text)
    locate = locator([folder], [], host, folder, variables)
    declared = Declared(ROLES, host, variables, locate=locate)
    spec, failures = declared.shared()
    knobs, refused = declared.all_knobs()
    failures += refused
    if spec is None or refused:
        return None, failures
    data = spec.model_dump(exclude={"gpuready_proxy"})
    gateway = {name.removeprefix("gateway_"): one for name, one in declared.effective("gateway", knobs).items()}
    cuda = {name.removeprefix("cuda_"): one for name, one in knobs["cuda"].items()}
    assert effective_stack(data, cuda) is not None or failures
    plan, refused = decide(host, data, gateway, facts, GENERATED, cuda)
    names = [one["name"] for one in data["gpuready_deployments"]]
    return plan, failures + [with_place(failure, host, locate, names) for failure in refused]


def named(case: Case, number: int) -> str:
    return f"{number}-{re.sub(r'[^a-z]+', '-', case.kind.lower())}"


def assert_one_good_sentence(sentences: list[str], case: Case) -> None:
    assert len(sentences) == 1, (case.kind, sentences)
    (sentence,) = sentences
    assert not faults_of(sentence), (faults_of(sentence), sentence)
    assert case.key in sentence, sentence
    for words in case.says:
        assert words in sentence, (words, sentence)
    assert "hunter2" not in sentence


@pytest.mark.parametrize("number", [n for n, case in enumerate(OF_ONE_HOST) if not case.evaluated])
def test_a_wrong_host_is_refused_in_one_sentence(number: int, tmp_path: Path) -> None:
    case = OF_ONE_HOST[number]
    _, failures = judged("h1", case.text, tmp_path, recorded_facts(**case.facts))
    sentences = [failure.sentence() for failure in failures]
    assert_one_good_sentence(sentences, case)
    assert sentences[0].startswith("host h1")


@pytest.mark.parametrize("number", [n for n, one in enumerate(RIGHT) if not one.evaluated])
def test_a_right_host_is_planned(number: int, tmp_path: Path) -> None:
    one = RIGHT[number]
    plan, failures = judged("h1", one.content.decode("utf-8-sig"), tmp_path, one.facts)
    assert [failure.sentence() for failure in failures] == []
    assert plan is not None
    # On a shared GPU the one with the largest part stands first, because it starts first.
    names = [made["name"] for made in plan["deployments"]]
    assert sorted(names) == sorted(d["name"] for d in one.variables["gpuready_deployments"])


def test_the_files_of_right_hosts_are_read_as_meant(tmp_path: Path) -> None:
    write_inventory(tmp_path, {f"h{n}{one.ending}": one.content for n, one in enumerate(RIGHT)}, {})
    assert guard().Review(DataLoader()).sentences([tmp_path]) == []
    assert len(RIGHT) == 100
    assert len({one.content for one in RIGHT}) == 100
    assert {one.style for one in RIGHT} == set(STYLES)


def guard() -> Any:
    """Return the guard's module; Ansible would load it by its path too."""
    if "gpuready_guard" not in sys.modules:
        path = ROOT / "plugins" / "inventory" / "gpuready_guard.py"
        spec = importlib.util.spec_from_file_location("gpuready_guard", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["gpuready_guard"] = module
    return sys.modules["gpuready_guard"]


def write(case: Case, folder: Path) -> None:
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("number", range(len(OF_FILES)))
def test_a_wrong_file_is_refused_in_one_sentence_before_it_is_read(number: int, tmp_path: Path) -> None:
    case = OF_FILES[number]
    write(case, tmp_path)
    assert_one_good_sentence(guard().Review(DataLoader()).sentences([tmp_path]), case)


def test_there_are_enough_of_them_and_they_are_the_same_every_time() -> None:
    cases = OF_ONE_HOST + OF_FILES
    kinds = Counter(case.kind for case in cases)
    print(f"{len(cases)} wrong inventories of {len(kinds)} kinds")
    assert len(cases) >= 300
    assert len(kinds) >= 60
    assert repr(generate.of_one_host()) == repr(OF_ONE_HOST)
    assert repr(generate.of_one_host(7)) != repr(OF_ONE_HOST)
    assert len({case.text or repr(case.files) for case in cases}) > 0.97 * len(cases), "cases differ from each other"
