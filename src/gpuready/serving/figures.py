"""What an engine says of its own memory, asked over loopback once it gave a token.

Each engine has one parser, pure text to figures. vLLM's was tried on recorded answers of its CPU build; those of SGLang
and TensorRT-LLM follow their sources and were not run. What an engine does not say is None, never 0.
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any

READ_SECONDS = 10
"""TensorRT-LLM waits two seconds for its own statistics; the others answer at once."""
LONGEST = 16 * 1024**2
"""Bytes of an answer; metrics of a busy engine are some hundred thousand."""
# An engine is on this server: a proxy that the environment names must not stand between.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Figures:
    """An engine's own figures. GiB are per GPU; where its ranks or groups differ, of the one with least."""

    kv_tokens: int | None = None
    """Tokens that its KV cache holds, as the engine counts them."""
    kv_gib: float | None = None
    blocks: int | None = None
    block_tokens: int | None = None
    kv_dtype: str | None = None
    memory_fraction: float | None = None
    """The share of memory that the engine was told to use, by its own meaning."""
    kv_bytes_set: int | None = None
    """Bytes of KV cache per GPU that it was told to take, whatever the share is."""
    weights_gib: float | None = None
    graphs_gib: float | None = None

    @property
    def tell_the_cache(self) -> bool:
        """Say whether they tell how large the KV cache is."""
        return self.kv_tokens is not None or (self.blocks is not None and self.block_tokens is not None)


def from_vllm(text: str) -> Figures:
    """Read vLLM's metrics: the labels of `vllm:cache_config_info`, one line per engine of a data-parallel group.

    `num_gpu_blocks` is the sum over the group (v1/engine/core_client.py), and None in versions that take the labels
    too early. `kv_cache_size_tokens` is there from 0.24 on (config/cache.py) and counts for one engine.
    """
    lines = [dict(_LABEL.findall(line)) for line in _samples(text, "vllm:cache_config_info")]
    if not lines:
        return Figures()
    first = lines[0]
    blocks, told = _count(first.get("num_gpu_blocks")), _count(first.get("kv_cache_memory_bytes"))
    return Figures(
        kv_tokens=_least(_count(one.get("kv_cache_size_tokens")) for one in lines),
        blocks=blocks // len(lines) if blocks else None,
        block_tokens=_count(first.get("block_size")),
        kv_dtype=first.get("cache_dtype"),
        memory_fraction=None if told else _number(first.get("gpu_memory_utilization")),
        kv_bytes_set=told,
    )


def from_sglang(text: str) -> Figures:
    """Read SGLang's `/server_info`: settings, and one state per data-parallel group with its `memory_usage`.

    Its GB are GiB (mem_cache/memory_pool.py divides by 2^30), rounded to two or three digits. CUDA graphs are one
    number (`cuda_graph`, later `graph`) or, in newer versions, one per phase (managers/scheduler_components).
    """
    info = _object(json.loads(text))
    states = [_object(one) for one in _list(info.get("internal_states"))]
    usages = [_object(one.get("memory_usage")) for one in states]
    tokens = _least(_count(one.get("token_capacity")) for one in usages) or _count(info.get("max_total_num_tokens"))
    page = _count(info.get("page_size"))
    return Figures(
        kv_tokens=tokens,
        kv_gib=_least(_number(one.get("kvcache")) for one in usages),
        blocks=tokens // page if tokens and page else None,
        block_tokens=page,
        kv_dtype=info.get("kv_cache_dtype") if isinstance(info.get("kv_cache_dtype"), str) else None,
        memory_fraction=_number(info.get("mem_fraction_static")),
        weights_gib=_least(_number(one.get("weight")) for one in usages),
        graphs_gib=_least(_graphs(one.get("graph", one.get("cuda_graph"))) for one in usages),
    )


