"""Declarations: every mistake is one sentence with its place, and all are said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuready.outcome import Failure
from gpuready.spec.check import check_declaration, with_place
from gpuready.spec.inventory import locator, role_options
from gpuready.spec.values import Secret

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"gateway": ["gateway_port"]}


def declared(**change: Any) -> dict[str, Any]:
    return {
        "gpuready_gpu_model": "h100",
        "gpuready_gpu_count": 8,
        "gpuready_stack": "cu128",
        "gpuready_deployments": [
            {
                "name": "chat",
                "model": "m",
                "model_path": "/data/m",
                "engine": "vllm",
                "gpus": 1,
                "workload": {
                    "prompt_tokens": {"p50": 1, "p99": 2},
                    "output_tokens": {"p50": 1, "p99": 2},
                    "concurrency": 1,
                },
            }
        ],
        **change,
    }


def sentences(values: dict[str, Any]) -> list[str]:
    _, failures = check_declaration("h1", values, ROLES, lambda keys: f"group_vars/g.yml:{len(keys)}")
    return [failure.sentence() for failure in failures]


def test_a_good_declaration_has_no_failures_and_defaults_are_filled() -> None:
    spec, failures = check_declaration("h1", declared(), ROLES)
    assert not failures
    assert spec is not None
    assert spec.gpuready_simulated is False


def test_numbers_from_the_command_line_are_numbers() -> None:
    spec, failures = check_declaration("h1", declared(gpuready_gpu_count="4"), ROLES)
    assert not failures
    assert spec is not None
    assert spec.gpuready_gpu_count == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpuready_deployment": []}, "gpuready_deployment: no such variable; did you mean gpuready_deployments?"),
        ({"gateway_prot": 1}, "gateway_prot: no such variable; did you mean gateway_port?"),
        ({"gpuready_stack": "cu182"}, "no such stack in the catalog; did you mean cu129?"),
        ({"gpuready_stack": "zzz"}, "no such stack in the catalog; known are cpu, cu124-volta, cu128, cu129, cu130"),
        ({"gpuready_gpu_model": "h100-80gb-smx"}, "did you mean h100-80gb-sxm?"),
        ({"gpuready_gpu_count": 0}, "gpuready_gpu_count = 0 is refused: allowed are numbers from 1"),
        ({"gpuready_expect": {"ram": 3}}, "gpuready_expect.ram: no such key"),
    ],
)
def test_mistake_is_said_with_its_remedy(change: dict[str, Any], words: str) -> None:
    (sentence,) = sentences(declared(**change))
    assert words in sentence
    assert sentence.startswith("host h1, group_vars/g.yml:")


def test_what_is_missing_is_named() -> None:
    found = sentences({})
    assert len(found) == 3
    assert all("is not set; set it; inventories/example shows how." in one for one in found)


def in_deployment(**change: Any) -> dict[str, Any]:
    values = declared()
    values["gpuready_deployments"][0].update(change)
    return values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "Chat One"}, "allowed are 1 to 32 lower case letters, digits and dashes, a letter first"),
        ({"engine": "vlm"}, "'vlm' is refused: allowed are 'vllm', 'sglang' or 'tensorrt_llm'"),
        ({"gpus": "all"}, "allowed are a number of GPUs (4), a list of their indices ([0, 1]), {shared: 0} or"),
        ({"gpus": 0}, "gpuready_deployments[0].gpus = 0 is refused"),
        ({"model_path": "data/m"}, "allowed is an absolute path"),
        ({"wrokload": {}}, "gpuready_deployments[0].wrokload: no such key; did you mean workload?"),
    ],
)
def test_mistake_inside_a_deployment(change: dict[str, Any], words: str) -> None:
    (sentence,) = sentences(in_deployment(**change))
    assert words in sentence


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"flags": {"x": Secret("hunter2")}}, "gpuready_deployments[0].flags.x"),
        ({"flags": {"x": {"headers": ["a", Secret("hunter2")]}}}, "gpuready_deployments[0].flags.x.headers[1]"),
        ({"flags": {Secret("hunter2"): 1}}, "gpuready_deployments[0].flags"),
        ({"model_path": Secret("/hunter2")}, "gpuready_deployments[0].model_path"),
        ({"workload": Secret("hunter2")}, "gpuready_deployments[0].workload"),
    ],
)
def test_a_secret_in_a_deployment_is_refused_and_not_shown(change: dict[str, Any], key: str) -> None:
    values = in_deployment(**change)
    spec, failures = check_declaration("h1", values, ROLES)
    said = [failure.sentence() for failure in failures]
    assert spec is None
    assert f"host h1, {key} is a secret, and rendered files are no place for one; remove it, or write it " in said[0]
    assert "hunter2" not in "".join(said)


def test_percentiles_in_the_wrong_order() -> None:
    workload = {**declared()["gpuready_deployments"][0]["workload"], "prompt_tokens": {"p50": 9, "p99": 3}}
    (sentence,) = sentences(in_deployment(workload=workload))
    assert "p99 (3) is below p50 (9)" in sentence


def test_two_deployments_of_one_name() -> None:
    values = declared()
    values["gpuready_deployments"] *= 2
    name, model = sentences(values)
    assert "gpuready_deployments[1].name = 'chat' is refused: gpuready_deployments[0] has the same name" in name
    assert "gpuready_deployments[1].model = 'm' is refused: gpuready_deployments[0] has the same model" in model


def test_every_mistake_at_once_and_the_rest_is_still_checked() -> None:
    spec, failures = check_declaration("h1", declared(gpuready_stack="x", gpuready_foo=1, gateway_x=2), ROLES)
    assert spec is not None
    assert [failure.code for failure in failures] == ["spec.unknown_name", "spec.unknown_name", "spec.unknown_stack"]


def test_the_place_of_a_variable_is_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("---\ngpuready_stack: cu128\n")
    (tmp_path / "group_vars" / "h100-sg.yml").write_text("---\n# x\n\ngpuready_stack: cpu\n")
    locate = locator([tmp_path], ["h100-sg"], "h1", tmp_path, {"gpuready_stack": "cpu"})
    assert locate(("gpuready_stack",)) == "group_vars/h100-sg.yml:4"
    assert locate(("gpuready_nothing",)) == ""


NESTED = """\
workload: &load
  concurrency: 1
  wrong: 2
