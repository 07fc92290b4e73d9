"""Templates see spec, plan and server alone; the operator's copy wins; a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuready.outcome import Refusal
from gpuready.planning.options import GROUPS
from gpuready.rendering.templates import FILTERS, Renderer, render_host

ROOT = Path(__file__).resolve().parents[2]
EXTENDS = '{% extends "shipped/serving/vllm/serve.yaml.j2" %}\n'


def option(name: str, value: Any, why: str = "as it must be") -> dict[str, Any]:
    return {"name": name, "value": value, "why": why}


def plan(engine: str = "vllm", declared: list[dict[str, Any]] | None = None, **change: Any) -> dict[str, Any]:
    groups: dict[str, list[dict[str, Any]]] = dict.fromkeys(GROUPS, [])
    groups |= {
        "model": [option("model", "/data/m"), option("served-model-name", "org/model: with 'quotes'")],
        "batching": [option("max-num-seqs", 64, "64 requests are wanted")],
        "stop": [option("shutdown-timeout", 45)],
        "declared": declared or [],
    }
    if engine == "tensorrt_llm":
        groups |= {
            "model": [],
            "memory": [option("kv_cache_config.free_gpu_memory_fraction", 0.9, "6 GiB are left to nobody")],
            "cache": [option("kv_cache_config.enable_block_reuse", True, "blocks are kept")],
            "stop": [],
        }
    deployment = {
        "name": "chat",
        "model": "org/model",
        "model_path": "/data/m",
        "engine": engine,
        "task": "generate",
        "engine_version": "1.2.3",
        "settings": {"max_model_len": 4096, "max_num_seqs": 64},
        "options": groups,
        "environment": [option("HF_HUB_OFFLINE", "1", "nothing is fetched")],
        "refused_requests": [],
        "replicas": [{"index": 0, "gpus": [0, 1, 2, 3], "port": 18100}],
        **change,
    }
    gateway = {
        "port": 8080,
        "bind": "*",
        "folder": "/etc/gpuready/gateway",
        "request_timeout_seconds": 900,
        "hold_seconds": 120,
        "body_limit_kib": 1024,
        "body_limit_bytes": 1048576,
        "buffer_bytes": 1064960,
        "max_connections": 2000,
    }
    return {"deployments": [deployment], "gateway": gateway}


def rendered(*folders: Path, **change: Any) -> dict[str, str]:
    files = render_host(Renderer([*folders, ROOT / "templates"]), {}, plan(**change), {})
    found: dict[str, str] = files["releases"]["chat"]
    return found


def serve_yaml(**change: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(rendered(**change)["serve.yaml"])
    return values


def own(folder: Path, text: str, name: str = "serving/vllm/serve.yaml.j2") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_serve_yaml_is_what_was_planned_each_value_below_its_reason() -> None:
    assert serve_yaml() == {
        "model": "/data/m",
        "served-model-name": "org/model: with 'quotes'",
        "max-num-seqs": 64,
        "shutdown-timeout": 45,
    }
    assert "# 64 requests are wanted\nmax-num-seqs: 64\n" in rendered()["serve.yaml"]


@pytest.mark.parametrize(
    "value",
    [
        "yes", "no", "off", "~", "null", "1e5", "1_000", "0x10", "012", "12:30:45", "2026-01-01", "=", "<<", "- a",
        "? b", "a: b", "a #b", "#", "'", '"', "it's \"both\"", "{a: 1}", "[1", "*a", "&a", "!t", "%p", "@x", "`", "|",
        ">", " lead", "trail ", "", "two\nlines", "cr\rlf\r\n", "tab\t", "back\\slash", "\x00\x1b\x7f\x85\x9f",
        "\u2028\u2029\ufeff\u200b", "\ud7ff\ue000\uffff", "漢字 ümläut", "😀 \U0010ffff",
        "${HOME} {{ x }} {% y %}", "x" * 5000,
        True, False, None, 0, -1, 2**63, 0.1, 1e-05, 1e22, -0.0, 1.5e300, [], ["a", 1, 1e-7, None],
        {}, {"a: b": {"no": ["off"]}},
    ],
)  # fmt: skip
def test_every_value_is_read_as_it_was_meant(value: Any) -> None:
    read = serve_yaml(declared=[option("x", value)])["x"]
    assert read == value
    assert type(read) is type(value)


def test_a_reason_cannot_leave_its_comment() -> None:
    found = serve_yaml(declared=[option("x", 1, "a\nevil: true\r\u2028b: 2 " + "long " * 60)])
    assert "evil" not in found
    assert found["x"] == 1


def test_dotted_names_of_tensorrt_llm_are_nested_each_key_once() -> None:
    declared = [
        option("kv_cache_config", {"dtype": "fp8", "free_gpu_memory_fraction": 0.5}, "set under flags"),
        option("cuda_graph_config.padding.size", 2),
    ]
    assert serve_yaml(engine="tensorrt_llm", declared=declared) == {
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": True, "dtype": "fp8"},
        "max-num-seqs": 64,
        "cuda_graph_config": {"padding": {"size": 2}},
    }


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (
            [("kv_cache_config", 3)],
            "kv_cache_config has a value, and kv_cache_config.free_gpu_memory_fraction lies below it",
        ),
        ([("a", 1), ("a.b", 2)], "a.b lies below a, which has a value of its own"),
        ([("a", float("inf"))], "inf is not finite"),
        ([("a", "\ud800")], "half of a surrogate pair"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(declared: list[tuple[str, Any]], words: str) -> None:
    with pytest.raises(Refusal) as caught:
        rendered(engine="tensorrt_llm", declared=[option(*one) for one in declared])
    assert words in caught.value.failures[0].sentence()


def test_variables_are_lines_with_their_reasons() -> None:
    found = rendered(environment=[option("A", "it's = x", "because"), option("B", "", "none")])["environment"]
    assert found.endswith("# because\nA=it's = x\n# none\nB=\n")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("A B", "1", "'A B' is no name of a variable"),
        ("A", "1\nB=2", "line breaks"),
        ("A", "trailing ", "spaces at its ends"),
    ],
)
def test_a_variable_that_is_no_line_is_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(Refusal, match=r"template serving/vllm/environment\.j2") as caught:
        rendered(environment=[option(name, value)])
    assert words in caught.value.failures[0].sentence()


def test_the_unit_waits_for_the_models_and_stops_later_than_the_engine() -> None:
    adapters = [{"name": "a", "path": "/mnt/100%/my adapter"}]
    lines = rendered(adapters=adapters)["unit.conf"].splitlines()
    for key in ("Wants", "After"):
        assert f"{key}=data.mount data-m.mount" in lines
        assert rf"{key}=mnt.mount mnt-100\x25.mount mnt-100\x25-my\x20adapter.mount" in lines
    # A mount that failed at boot would end the engine for good.
    assert not any(line.startswith("Requires") for line in lines)
    assert "TimeoutStopSec=75" in lines
    assert "TimeoutStopSec=90" in rendered(engine="tensorrt_llm")["unit.conf"].splitlines()


def test_the_operators_copy_replaces_ours(tmp_path: Path) -> None:
    text = "{{ plan.options.model | options }}seed: {{ plan.replicas | length }}\n"
    assert yaml.safe_load(rendered(own(tmp_path, text))["serve.yaml"]) == {
        "model": "/data/m",
        "served-model-name": "org/model: with 'quotes'",
        "seed": 1,
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_operators_template_changes_one_block_and_keeps_the_rest(tmp_path: Path, engine: str) -> None:
    text = (
        f'{{% extends "shipped/serving/{engine}/serve.yaml.j2" %}}\n'
        '{% block batching %}{{ plan.options.batching | rejectattr("name", "equalto", "max-num-seqs") | options }}'
        "max-num-seqs: 8\n{% endblock %}\n"
        "{% block stop %}{{ super() }}mine: true\n{% endblock %}\n"
    )
    found = rendered(own(tmp_path, text, f"serving/{engine}/serve.yaml.j2"), engine=engine)["serve.yaml"]
    assert yaml.safe_load(found) == {
        "model": "/data/m",
        "served-model-name": "org/model: with 'quotes'",
        "max-num-seqs": 8,
        "shutdown-timeout": 45,
        "mine": True,
    }


def test_the_example_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/templates.md").read_text()
    text = "".join(f"{line[4:]}\n" for line in page.splitlines() if line.startswith("    "))
    found = yaml.safe_load(rendered(own(tmp_path, text))["serve.yaml"])
    assert (found["otlp-traces-endpoint"], found["shutdown-timeout"]) == ("http://127.0.0.1:4317", 120)
    assert found["max-num-seqs"] == 64


def test_comments_and_settings_outside_of_blocks_are_nothing_lost(tmp_path: Path) -> None:
    text = "{% set wanted = 7 %}\n" + EXTENDS + "# ours\n\n{% block stop %}seed: {{ 7 }}\n{% endblock %}"
    assert yaml.safe_load(rendered(own(tmp_path, text))["serve.yaml"])["seed"] == 7


def test_a_block_within_a_block_of_ours_is_the_operators_own(tmp_path: Path) -> None:
    text = EXTENDS + "{% block stop %}{% block site %}seed: 7\n{% endblock %}{% endblock %}"
    assert yaml.safe_load(rendered(own(tmp_path, text))["serve.yaml"])["seed"] == 7


def test_the_page_names_every_block_and_filter() -> None:
    page = (ROOT / "docs/templates.md").read_text()
    for group in GROUPS:
        assert group in page
        for engine in ("vllm", "sglang", "tensorrt_llm"):
            shipped = (ROOT / f"templates/serving/{engine}/serve.yaml.j2").read_text()
            assert f"{{% block {group} %}}" in shipped
    assert [name for name in FILTERS if f"`{name}" not in page] == []


def test_a_unit_of_an_operator_keeps_ours_and_adds_a_line(tmp_path: Path) -> None:
    text = '{% extends "shipped/serving/vllm/unit.conf.j2" %}\n{% block more %}Nice=5\n{% endblock %}\n'
    found = rendered(own(tmp_path, text, "serving/vllm/unit.conf.j2"))["unit.conf"]
    assert "Wants=data.mount data-m.mount\n" in found
    assert found.rstrip().endswith("Nice=5")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("A", "line 5: 'A' has not the form NAME=value"),
        ("A-B=1", "line 5: 'A-B=1' has not the form NAME=value"),
        ("HF_HUB_OFFLINE=0", "has HF_HUB_OFFLINE twice, line 5"),
    ],
)
def test_variables_that_an_operator_adds_are_checked(tmp_path: Path, line: str, words: str) -> None:
    extends = '{% extends "shipped/serving/environment.j2" %}'
    text = extends + "{% block environment %}{{ super() }}" + line + "{% endblock %}"
    with pytest.raises(Refusal) as caught:
        rendered(own(tmp_path, text, "serving/vllm/environment.j2"))
    assert words in caught.value.failures[0].sentence(), caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ hostvars }}", "serve.yaml.j2, line 1) is wrong: 'hostvars' is undefined"),
        ("a: 1\n{% if %}", "serve.yaml.j2, line 2) is wrong: Expected an expression"),
        (
            EXTENDS + "{% block stop %}\n{{ plan.nothing }}\n{% endblock %}",
            "line 3) is wrong: 'dict object' has no attribute",
        ),
        (EXTENDS + "{% block stop %}{{ plan.options.stopp | options }}{% endblock %}", "line 2) is wrong"),
        (EXTENDS + "{% block stop %}max-num-seqs: 1\n{% endblock %}", "not YAML, line 9: max-num-seqs stands twice"),
        (
            EXTENDS + "{% block memry %}seed: 1\n{% endblock %}",
            "line 2) is wrong: shipped/serving/vllm/serve.yaml.j2 has no block memry; did you mean memory?",
        ),
        (
            EXTENDS + "{% block xyz %}seed: 1\n{% endblock %}",
            "has no block xyz; its blocks are batching, cache, declared",
        ),
        (EXTENDS + "# ours\nseed: 1\n", "what stands outside of its blocks is lost, for it extends shipped/serving"),
        (EXTENDS + "{{ plan.options.model | options }}", "what stands outside of its blocks is lost"),
        (
            '{% extends "serving/vllm/serve.yaml.j2" %}',
            "it extends or includes itself without end; ours is shipped/serving",
        ),
        (EXTENDS + "{% block model %}{% endblock %}", "has another model than gpuready's own, which is '/data/m'"),
        (
            EXTENDS + "{% block network %}host: 0.0.0.0\n{% endblock %}",
            "has another host than gpuready's own, which is not",
        ),
        (EXTENDS + "{% block network %}trust_remote_code: true\n{% endblock %}", "has another trust-remote-code than"),
        (EXTENDS + "{% block network %}api_key: [x]\n{% endblock %}", "has api-key, a secret, and rendered files"),
        (EXTENDS + "{% block stop %}max_num_seqs: 1\n{% endblock %}", "has max-num-seqs twice, in two spellings"),
        ("a: [1\n", "what it makes is not YAML, line 2"),
        ("- a\n", "what it makes is no mapping"),
        ("1: a\n", "has the key 1, which is no text"),
        (
            '{% extends "shipped/nothing.j2" %}',
            "template shipped/nothing.j2 was not found: serving/vllm/serve.yaml.j2 asks",
        ),
    ],
)
def test_a_wrong_template_of_an_operator_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        rendered(own(tmp_path, text))
    sentence = caught.value.failures[0].sentence()
    assert words in sentence, sentence
    assert "serving/vllm/serve.yaml.j2" in sentence


def test_gateway_knows_every_model() -> None:
    files = render_host(Renderer([ROOT / "templates"]), {}, plan(model="org/m"), {})["gateway"]
    assert yaml.safe_load(files["models.json"])["data"][0]["id"] == "org/m"
    assert "org/m deployment_chat" in files["models.map"].splitlines()
    assert "server chat.0 127.0.0.1:18100" in files["haproxy.cfg"]
