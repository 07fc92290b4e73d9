"""What `trtllm-serve` takes: options of the command line, and keys of the file of `--extra_llm_api_options`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOG_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug", "trace")
OPTIONS: dict[str, type] = {
    "tokenizer": str,
    "host": str,
    "port": int,
    "max_beam_width": int,
    "max_batch_size": int,
    "max_num_tokens": int,
    "max_seq_len": int,
    "tp_size": int,
    "pp_size": int,
    "ep_size": int,
    "cluster_size": int,
    "gpus_per_node": int,
    "kv_cache_free_gpu_memory_fraction": float,
    "num_postprocess_workers": int,
    "extra_llm_api_options": str,
    "reasoning_parser": str,
    "metadata_server_config_file": str,
    "server_role": str,
}
"""Options with a value, each with its type."""
_GIVEN_BY_COMMAND = {
    "tokenizer": "tokenizer",
    "max_beam_width": "max_beam_width",
    "max_batch_size": "max_batch_size",
    "max_num_tokens": "max_num_tokens",
    "max_seq_len": "max_seq_len",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "ep_size": "moe_expert_parallel_size",
    "cluster_size": "moe_cluster_parallel_size",
    "gpus_per_node": "gpus_per_node",
    "num_postprocess_workers": "num_postprocess_workers",
    "trust_remote_code": "trust_remote_code",
    "reasoning_parser": "reasoning_parser",
}
"""Options by the argument that each becomes."""

NESTED: dict[str, frozenset[str]] = {
    "kv_cache_config": _names(
        "enable_block_reuse max_tokens max_attention_window sink_token_length free_gpu_memory_fraction host_cache_size "
        "onboard_blocks cross_kv_cache_fraction secondary_offload_min_priority event_buffer_max_size "
        "enable_partial_reuse copy_on_partial_reuse use_uvm dtype"
    ),
    "cuda_graph_config": frozenset(("batch_sizes", "max_batch_size", "enable_padding")),
    "moe_config": frozenset(("backend", "max_num_tokens", "load_balancer")),
    "scheduler_config": frozenset(("capacity_scheduler_policy", "context_chunking_policy", "dynamic_batch_config")),
}
"""Keys whose value is a mapping of which every key is known."""
FREE = frozenset(
    ("speculative_config", "lora_config", "peft_cache_config", "cache_transceiver_config", "torch_compile_config")
)
"""Keys whose value is a mapping that the stand-in does not judge."""
PLAIN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        _names(
            "tensor_parallel_size pipeline_parallel_size context_parallel_size gpus_per_node moe_cluster_parallel_size "
            "moe_tensor_parallel_size moe_expert_parallel_size iter_stats_max_iterations request_stats_max_iterations "
            "max_batch_size max_input_len max_seq_len max_beam_width max_num_tokens num_postprocess_workers "
            "stream_interval garbage_collection_gen0_threshold"
        ),
        (int,),
    ),
    **dict.fromkeys(
        _names(
            "skip_tokenizer_init trust_remote_code enable_attention_dp enable_lora enable_chunked_prefill "
            "gather_generation_logits disable_overlap_scheduler enable_mixed_sampler enable_trtllm_sampler "
            "enable_iter_perf_stats enable_iter_req_stats print_iter_log enable_autotuner enable_layerwise_nvtx_marker "
            "enable_min_latency force_dynamic_quantization"
        ),
        (bool,),
    ),
    **dict.fromkeys(
        _names(
            "model tokenizer tokenizer_mode dtype revision tokenizer_revision load_format guided_decoding_backend "
            "postprocess_tokenizer_dir reasoning_parser backend attn_backend allreduce_strategy checkpoint_format"
        ),
        (str,),
    ),
}
"""Keys of one value, each with its type; null stands for the default."""


class Parser(argparse.ArgumentParser):
    """Refuses as click does: two lines on standard error, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line and end."""
        found = message.removeprefix("unrecognized arguments: ")
        said = f"No such option: {found.split()[0]}" if found != message else message
        self.exit(2, f"Usage: trtllm-serve serve [OPTIONS] MODEL\n\nError: {said}\n")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `serve` is the command where none is named."""
    words = words[1:] if words[:1] == ["serve"] else words
    parser = Parser(prog="trtllm-serve", allow_abbrev=False, add_help=False)
    parser.add_argument("model")
    for name, kind in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--backend", choices=("pytorch", "trt", "_autodeploy"), default="pytorch")
    parser.add_argument("--log_level", choices=LOG_LEVELS, default="info")
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.set_defaults(host="localhost", port=8000, tp_size=1, pp_size=1, kv_cache_free_gpu_memory_fraction=0.9)
    return parser.parse_args(list(words))


def wrong(written: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the keys of the file, each with its place, in the words of the real argument classes."""
    for key, value in written.items():
        if key in NESTED:
            if not isinstance(value, Mapping):
                yield key, f"Input should be a valid dictionary or instance [input_value={value!r}]"
            else:
                yield from ((f"{key}.{one}", _extra(value[one])) for one in value if one not in NESTED[key])
        elif key in PLAIN:
            if value is not None and not _fits(value, PLAIN[key]):
                yield key, f"Input should be a valid {PLAIN[key][0].__name__} [input_value={value!r}]"
        elif key not in FREE:
            yield key, _extra(value)


def _extra(value: Any) -> str:
    kind = type(value).__name__
    return f"Extra inputs are not permitted [type=extra_forbidden, input_value={value!r}, input_type={kind}]"


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (isinstance(value, bool) == (bool in kinds))


def merged(given: argparse.Namespace) -> dict[str, Any]:
    """Return all arguments by name: what the file says wins over the command line, a whole mapping at a time.

    It ends the process with what is wrong, as the real one does before it loads anything.
    """
    arguments: dict[str, Any] = {name: getattr(given, option) for option, name in _GIVEN_BY_COMMAND.items()}
    arguments |= {
        "model": given.model,
        "backend": given.backend,
        "kv_cache_config": {"free_gpu_memory_fraction": given.kv_cache_free_gpu_memory_fraction},
    }
    written: Any = {}
    if given.extra_llm_api_options is not None:
        text = Path(given.extra_llm_api_options).read_text(encoding="utf-8")
        written = importlib.import_module("yaml").safe_load(text)
    if not isinstance(written, Mapping):
        sys.exit(f"TypeError: {given.extra_llm_api_options} holds no mapping")
    if problems := list(wrong(written)):
        lines = [f"{place}\n  {said}" for place, said in problems]
        count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''} for TorchLlmArgs"
        said = "\n".join([count, *lines])
        sys.exit(f"[TRT-LLM] [E] Failed to parse the arguments for the LLM constructor: {said}")
    return {**arguments, **written}
