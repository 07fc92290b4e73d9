"""Which engines a host gets: by deployments or all, each on a Python of the server, each with a lock."""

from __future__ import annotations

from typing import Any

import pytest

from gpuready import catalog
from gpuready.outcome import Refusal
from gpuready.planning import support
from gpuready.planning.engines import Choice, choose, stack_failures
from gpuready.planning.memory.device import device
from gpuready.planning.memory.run import Run
from gpuready.planning.plan import effective_stack

UBUNTU = {"python": "3.12", "pythons": {"3.12": "/usr/bin/python3.12"}}
DEBIAN_13 = {"python": "3.13", "pythons": {"3.13": "/usr/bin/python3.13"}}
STACKS = catalog.load("stacks")["stacks"]
REAL = [name for name, stack in STACKS.items() if not stack["simulated_only"]]


def spec(*engines: str, stack: str = "cu128") -> dict[str, Any]:
    deployments = [{"name": f"d{number}", "engine": engine} for number, engine in enumerate(engines)]
    return {"gpuready_stack": stack, "gpuready_simulated": False, "gpuready_deployments": deployments}


def chosen(
    declared: dict[str, Any], facts: dict[str, Any], card: str = "h100-80gb-sxm", **knobs: Any
) -> tuple[dict[str, dict[str, Any]], list[dict[str, str]]]:
    stack = effective_stack(declared, {})
    assert stack is not None
    found, left_out = choose("h1", declared, stack, card, facts, Choice.of_knobs(knobs))
    return {one["engine"]: one for one in found}, left_out


def refused(declared: dict[str, Any], facts: dict[str, Any], **knobs: Any) -> list[str]:
    with pytest.raises(Refusal) as caught:
        chosen(declared, facts, **knobs)
    return [failure.sentence() for failure in caught.value.failures]


def test_an_engine_is_planned_whole() -> None:
    found, left_out = chosen(spec("vllm", "vllm"), UBUNTU)
    lock = "vllm-0.19.1-cu128-py312"
    assert left_out == []
    assert found["vllm"].pop("folder").startswith("/opt/gpuready/engines/vllm-0.19.1-")
    assert found == {
        "vllm": {
            "engine": "vllm",
            "version": "0.19.1",
            "lock": lock,
            "apt": ["gcc", "g++", "python3-dev", "python3-venv"],
            "python": "/usr/bin/python3",
            "index": [],
            "download_gib": 5,
            "install_gib": 11,
            "standin": None,
            "used_by": ["d0", "d1"],
        }
    }


# A Python for each engine ---------------------------------------------------------------------------------------------


def test_the_servers_own_python_is_taken_before_newer_ones() -> None:
    facts = {"python": "3.11", "pythons": {"3.11": "/usr/bin/python3.11", "3.12": "/usr/bin/python3.12"}}
    found, _ = chosen(spec("vllm"), facts)
    assert (found["vllm"]["python"], found["vllm"]["lock"]) == ("/usr/bin/python3", "vllm-0.19.1-cu128-py311")


def test_beside_an_unfit_one_the_newest_fitting_python_is_taken_with_its_own_packages() -> None:
    pythons = {"3.13": "/usr/bin/python3.13", "3.11": "/usr/bin/python3.11", "3.12": "/usr/bin/python3.12"}
    found, _ = chosen(spec("sglang", "vllm"), {"python": "3.13", "pythons": pythons})
    assert found["vllm"]["python"] == "/usr/bin/python3"
    assert found["sglang"]["python"] == "/usr/bin/python3.12"
    assert found["sglang"]["lock"] == "sglang-0.5.10.post1-cu128-py312"
    assert {"python3.12-dev", "python3.12-venv"} < set(found["sglang"]["apt"])


def test_debian_13_is_refused_for_sglang_with_every_remedy() -> None:
    (sentence,) = refused(spec("sglang"), DEBIAN_13)
    assert sentence == (
        "host h1, deployment d0: sglang 0.5.10.post1 has no lock for the server's Python 3.13: it runs on Python 3.10, "
        "3.11, 3.12; use Debian 12 (3.11), Ubuntu 22.04 (3.10) or Ubuntu 24.04 (3.12), or install a Python 3.10, 3.11 "
        "or 3.12 on the server and name it: engines_pythons: {sglang: /opt/python3.12/bin/python3}."
    )


NAMED = "/opt/python3.12/bin/python3"


def named(version: str, problem: str = "") -> dict[str, Any]:
    return {**DEBIAN_13, "pythons_named": {NAMED: {"version": version, "problem": problem}}}


def test_a_named_python_is_taken_and_brings_its_own_headers() -> None:
    found, _ = chosen(spec("sglang", "vllm"), named("3.12"), pythons={"sglang": NAMED})
    assert (found["sglang"]["python"], found["sglang"]["lock"]) == (NAMED, "sglang-0.5.10.post1-cu128-py312")
    assert found["sglang"]["apt"] == ["libnuma1", "gcc", "g++"]
    assert found["vllm"]["python"] == "/usr/bin/python3"


@pytest.mark.parametrize(
    ("path", "facts", "words"),
    [
        (
            NAMED,
            named("3.13"),
            "is Python 3.13, and sglang 0.5.10.post1 does not run on it; name one of version 3.10, 3",
        ),
        (NAMED, named("", "No such file or directory"), "cannot be used on the server: No such file or directory"),
        (NAMED, DEBIAN_13, "cannot be used on the server: it was not looked at"),
        ("/home/joe/bin/python3", DEBIAN_13, "is hidden from the engines: the engines' unit sees nothing below /home/"),
    ],
)
def test_a_named_python_that_cannot_be_used_is_refused_by_name(path: str, facts: dict[str, Any], words: str) -> None:
    (sentence,) = refused(spec("sglang"), facts, pythons={"sglang": path})
    assert f"engines_pythons.sglang = {path!r} {words}" in sentence


