"""SGLang's options: srt/server_args.py of its releases, read from the wheels on PyPI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpuready.planning.options.entry import Entry, Served, kv_tokens
from gpuready.planning.options.vllm import as_text


def options(served: Served) -> Iterator[tuple[str, Entry]]:
    """Yield all options of a deployment but the operator's own, each with its group."""
    run = served.run
    yield "model", Entry("model-path", served.place["model_path"], "the files that stage models checked")
    yield "model", Entry("served-model-name", served.declared["model"], "the gateway asks for it by this name")
    if served.option.wish.task == "embed":
        yield "model", Entry("is-embedding", True, "task of the deployment")
    yield "network", Entry("host", "127.0.0.1", "the gateway is the only door")
    yield "network", Entry("log-level-http", "warning", "the gateway logs every request")
    yield "network", Entry("enable-metrics", True, "its figures are compared with the plan")
    for group, setting, always in (
        ("model", "dtype", False),
        ("model", "quantization", False),
        ("parallel", "tp", True),
        ("parallel", "pp", run.pp > 1),
        ("memory", "memory_fraction", True),
        ("memory", "kv_dtype", False),
        ("memory", "block_size", False),
        ("batching", "max_model_len", True),
        ("batching", "max_num_seqs", True),
        ("batching", "graph_max_batch", False),
    ):
        entry = served.entry(setting)
        if entry and (always or entry.value not in (None, 1)):
            yield group, entry
    if run.kv_bytes is not None:
        yield "memory", kv_tokens("max-total-tokens", served)
    chunk = run.chunked_prefill_size or run.max_num_batched_tokens
    if chunk:
        yield "batching", Entry("chunked-prefill-size", chunk, served.why("max_num_batched_tokens"))
    if run.enforce_eager:
        # Of a flag that it calls deprecated 0.5.23 takes no word from a file, only from the command line (run).
        phases = served.flag("graph_max_batch") == "cuda-graph-max-bs-decode"
        words = {f"cuda-graph-backend-{phase}": "disabled" for phase in ("decode", "prefill")}
        for name, value in words.items() if phases else (("disable-cuda-graph", True),):
            yield "batching", Entry(name, value, served.why("enforce_eager"))
    if run.prefix_caching is False:
        yield "cache", Entry("disable-radix-cache", True, served.why("prefix_caching"))


def written(entry: Entry) -> Entry | None:
    """Return an option as SGLang's configuration file takes it; None where it says nothing.

    server_args_config_parser.py: what is null would be the text None, a mapping is written as Python would, and what is
    false is left out of flags that only switch on, which is what it means there.
    """
    return None if entry.value is None else replace(entry, value=as_text(entry.value))
