"""What the probe says of engines' KV caches: as recorded in the plan, and as each engine tells it now."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.verify.probe.reading import text_of

LABELS = re.compile(r'([a-z_]+)="([^"]*)"')


def caches(record: dict[str, Any]) -> dict[str, Any]:
    """Return for each replica what its plan expects and what its engine has; `has` is empty where it does not say."""
    return {
        f"{one['name']}.{part['index']}": {
            "planned": _planned(one),
            "has": has(str(one.get("engine")), part["port"]),
        }
        for one in record["plan"]["deployments"]
        for part in one["replicas"]
    }


def _planned(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers alone: a plan may hold what is not for everybody."""
    memory, stand_in = deployment.get("memory") or {}, deployment.get("stand_in") or {}
    tokens = memory.get("kv_tokens")
    return {
        "tokens": tokens if isinstance(tokens, dict) else {"value": tokens},
        "blocks": memory.get("blocks"),
        "bytes": stand_in.get("kv_bytes"),
        "bytes_per_token": stand_in.get("bytes_per_token"),
    }


def has(engine: str, port: int) -> dict[str, int]:
    """Ask an engine: `tokens` as it counts them, `blocks` and `block_tokens`, each where it says so."""
    url = f"http://127.0.0.1:{port}"
    if engine == "vllm":
        return of_vllm(text_of(f"{url}/metrics") or "")
    if engine == "sglang":
        return of_sglang(text_of(f"{url}/server_info") or text_of(f"{url}/get_server_info") or "")
    # Its other figures, at /metrics, are gone once they were read.
    return of_tensorrt_llm(text_of(f"{url}/prometheus/metrics") or "")


def of_vllm(text: str) -> dict[str, int]:
    """Read the labels of vLLM's cache configuration; engines that share requests sum up their blocks."""
    lines = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    labels = [dict(LABELS.findall(line)) for line in lines]
    told = {
        "tokens": [one.get("kv_cache_size_tokens", "") for one in labels],
        "blocks": [one.get("num_gpu_blocks", "") for one in labels],
        "block_tokens": [one.get("block_size", "") for one in labels],
    }
    least = {key: min(int(one) for one in values) for key, values in told.items() if _all_numbers(values)}
    if "blocks" in least:
        least["blocks"] //= len(lines)
    return {key: value for key, value in least.items() if value > 0}


def _all_numbers(values: list[str]) -> bool:
    return bool(values) and all(value.isdigit() for value in values)


def of_sglang(text: str) -> dict[str, int]:
    """Read SGLang's tokens from its state, of the group that has least."""
    try:
        states = json.loads(text)["internal_states"]
        return {"tokens": min(int(one["memory_usage"]["token_capacity"]) for one in states)}
    except (ValueError, KeyError, TypeError):
        return {}


def of_tensorrt_llm(text: str) -> dict[str, int]:
    """Read TensorRT-LLM's gauges of blocks and of tokens in each."""
    told = {}
    for name, key in (("max_blocks", "blocks"), ("tokens_per_block", "block_tokens")):
        found = re.search(rf"^trtllm_kv_cache_{name}(?:{{.*}})? ([0-9.e+]+)$", text, re.MULTILINE)
        if found and float(found[1]) >= 1:
            told[key] = int(float(found[1]))
    return {"tokens": told["blocks"] * told["block_tokens"], **told} if len(told) == 2 else told