# Locks that are still to be made --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "engine", "lock", "index"),
    [
        ("cu128", "tensorrt_llm", "tensorrt-llm-1.0.0-cu128-py312", "https://pypi.nvidia.com"),
        ("cu129", "vllm", "vllm-0.30.0-cu129-py312", "https://wheels.vllm.ai/0.30.0/cu129"),
    ],
)
def test_a_deployment_whose_engine_has_no_lock_is_refused_with_the_way_to_it(
    stack: str, engine: str, lock: str, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "has_lock", lambda name: name != lock and not name.startswith(lock[:-2]))
    (sentence,) = refused(spec(engine, stack=stack), UBUNTU)
    assert f"deployment d0: {engine} " in sentence
    assert f"has no lock in this checkout yet (catalog/locks/{lock}.txt): its files stand at {index} and " in sentence
    assert f"run scripts/lock {lock} on a host that reaches them" in sentence


def test_an_engine_with_a_lock_for_another_python_of_the_server_takes_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "has_lock", lambda name: name.endswith("py310"))
    monkeypatch.setattr(catalog, "lock_text", lambda name: name)
    pythons = {"3.12": "/usr/bin/python3.12", "3.10": "/usr/bin/python3.10"}
    found, _ = chosen(spec("tensorrt_llm"), {"python": "3.12", "pythons": pythons})
    assert found["tensorrt_llm"]["python"] == "/usr/bin/python3.10"
    assert found["tensorrt_llm"]["index"][0] == "https://pypi.nvidia.com"


# All that the card can run --------------------------------------------------------------------------------------------


def test_all_engines_of_the_stack_come_where_asked_for_and_who_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = catalog.has_lock
    monkeypatch.setattr(catalog, "has_lock", lambda name: not name.startswith("tensorrt") and real(name))
    found, left_out = chosen(spec("vllm"), UBUNTU, install="all")
    assert {name: one["used_by"] for name, one in found.items()} == {"vllm": ["d0"], "sglang": []}
    (one,) = left_out
    assert (one["engine"], one["version"]) == ("tensorrt_llm", "1.0.0")
    assert "run scripts/lock tensorrt-llm-1.0.0-cu128-py312" in one["why"]


def test_of_all_engines_one_without_a_python_is_left_out_and_not_refused() -> None:
    found, left_out = chosen(spec("vllm"), DEBIAN_13, install="all")
    assert list(found) == ["vllm"]
    assert {one["engine"] for one in left_out} == {"sglang", "tensorrt_llm"}
    assert "has no lock for the server's Python 3.13" in left_out[0]["why"]


def test_all_is_what_the_card_can_run() -> None:
    found, left_out = chosen(spec("vllm"), UBUNTU, card="t4", install="all")
    assert (list(found), left_out) == (["vllm"], [])


# Card and CUDA --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "engine", "stack", "words"),
    [
        ("v100s-32gb", "vllm", "cu128", "vllm 0.19.1 does not run on v100s-32gb: "),
        ("v100s-32gb", "vllm", "cu128", "choose gpuready_stack: cu124-volta, or another engine"),
        ("v100s-32gb", "sglang", "cu128", "sglang 0.5.10.post1 does not run on v100s-32gb"),
        ("t4", "sglang", "cu128", "choose another engine"),
        ("b200", "vllm", "cu124-volta", "choose gpuready_stack: cu128, or another engine"),
        ("v100s-32gb", "vllm", "cu129", "choose gpuready_stack: cu124-volta"),
    ],
)
def test_a_card_that_an_engine_does_not_run_on_is_refused_with_the_stack_that_does(
    card: str, engine: str, stack: str, words: str
) -> None:
    declared = spec(engine, stack=stack)
    (failure,) = stack_failures("h1", declared, effective_stack(declared, {}) or {}, card)
    assert words in failure.sentence()


def test_another_cuda_than_the_engines_wheels_are_made_for_is_refused() -> None:
    declared = spec("vllm", stack="cu130")
    stack = effective_stack(declared, {"version": "12.8"})
    assert stack is not None
    (failure,) = stack_failures("h1", declared, stack, "h100-80gb-sxm")
    assert "vLLM 0.33.0 on CUDA 12.8: its wheels are made for CUDA 13" in failure.sentence()


@pytest.mark.parametrize(
    ("name", "engine"), [(name, engine) for name in REAL for engine in STACKS[name]["engines"]], ids=str
)
def test_every_engine_of_a_stack_runs_on_its_cuda_and_its_oldest_driver(name: str, engine: str) -> None:
    host, entry = STACKS[name]["host"], STACKS[name]["engines"][engine]
    card = device("v100s-32gb" if name == "cu124-volta" else "h100-80gb-sxm")
    assert card is not None
    run = Run(engine, entry["version"])
    assert support.on_card(card, run, cuda=host["cuda"]["version"], made_for=entry.get("cuda")) == []
    # The wheels' CUDA and the stack's floor of the driver go together, whatever PyPI's wheel of the release needs.
    made_for = entry.get("cuda") or host["cuda"]["version"]
    assert host["driver_min"] == catalog.load("engine_support")["cuda_drivers"][made_for.split(".")[0]]


def test_only_the_simulated_stack_has_stand_ins() -> None:
    for name in REAL:
        assert all(entry["standin"] is None for entry in STACKS[name]["engines"].values())
