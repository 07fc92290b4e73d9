"""TensorRT-LLM's options: the fields of llmapi/llm_args.py (TorchLlmArgs), of which its file is made."""

from __future__ import annotations

from collections.abc import Iterator

from gpuready.planning.options.entry import Entry, Served, kv_tokens


def options(served: Served) -> Iterator[tuple[str, Entry]]:
    """Yield all options of a deployment but the operator's own, each with its group.

    Model, address and port stand on the command line, which alone takes them.
    """
    run = served.run
    yield "network", Entry("enable_iter_perf_stats", True, "its figures are compared with the plan")
    for group, setting, always in (
        ("model", "dtype", False),
        ("parallel", "tp", True),
        ("parallel", "pp", run.pp > 1),
        ("memory", "memory_fraction", True),
        ("memory", "kv_bytes", False),
        ("memory", "kv_dtype", False),
        ("memory", "block_size", False),
        ("batching", "max_model_len", True),
        ("batching", "max_num_seqs", True),
        ("batching", "max_num_batched_tokens", True),
        ("batching", "graph_max_batch", False),
        ("cache", "prefix_caching", False),
    ):
        entry = served.entry(setting)
        if entry and (always or entry.value not in (None, 1)):
            name = _NAMES.get(entry.name, entry.name)
            yield group, Entry(name, entry.value, entry.why)
    if run.kv_bytes is not None and served.flag("kv_bytes") is None:
        yield "memory", kv_tokens("kv_cache_config.max_tokens", served)


_NAMES = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size"}
"""Options that its command line spells otherwise than its file."""


def written(entry: Entry) -> Entry | None:
    """Return an option as its file takes it: YAML, of which it understands everything."""
    return entry
