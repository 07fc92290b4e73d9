"""Environment variables that an operator sets for an engine: taken over, or refused where they do harm or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning.flags import settings_of
from gpuready.planning.flags.table import table
from gpuready.planning.support.capability import engines

_RESERVED = {
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NVIDIA_VISIBLE_DEVICES": "the plan says which GPUs a replica has",
    r"VLLM_PORT": "vLLM takes it for its internal ports, and the API's port is each replica's own",
    r"VLLM_HOST_IP|SGL(ANG)?_HOST_IP|(NCCL|GLOO)_SOCKET_IFNAME|MASTER_(ADDR|PORT)": "engines meet on loopback",
    r"HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|HF_ENDPOINT|VLLM_USE_MODELSCOPE": "engines fetch nothing",
    r"VLLM_SERVER_DEV_MODE": "its paths pause, empty and change a serving engine, and ask for no key",
    r"VLLM_PLUGINS|SGLANG_PLUGINS": "plugins are code that no lock names",
    r"PYTHONOPTIMIZE": "without Python's assertions CVE-2026-41523 is open",
    r"LD_PRELOAD|LD_LIBRARY_PATH|PYTHON(PATH|HOME|STARTUP)": "it would run other code than the locked one",
    r"HOME|PATH|USER|LANG|TMPDIR|XDG_CACHE_HOME|[A-Z]+_DIRECTORY|GPUREADY_.*": "gpuready itself sets it",
}
_SECRET = re.compile(r"(.*_)?(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS)|AWS_.*", re.IGNORECASE)
_PREFIXES = {"vllm": ("VLLM_",), "sglang": ("SGLANG_", "SGL_"), "tensorrt_llm": ("TRTLLM_", "TLLM_")}
_ELSEWHERE = {
    **dict.fromkeys(("MAX_SEQUENCE_LENGTH", "MAX_MODEL_LEN", "MAX_MODEL_LENGTH", "MAX_TOTAL_TOKENS"), "max_model_len"),
    **dict.fromkeys(("MAX_INPUT_LENGTH", "MAX_INPUT_TOKENS"), "max_model_len"),
    **dict.fromkeys(("MAX_BATCH_PREFILL_TOKENS", "MAX_BATCH_TOTAL_TOKENS"), "max_num_batched_tokens"),
    **dict.fromkeys(("MAX_CONCURRENT_REQUESTS", "MAX_NUM_SEQS"), "max_num_seqs"),
    **dict.fromkeys(("TENSOR_PARALLEL_SIZE", "NUM_SHARD"), "tp"),
    **dict.fromkeys(("GPU_MEMORY_UTILIZATION", "CUDA_MEMORY_FRACTION"), "memory_fraction"),
    **dict.fromkeys(("QUANTIZE", "QUANTIZATION"), "quantization"),
}
"""What other servers and images read from the environment, each with the setting of `Run` that says it."""


def refused(where: str, declared: Mapping[str, Any], engine: str, version: str) -> list[Failure]:
    """Return what is refused of the variables that a deployment declares."""
    flag_of = {known.field: name for name, known in settings_of(engine, version).items()}
    return [
        Failure("plan.environment", f"{where}, environment.{name} is refused", *wrong)
        for name in declared
        if (wrong := _wrong(name, engine, version, flag_of))
    ]


def _wrong(name: str, engine: str, version: str, flag_of: Mapping[str, str]) -> tuple[str, str] | None:
    for pattern, why in _RESERVED.items():
        if re.fullmatch(pattern, name):
            return why, "remove it"
    if _SECRET.fullmatch(name):
        return "it names a secret, and rendered files are no place for one", "remove it; engines need none"
    if name.upper() in _ELSEWHERE:
        flag = flag_of.get(_ELSEWHERE[name.upper()])
        return f"{engines()[engine]['title']} does not read it", f"set flags.{flag}" if flag else "remove it"
    other = next((one for one, own in _PREFIXES.items() if one != engine and name.startswith(own)), None)
    if other:
        return f"{engines()[other]['title']} alone reads it, and the engine is {engine}", "remove it"
    return _unread(name, engine, version) if name.startswith(_PREFIXES[engine]) else None


def _unread(name: str, engine: str, version: str) -> tuple[str, str] | None:
    known = table(engine, version)
    if name in known.variables or not known.complete:
        return None
    why = f"{known.title} does not read it"
    if elsewhere := known.variable_elsewhere(name):
        return f"{why}; {elsewhere}", "remove it"
    near = known.near_variable(name)
    return why, f"did you mean {near}?" if near else "remove it"