def from_tensorrt_llm(text: str) -> Figures:
    """Read TensorRT-LLM's `/metrics`: a list of what its last iterations were like, each with `kvCacheStats`.

    The list is empty where the engine was started without `enable_iter_perf_stats` (docs, trtllm-serve), and reading
    empties it. Its blocks include those that host memory holds for the older cache manager.
    """
    stats = [_object(_object(one).get("kvCacheStats")) for one in _list(json.loads(text))]
    return _of_blocks([(_count(one.get("maxNumBlocks")), _count(one.get("tokensPerBlock"))) for one in stats])


def from_tensorrt_llm_gauges(text: str) -> Figures:
    """Read TensorRT-LLM's `/prometheus/metrics` (metrics/collector.py), there with `return_perf_metrics` alone."""
    names = ("trtllm_kv_cache_max_blocks", "trtllm_kv_cache_tokens_per_block")
    blocks, tokens = ([_count(line.split()[-1]) for line in _samples(text, name)] for name in names)
    return _of_blocks(list(zip(blocks, tokens)))  # noqa: B905 - Python 3.10 reads it


def _of_blocks(pairs: list[tuple[int | None, int | None]]) -> Figures:
    """Return the figures of the latest pair of blocks and tokens per block that is whole."""
    for blocks, tokens in reversed(pairs):
        if blocks and tokens:
            return Figures(kv_tokens=blocks * tokens, blocks=blocks, block_tokens=tokens)
    return Figures()


Source = tuple[str, Callable[[str], Figures]]
SOURCES: Mapping[str, tuple[Source, ...]] = {
    "vllm": (("/metrics", from_vllm),),
    "sglang": (("/server_info", from_sglang), ("/get_server_info", from_sglang)),
    "tensorrt_llm": (("/metrics", from_tensorrt_llm), ("/prometheus/metrics", from_tensorrt_llm_gauges)),
}
"""Where each engine tells its figures, newest way first."""


def read(engine: str, port: int, address: str = "127.0.0.1") -> tuple[dict[str, Any] | None, str]:
    """Return what an engine says of itself, or None and why; never raises, because the proof is its token."""
    said = f"gpuready knows no figures of {engine!r}"
    for path, parse in SOURCES.get(engine, ()):
        url = f"http://{address}:{port}{path}"
        try:
            found = parse(_text_of(url))
        except urllib.error.HTTPError as error:
            said = f"{url}: HTTP {error.code}"
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            said = f"{url}: {getattr(error, 'reason', error) or type(error).__name__}"
        else:
            if found.tell_the_cache:
                return {"source": path, **{key: value for key, value in asdict(found).items() if value is not None}}, ""
            said = f"{url} does not tell the size of the KV cache"
    return None, said


def _text_of(url: str) -> str:
    with _DIRECT.open(url, timeout=READ_SECONDS) as answer:
        return str(answer.read(LONGEST).decode(errors="replace"))


def _samples(text: str, name: str) -> Iterator[str]:
    """Return the lines of a metric: its name, labels or none, and its value."""
    return (line for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    """Return a number above 0, also one that is written as text; None for everything else."""
    try:
        found = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return None
    return found if 0 < found < math.inf else None


def _count(value: Any) -> int | None:
    found = _number(value)
    return int(found) or None if found else None


def _graphs(value: Any) -> float | None:
    phases = [_number(one) for one in value.values()] if isinstance(value, dict) else [_number(value)]
    return sum(one for one in phases if one) or None


def _least(values: Iterator[Any]) -> Any:
    """Return the least of what is known."""
    return min((value for value in values if value is not None), default=None)


_IN_FLIGHT: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
}
"""Gauges that say how many requests an engine has; TensorRT-LLM 1.0.0 has none that can be read twice."""


def running(engine: str, port: int, address: str = "127.0.0.1") -> int | None:
    """Return how many requests an engine works on or has waiting; None where it does not say."""
    try:
        text = _text_of(f"http://{address}:{port}/metrics") if engine in _IN_FLIGHT else ""
    except (OSError, HTTPException, ValueError):
        return None
    values = [_gauge(line) for name in _IN_FLIGHT.get(engine, ()) for line in _samples(text, name)]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _gauge(line: str) -> int | None:
    try:
        return int(float(line.rpartition(" ")[2]))
    except (ValueError, OverflowError):
        return None
