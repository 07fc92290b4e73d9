"""vLLM's options: engine/arg_utils.py and entrypoints/openai/cli_args.py of its releases' wheels on PyPI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpuready.planning.features import feature_flags
from gpuready.planning.memory.run import Run
from gpuready.planning.options.entry import Entry, Served

DRAIN_SECONDS = 60
"""How long a stop lets running requests finish; the unit's TimeoutStopSec is longer."""
_WHEN_CHANGED = {
    "model": ("dtype", "quantization"),
    "parallel": ("pp", "dcp"),
    "memory": ("kv_dtype", "block_size"),
    "batching": ("graph_max_batch", "enforce_eager"),
}
"""Settings that are written only where they differ from the engine's own, by group."""


def options(served: Served) -> Iterator[tuple[str, Entry]]:
    """Yield all options of a deployment but the operator's own, each with its group."""
    yield "model", Entry("model", served.place["model_path"], "the files that stage models checked")
    yield "model", Entry("served-model-name", served.declared["model"], "the gateway asks for it by this name")
    yield "network", Entry("host", "127.0.0.1", "the gateway is the only door")
    yield "network", Entry("disable-uvicorn-access-log", True, "the gateway logs every request")
    yield from _of_run(served)
    for name, value in feature_flags("", served.declared, served.run.version, {})[0].items():
        group = "model" if name in ("task", "runner", "convert") else "cache" if "offload" in name else "features"
        yield group, Entry(name, value, _FEATURES.get(name, "declared"))
    drain = served.flag("shutdown_timeout")
    if drain:
        yield "stop", Entry(drain, DRAIN_SECONDS, "a stop lets running requests finish, in seconds")


_FEATURES = {
    "task": "task of the deployment",
    "runner": "task of the deployment",
    "convert": "task of the deployment",
    "speculative-config": "draft of the deployment; its weights and KV cache are counted",
    "enable-lora": "lora of the deployment",
    "max-loras": "slots of lora: so many adapters in one batch",
    "max-lora-rank": "rank of lora",
    "lora-modules": "adapters of lora",
    "kv-offloading-size": "kv_offload_gib: RAM for KV that the GPU has no room for, in GiB",
}


def _of_run(served: Served) -> Iterator[tuple[str, Entry]]:
    run, usual = served.run, Run(served.run.engine, served.run.version)
    for group, setting in (
        ("parallel", "tp"),
        ("memory", "memory_fraction"),
        ("memory", "kv_bytes"),
        ("batching", "max_model_len"),
        ("batching", "max_num_seqs"),
        ("batching", "max_num_batched_tokens"),
        *((group, setting) for group, settings in _WHEN_CHANGED.items() for setting in settings),
    ):
        entry = served.entry(setting)
        always = setting not in _WHEN_CHANGED.get(group, ())
        if entry and (always or entry.value != getattr(usual, setting)):
            yield group, entry
    caching = served.option.estimate.run.prefix_caching if run.prefix_caching is None else run.prefix_caching
    if served.option.wish.task == "generate" and caching is not None and (caching or served.is_set("prefix_caching")):
        yield "cache", Entry("enable-prefix-caching", caching, served.why("prefix_caching"))


def written(entry: Entry) -> Entry | None:
    """Return an option as vLLM's configuration file takes it; None where it says nothing.

    utils/argparse_utils.py, load_config_file: what is false is skipped, so `no-` says it, and what is null would be the
    text None. Releases before 0.12 write a mapping as Python would, which their parser does not read: all take JSON.
    """
    if entry.value is None:
        return None
    if entry.value is False:
        name = entry.name.removeprefix("no-") if entry.name.startswith("no-") else f"no-{entry.name}"
        return replace(entry, name=name, value=True)
    return replace(entry, value=as_text(entry.value))


def as_text(value: Any) -> Any:
    """Return a mapping, or the mappings in a list, as JSON; all else as it is."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    return [as_text(one) for one in value] if isinstance(value, list) else value