gpuready_deployments:
  - name: a
    workload:
      <<: *load
      concurrency: 2
  - name: b
"""


@pytest.mark.parametrize(
    ("keys", "line"),
    [((), 4), ((0,), 5), ((0, "workload"), 6), ((0, "workload", "wrong"), 3), ((1, "name"), 9), ((1, "absent"), 9)],
)
def test_the_place_of_a_key_is_its_own_line(tmp_path: Path, keys: tuple[int | str, ...], line: int) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "g.yml").write_text(NESTED)
    locate = locator([tmp_path], ["g"], "h1", tmp_path, {})
    assert locate(("gpuready_deployments", *keys)) == f"group_vars/g.yml:{line}"


def test_of_several_hosts_in_one_file_the_own_line_is_named(tmp_path: Path) -> None:
    hosts = "all:\n  hosts:\n    h1: {gpuready_replan: null}\n    h2: {x: 1, gpuready_replan: null}\n"
    (tmp_path / "hosts.yml").write_text(hosts)
    for host, line in (("h1", 3), ("h2", 4)):
        assert locator([tmp_path], [], host, tmp_path, {})(("gpuready_replan",)) == f"hosts.yml:{line}"


def test_of_two_groups_the_one_with_the_real_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "aaa.yml").write_text("gpuready_stack: cu128\n")
    (tmp_path / "group_vars" / "zzz.yml").write_text("gpuready_stack: cpu\n")
    for value, name in (("cu128", "aaa"), ("cpu", "zzz"), ("templated", "zzz")):
        locate = locator([tmp_path], ["aaa", "zzz"], "h1", tmp_path, {"gpuready_stack": value})
        assert locate(("gpuready_stack",)) == f"group_vars/{name}.yml:1"


def test_the_example_inventory_is_a_good_declaration() -> None:
    import yaml

    for path in (ROOT / "inventories" / "example" / "group_vars").glob("*.yml"):
        values = yaml.safe_load(path.read_text())
        spec, failures = check_declaration("h1", values, role_options(ROOT / "roles"))
        assert not failures, path
        assert spec is not None


@pytest.mark.parametrize("key", ["gpuready_gpu_count", "gateway_port", "base_firewall_open"])
def test_a_refusal_of_a_later_check_gets_its_place_too(key: str) -> None:
    placed = with_place(Failure("x", f"host h1, {key} = 1 is refused"), "h1", lambda keys: f"{keys[0]}.yml:3")
    assert placed.what == f"host h1, {key}.yml:3, {key} = 1 is refused"
