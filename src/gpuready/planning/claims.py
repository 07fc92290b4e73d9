"""Recomputes the figures of claims on GPU memory, engines, cards and cost, which catalog/claims.yaml holds.

Each returns figures by name; names end in their unit. GB are 10^9 bytes, GiB 2^30. vLLM 0.19.1 with its defaults unless
the claim is of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuready import catalog
from gpuready.planning.compare.prices import price
from gpuready.planning.memory.device import cards, device, profiles
from gpuready.planning.memory.estimate import estimate
from gpuready.planning.memory.run import GIB, Device, Estimate, Run
from gpuready.planning.model import known
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.support import choices, newest, objections
from gpuready.planning.wish import Place

Figures = Mapping[str, float]

_GB = 1e9
_VLLM = "0.19.1"
_REQUEST = 1024 + 512
_SECONDS_OF_DAY = 86400
_DENSE_BF16_FLOPS = 989e12
"""H100 SXM, without sparsity. Source: NVIDIA H100 data sheet."""
_QWEN, _LLAMA2, _LLAMA2_13B = "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf"
_LLAMA, _LLAMA_FP8 = "meta-llama/Llama-3.1-8B-Instruct", "RedHatAI/Llama-3.1-8B-Instruct-FP8-dynamic"
_70B, _70B_FP8 = "meta-llama/Llama-3.3-70B-Instruct", "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"
_405B = "meta-llama/Llama-3.1-405B"


def _card(name: str, mig: str | None = None) -> Device:
    found = device(name, mig)
    if found is None:
        raise LookupError(name)
    return found


def _served(model: ModelFacts, card: str, mig: str | None = None, version: str = _VLLM, **settings: Any) -> Estimate:
    where = _card(card, mig)
    run = Run("vllm", version, dtype=choices(model, where, "vllm", version).dtype, **settings)
    return estimate(model, where, run)


def one_card_70b() -> Figures:
    """Return the weights of a 70B, and what FP8 leaves of one H100 for its KV cache."""
    fp8 = _served(known.facts(_70B_FP8), "h100", max_model_len=32768)
    return {
        "weights_gib": known.facts(_70B).weight_bytes / GIB,
        "card_gib": _card("h100").total_gib,
        "fp8_weights_gib": fp8.weights.value,
        "fp8_kv_gib": fp8.kv.value,
    }


def fragmentation_at_failure() -> Figures:
    """Return the reserved but unallocated memory of two published failures, as a part of all that was reserved."""
    return {"first_percent": 402 / (18.40 * 1024 + 402) * 100, "second_percent": 121 / (13.81 * 1024 + 121) * 100}


def usable_of_80gb() -> Figures:
    """Return what weights and KV cache of an 8B get of an H100."""
    found = _served(known.facts(_LLAMA), "h100")
    used = found.weights.value + found.kv.value
    return {"used_gib": used, "card_gib": found.total_gib, "used_percent": used / found.total_gib * 100}


def cost_of_waste() -> Figures:
    """Return a month's price of 8 x H100 times what is said to be wasted, and times what was measured."""
    whole = price(Place(_card("h100"), 8))
    assert whole is not None  # noqa: S101 - our own catalog
    measured = fragmentation_at_failure()["first_percent"] / 100
    return {
        "quarter_low_yuan": whole.low * 0.25,
        "quarter_high_yuan": whole.high * 0.25,
        "claimed_low_yuan": whole.low * 0.20,
        "claimed_high_yuan": whole.high * 0.40,
        "measured_high_yuan": whole.high * measured,
    }


def kv_of_7b() -> Figures:
    """Return the KV of 2,048 tokens for a 7B without and with grouped heads, in 16 bits."""
    return {
        "llama_2_7b_gb": known.facts(_LLAMA2).kv_bytes_per_token() * 2048 / _GB,
        "qwen_2_5_7b_gb": known.facts(_QWEN).kv_bytes_per_token() * 2048 / _GB,
    }


def kv_of_70b() -> Figures:
    """Return the KV of one request of 32,768 tokens for a 70B, with its 8 KV heads and as if it had 64."""
    model = known.facts(_70B)
    one = model.kv_bytes_per_token() * 32768 / _GB
    return {
        "request_gb": one,
        "eight_requests_gb": one * 8,
        "ten_requests_gb": one * 10,
        "without_groups_gb": one * model.heads / model.groups[0].kv_heads,
    }


