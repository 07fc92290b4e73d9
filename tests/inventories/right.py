"""Right inventories, as varied as operators write them: all of them have to be accepted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.inventories.case import GIB, as_yaml, recorded_facts

from gpuready import catalog

COUNT = 100
CARDS = {key: card for key, card in catalog.load("gpus")["cards"].items() if float(card["compute"]) >= 7.5}


@dataclass(frozen=True)
class Right:
    """One host that is declared rightly."""

    style: str
    ending: str
    content: bytes
    variables: dict[str, Any]
    """What the file means."""
    facts: dict[str, Any] = field(default_factory=dict)
    evaluated: bool = False
    """Holds templates."""


def _deployments(dice: random.Random, count: int, card: str) -> list[dict[str, Any]]:
    workload = {
        "prompt_tokens": {"p50": dice.randrange(1, 900), "p99": dice.randrange(900, 3000)},
        "output_tokens": {"p50": 1, "p99": dice.randrange(1, 500)},
        "concurrency": dice.choice([1, 8, 64, 100]),
        "preemption_probability": dice.choice([0.01, "0.05", 0.0001, 0.5]),
    }
    one: dict[str, Any] = {
        "name": dice.choice(["chat", "a", "code-2", "x" * 32]),
        "model": dice.choice(["org/llama", "Llama-3.3_70B:free", "a/b/c@main", "9b+x"]),
        "model_path": dice.choice(["/data/llama", "/srv/m~1/a=b,c/llama@1+2", "/data/llama/"]),
        "engine": "vllm",
        "gpus": dice.choice([1, count, [count - 1], list(range(count)), "1"]),
        "workload": workload,
    }
    if dice.random() < 0.5:
        one["flags"] = dice.choice(
            [
                {},
                {"max_num_seqs": 8},
                {"--enable-prefix-caching": True, "quantization": "fp8"},
                {"gpu-memory-utilization": 0.85, "max-num-batched-tokens": "4096"},
                {"compilation-config": {"level": 3}, "no-enable-chunked-prefill": True},
                {"kv-cache-dtype": "fp8", "seed": 0, "chat-template": None},
                {"enforce-eager": True, "block-size": 32, "dtype": "auto"},
            ]
        )
        if float(CARDS[card]["compute"]) < 8 and "kv-cache-dtype" in one["flags"]:
            del one["flags"]["kv-cache-dtype"]
    one |= {name: value for name, value in _wishes(dice).items() if dice.random() < 0.3}
    if count > 1 and dice.random() < 0.4:
        other = {**one, "name": "second", "model": "org/second", "gpus": dice.choice([1, [count - 1]])}
        return [{**one, "gpus": dice.choice([1, [0]])}, other]
    if "flags" not in one and dice.random() < 0.2:
        return [{**one, "gpus": {"shared": 0}}, {**one, "name": "second", "model": "org/second", "gpus": {"shared": 0}}]
    return [one]


def _wishes(dice: random.Random) -> dict[str, Any]:
    return {
        "task": dice.choice(["generate", "embed", "rerank", "classify", None]),
        "allow_lossy": dice.choice([True, False]),
        "headroom_gib": dice.choice([0, 2, 1.5, "0.5", None]),
        "draft": dice.choice([{"model": "org/small", "model_path": "/data/s", "tokens": "5"}, None]),
        "lora": dice.choice([{"slots": 4}, {"slots": 1, "rank": 64}, None]),
        "kv_offload_gib": dice.choice([0, 16, "0.5"]),
        "environment": dice.choice([{}, {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": 8, "VLLM_LOGGING_LEVEL": "DEBUG"}]),
    }


def _knobs(dice: random.Random) -> dict[str, Any]:
    choices: list[tuple[str, list[Any]]] = [
        ("base_lock_seconds", [1, 86400, "60"]),
        ("base_shm_percent", [None, 1, 95]),
        ("base_packages", [["nftables"], ["nftables", "libc6", "g++"]]),
        ("base_firewall_enabled", [True, False]),
        (
            "base_firewall_open",
            [[], [{"port": 9100}], [{"port": "9100-9110", "proto": "udp", "source": ["10.0.0.0/8"]}]],
        ),
        ("base_firewall_ssh_sources", [[], ["10.0.0.1", "2001:db8::/32"]]),
        ("base_firewall_revert_seconds", [20, 3600]),
        ("base_limits", [[], [{"domain": "@gpu", "type": "-", "item": "memlock", "value": "unlimited"}]]),
        (
            "base_sysctl",
            [{}, {"vm.swappiness": 10, "net.ipv4.tcp_rmem": "4096 87380 6291456", "vm.max_map_count": None}],
        ),
        ("cuda_version", ["12.8"]),
        ("cuda_lock_seconds", [600]),
        ("engines_index_url", ["", "https://user:word@pypi.example/simple"]),
        ("engines_find_links", [[], ["/mnt/wheels", "https://wheels.example/x"]]),
        ("gateway_port", [1, 8000, 18099, "443"]),
        ("gateway_bind", ["*", "0.0.0.0", "::1", "192.0.2.1"]),
        ("gateway_hold_seconds", [0, 3600]),
        ("gateway_body_limit_kib", [16, 65536]),
        (
            "gpuready_proxy",
            [None, {"http": "http://proxy:3128"}, {"https": "https://u:p%40@proxy:1", "no_proxy": [".lan"]}],
        ),
        ("gpuready_replan", [True, False]),
        ("unrelated", ["mine", {"a": [1]}, None]),
    ]
    picked = dice.sample(choices, dice.randrange(0, 6))
    return {name: dice.choice(values) for name, values in picked}


def _expected(dice: random.Random) -> dict[str, Any]:
    known = {"cpu_cores": 96, "ram_gib": 2000, "nvme_count": 8, "nvswitch_count": 4, "nvlink_links_per_gpu": 18}
    return {name: dice.choice([known[name], None]) for name in dice.sample(sorted(known), dice.randrange(0, 4))}


def _facts(card: str, count: int, paths: list[str]) -> dict[str, Any]:
    one = CARDS[card]
    good = recorded_facts()
    model = {**good["models"]["/data/llama"], "weight_bytes": 3 * GIB}
    gpus = [{**gpu, "name": one["nvml_names"][0]} for gpu in good["nvml"]["gpus"][:1]] * count
    return recorded_facts(
        gpus=[{"address": str(index), "device_id": one["pci"][0]} for index in range(count)],
        nvml={**good["nvml"], "gpus": [{**gpu, "index": index} for index, gpu in enumerate(gpus)]},
        models=dict.fromkeys(paths, model),
    )


def _flow(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode()


def _quoted(values: dict[str, Any]) -> bytes:
    return "".join(f'"{name}": {json.dumps(value)}\n' for name, value in values.items()).encode()


def _anchored(values: dict[str, Any]) -> bytes:
    first, *rest = values["gpuready_deployments"]
    other = {name: value for name, value in values.items() if name != "gpuready_deployments"}
    lines = ["the_load: &load", *(f"  {key}: {json.dumps(one)}" for key, one in first["workload"].items())]
    lines += [f"{name}: {json.dumps(value)}" for name, value in other.items()] + ["gpuready_deployments:"]
    for one in (first, *rest):
        keys = {**one, "workload": None}
        lines += [
            f"{'- ' if not n else '  '}{key}: {json.dumps(value)}"
            for n, (key, value) in enumerate(keys.items())
            if key != "workload"
        ]
        lines += ["  workload: {<<: *load}" if one is first else "  workload: *load"]
    return ("\n".join(lines) + "\n").encode()


def _commented(values: dict[str, Any]) -> bytes:
    return ("# Für den Kunden in 新加坡\n" + as_yaml(values) + "...\n").encode()


STYLES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "block": lambda values: as_yaml(values).encode(),
    "JSON": _flow,
    "quoted keys": _quoted,
    "anchors and merge keys": _anchored,
    "comments and an end": _commented,
    "CRLF": lambda values: as_yaml(values).replace("\n", "\r\n").encode(),
    "byte order mark": lambda values: b"\xef\xbb\xbf" + as_yaml(values).encode(),
    "templates": lambda values: as_yaml(_templated(values)).encode(),
}


def _templated(values: dict[str, Any]) -> dict[str, Any]:
    count = values["gpuready_gpu_count"]
    return {
        **values,
        "my_card": values["gpuready_gpu_model"],
        "my_count": count,
        "gpuready_gpu_model": "{{ my_card }}",
        "gpuready_gpu_count": "{{ my_count | int }}",
        "gpuready_stack": "{{ 'cu' ~ (120 + 8) }}",
        "gpuready_replan": "{{ inventory_hostname == 'nobody' }}",
    }


def generate(seed: int) -> Iterator[Right]:
    """Yield the right inventories; the same seed gives the same."""
    dice = random.Random(seed)  # noqa: S311 - to choose examples
    for number in range(COUNT):
        style = list(STYLES)[number % len(STYLES)]
        card = list(CARDS)[number % len(CARDS)]
        count = dice.choice([1, 2, 4, 8])
        deployments = _deployments(dice, count, card)
        values: dict[str, Any] = {
            "gpuready_gpu_model": dice.choice([card, *CARDS[card]["aliases"]]),
            "gpuready_gpu_count": dice.choice([count, str(count)]),
            "gpuready_stack": "cu128",
            "gpuready_deployments": deployments,
            **_knobs(dice),
        }
        if any(one.get("draft") for one in deployments):
            values["gpuready_accept_advisories"] = ["CVE-2026-54234"]
        if expected := _expected(dice):
            values["gpuready_expect"] = expected
        facts = _facts(card, count, [one["model_path"] for one in deployments])
        ending = ".json" if style == "JSON" else dice.choice([".yml", ".yaml", "/main.yml", "/10-base.yaml", ""])
        yield Right(style, ending, STYLES[style](values), values, facts, style == "templates")