def allocator_rounding() -> Figures:
    """Return what PyTorch's caching allocator takes for 1.5 MiB: rounded to 512 bytes, out of a segment of 20 MiB."""
    wanted = 3 * 2**19
    return {"taken_mib": -(-wanted // 512) * 512 / 2**20, "segment_mib": 20}


def block_waste() -> Figures:
    """Return the most that an unfinished block of 16 tokens leaves empty per request, for an 8B."""
    model, block = known.facts(_LLAMA), 16
    return {
        "tokens": block - 1,
        "mib": model.kv_bytes_per_token() * (block - 1) / 2**20,
        "percent_of_1536_tokens": (block - 1) / _REQUEST * 100,
    }


def pool_waste() -> Figures:
    """Return the most that TensorRT-LLM's pages of 32 tokens leave empty, as a part of a request of 1,536 tokens."""
    return {"percent": 31 / (_REQUEST + 31) * 100}


def shared_prefix() -> Figures:
    """Return what 64 requests of 1,536 tokens save when 512 or 900 of them are common to all."""

    def saved(common: int, requests: int = 64) -> float:
        # Only whole blocks of 16 tokens are shared.
        return common // 16 * 16 * (requests - 1) / (requests * _REQUEST) * 100

    return {"short_percent": saved(512), "long_percent": saved(900)}


def slices_of_h100() -> Figures:
    """Return the most slices of an H100, and the least memory of one."""
    table = profiles("h100")
    return {
        "most": max(one["count"] for one in table.values()),
        "smallest_gib": min(one["memory_mib"] for one in table.values()) / 1024,
    }


def engines_on_t4() -> Figures:
    """Return how many objections there are to each engine on a T4."""
    model, card = known.facts(_LLAMA), _card("t4")
    return {
        "vllm": len(objections(model, card, Run("vllm", _VLLM))),
        "sglang": len(objections(model, card, Run("sglang", "0.5.10.post1"))),
        "tensorrt_llm": len(objections(model, card, Run("tensorrt_llm", "1.0.0"))),
    }


def engines_on_a100_and_h100() -> Figures:
    """Return how many of the three engines run on each, and how many MIG profiles each has."""
    found: dict[str, float] = {}
    for name in ("a100-80gb", "h100"):
        word = name.partition("-")[0]
        found[f"{word}_engines"] = sum(
            newest(one, _card(name)) is not None for one in ("vllm", "sglang", "tensorrt_llm")
        )
        found[f"{word}_profiles"] = len(profiles(name))
    return found


def flash_attention_floor() -> Figures:
    """Return the lowest compute capability on which vLLM chooses FlashAttention, of the cards that gpuready sets up."""
    model = known.facts(_LLAMA)
    chosen = [
        one.compute
        for name in catalog.load("gpus")["cards"]
        if "FLASH_ATTN" in str(choices(model, one := _card(name), "vllm", _VLLM).attention_backend)
    ]
    return {"compute_capability": min(chosen)}


def max_num_seqs() -> Figures:
    """Return what 1,024 sequences at once cost a 7B on an A100 40GB, beside 256."""
    model = known.facts(_QWEN)
    few, many = (_served(model, "a100-40gb", max_num_seqs=one) for one in (256, 1024))
    return {"kv_256_gib": few.kv.value, "kv_1024_gib": many.kv.value, "lost_gib": few.kv.value - many.kv.value}


def requests_on_a100_40gb() -> Figures:
    """Return how many requests of 1,024 + 512 tokens the KV cache of a Qwen2.5-7B on an A100 40GB holds."""
    tokens = _served(known.facts(_QWEN), "a100-40gb").kv_tokens.value
    return {"thousand": tokens / 1000, "paged": tokens // _REQUEST, "reserved_at_4096": tokens // 4096}


def requests_on_t4() -> Figures:
    """Return the same for a 7B with 4 bit weights on a T4, with a context of 4,096."""
    found = _served(known.facts(f"{_QWEN}-AWQ"), "t4", max_model_len=4096)
    return {"weights_gib": found.weights.value, "kv_gib": found.kv.value, "paged": found.kv_tokens.value // _REQUEST}


def thirteen_on_v100s() -> Figures:
    """Return what a 13B in float16 leaves of a V100S, with the release that serves it and a context of 2,048."""
    found = _served(known.facts(_LLAMA2_13B), "v100s", version="0.8.5.post1", max_model_len=2048)
    return {
        "weights_gib": found.weights.value,
        "kv_gib": found.kv.value,
        "requests_of_1536": found.kv_tokens.value // _REQUEST,
    }


def weights_of_70b() -> Figures:
    """Return the weights of a 70B in 16 bits and in FP8, and what FP8 leaves of an 8B's."""
    whole, fp8 = known.facts(_70B).weight_bytes, known.facts(_70B_FP8).weight_bytes
    small, small8 = known.facts(_LLAMA).weight_bytes, known.facts(_LLAMA_FP8).weight_bytes
    return {
        "weights_gb": whole / _GB,
        "fp8_gb": fp8 / _GB,
        "fp8_percent": fp8 / whole * 100,
        "fp8_8b_percent": small8 / small * 100,
    }


def usable_of_eight_h100() -> Figures:
    """Return what weights and KV cache of a 70B get of 8 x H100 with TP 8."""
    found = _served(known.facts(_70B), "h100", tp=8)
    used = 8 * (found.weights.value + found.kv.value)
    total = 8 * found.total_gib
    return {"total_gib": total, "used_gib": used, "used_percent": used / total * 100, "kv_gib": 8 * found.kv.value}


def ten_trillion_tokens() -> Figures:
    """Return 10^13 tokens a day in tokens per second, beside what 8 x H100 could compute: 2 operations per weight."""
    wanted = 1e13 / _SECONDS_OF_DAY
    bound = 8 * _DENSE_BF16_FLOPS / (2 * known.facts(_LLAMA).parameters)
    return {"wanted_per_second": wanted, "bound_per_second": bound, "times": wanted / bound}


def speed_of_405b() -> Figures:
    """Return the tokens per second of one request when each weight of a 4 bit 405B is read once per token."""
    weights = known.facts(_405B, "awq").weight_bytes
    return {
        "weights_gb": weights / _GB,
        "bound_per_second": 8 * cards()["h100-80gb-sxm"]["bandwidth_gb_s"] * _GB / weights,
    }


def two_halves() -> Figures:
    """Return the KV caches of a 7B and of a 13B, each on half an H100."""
    seven, thirteen = (_served(known.facts(one), "h100", "3g.40gb") for one in (_QWEN, _LLAMA2_13B))
    return {
        "half_gib": _card("h100", "3g.40gb").total_gib,
        "kv_7b_gib": seven.kv.value,
        "kv_13b_gib": thirteen.kv.value,
        "multiprocessors_percent": _card("h100", "3g.40gb").share * 200,
    }


def kv_share() -> Figures:
    """Return the KV cache's part of the card for an 8B on an H100, and the tokens that a cap of 50 % would give up."""
    found = _served(known.facts(_LLAMA), "h100")
    share = found.kv.value / found.total_gib
    return {"share_percent": share * 100, "lost_thousand": found.kv_tokens.value * (1 - 0.5 / share) / 1000}


def seven_on_a100_40gb() -> Figures:
    """Return weights and KV cache of a 7B on an A100 40GB, and what part of the cache 10 GB left free would cost."""
    found = _served(known.facts(_LLAMA2), "a100-40gb")
    missing = 10 * _GB / GIB - found.free_gib
    return {
        "weights_gb": known.facts(_LLAMA2).weight_bytes / _GB,
        "qwen_weights_gb": known.facts(_QWEN).weight_bytes / _GB,
        "kv_gb": found.kv.value * GIB / _GB,
        "free_gb": found.free_gib * GIB / _GB,
        "lost_percent": missing / found.kv.value * 100,
    }


def four_bits_on_a100_40gb() -> Figures:
    """Return the same with 4 bit weights: Llama-2-7B, and Qwen2.5-7B, whose embeddings are larger."""
    whole, four = (_served(known.facts(one), "a100-40gb") for one in (_LLAMA2, f"{_LLAMA2}-AWQ"))
    return {
        "weights_gb": known.facts(f"{_LLAMA2}-AWQ").weight_bytes / _GB,
        "qwen_weights_gb": known.facts(f"{_QWEN}-AWQ").weight_bytes / _GB,
        "kv_gb": four.kv.value * GIB / _GB,
        "times": four.kv_tokens.value / whole.kv_tokens.value,
    }


def four_bits_save() -> Figures:
    """Return what 4 bits save of the weights of a 7B and of a 70B, and KV bytes per token with and without."""
    saved = {
        one: (1 - known.facts(name, "awq").weight_bytes / known.facts(name).weight_bytes) * 100
        for one, name in (("saved_7b_percent", _QWEN), ("saved_70b_percent", _70B))
    }
    return {
        **saved,
        "kv_bytes_per_token": known.facts(_QWEN).kv_bytes_per_token(),
        "kv_bytes_per_token_awq": known.facts(_QWEN, "awq").kv_bytes_per_token(),
        "kv_bytes_per_token_fp8_kv": known.facts(_QWEN).kv_bytes_per_token(1),
    }


def v100s_arithmetic() -> Figures:
    """Return the FP32 arithmetic of a V100S: two operations per core and cycle at its highest clock, 1,597 MHz."""
    return {"tflops": 5120 * 2 * 1597e6 / 1e12}


def batched_tokens() -> Figures:
    """Return what 8,192 batched tokens instead of 2,048 cost an 8B on an H100 80GB."""
    few, many = (_served(known.facts(_LLAMA), "h100", max_num_batched_tokens=one) for one in (2048, 8192))
    return {"gib": few.kv.value - many.kv.value, "percent_of_kv": (few.kv.value - many.kv.value) / many.kv.value * 100}


def even_ranks() -> Figures:
    """Return the weights of a 70B per GPU with TP 4, and the NVLink of each card."""
    found = _served(known.facts(_70B), "h100", tp=4)
    return {
        "weights_gib": found.weights.value,
        "a100_nvlink_gb_s": cards()["a100-80gb-sxm"]["nvlink_gb_s"],
        "h100_nvlink_gb_s": cards()["h100-80gb-sxm"]["nvlink_gb_s"],
    }


def discounts() -> Figures:
    """Return what a T4 and a machine of 8 x H100 cost by term, in yuan a month."""

    def of(card: str, count: int, term: str) -> float:
        found = price(Place(_card(card), count), term)
        assert found is not None  # noqa: S101 - our own catalog
        return found.low

    return {
        "t4_yuan": of("t4", 1, "month"),
        "t4_quarter_yuan": of("t4", 1, "quarter"),
        "t4_year_yuan": of("t4", 1, "year"),
        "h100_machine_year_yuan": of("h100", 8, "year"),
    }


def slice_against_card() -> Figures:
    """Return what a MIG slice of an H100 costs a month, and an eighth of a machine of 8 x H100."""
    part, whole = price(Place(_card("h100", "3g.40gb"), 1)), price(Place(_card("h100"), 1))
    assert part is not None  # noqa: S101 - our own catalog
    assert whole is not None  # noqa: S101 - our own catalog
    return {
        "slice_low_yuan": part.low,
        "slice_high_yuan": part.high,
        "card_low_yuan": whole.low,
        "card_high_yuan": whole.high,
    }


def smallest_slice_of_a100() -> Figures:
    """Return the smallest MIG slice of an A100 40GB, beside a 7B with 4 bit weights."""
    return {
        "slice_gib": _card("a100-40gb", "1g.5gb").total_gib,
        "most_slices": profiles("a100-40gb")["1g.5gb"]["count"],
        "weights_gib": known.facts(f"{_QWEN}-AWQ").weight_bytes / GIB,
    }


def prices_per_gib() -> Figures:
    """Return the yuan a month for a GiB of GPU memory, by list price."""
    found: dict[str, float] = {}
    for name, count in (("t4", 1), ("v100s", 1), ("a100-40gb", 1), ("a100-80gb", 8), ("h100", 8)):
        whole = price(Place(_card(name), count))
        assert whole is not None  # noqa: S101 - our own catalog
        found[f"{name.replace('-', '_')}_yuan"] = whole.low / (_card(name).total_gib * count)
    return found
