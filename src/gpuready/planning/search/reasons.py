"""Says in one sentence each why a setting of an option is what it is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuready.planning import support
from gpuready.planning.memory.estimate import Unresolved, estimate
from gpuready.planning.memory.run import GIB, Estimate
from gpuready.planning.search import sizing
from gpuready.planning.search.candidates import p99_told
from gpuready.planning.support import Choices
from gpuready.planning.wish import Option

_NAMED = re.compile(r"[a-z]+_[a-z_]+ |prefix caching|chunked prefill|no CUDA graphs")
_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


def explained(option: Option, others: Sequence[Option], known: Choices, usual: Estimate) -> Option:
    """Return the option with its reasons; `others` are all options of the search, `usual` the engine's own defaults."""
    found = [(fields, _cured(option, fields, text)) for fields, text in _reasons(option, others, known, usual)]
    why = {setting: _bare(text) for settings, text in found for setting in settings}
    return replace(option, reasons=tuple(text for _, text in found), why=why)


def _reasons(
    option: Option, others: Sequence[Option], known: Choices, usual: Estimate
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each reason with the fields of `Run` that it explains."""
    yield ("tp", "pp"), _split(option, others)
    yield from (((), note) for note in known.notes)
    yield from ((("quantization", "kv_dtype"), text) for text in _lossy(option, others))
    yield ("max_model_len",), _length(option)
    yield ("max_num_seqs",), _seats(option)
    yield from ((("max_num_batched_tokens",), text) for text in _batch(option, usual))
    yield ("memory_fraction", "kv_bytes"), _part(option)
    yield from _habits(option)
    yield from (((), text) for text in _latent(option))
    yield from (((), text) for name, text in option.wish.cured.items() if name not in option.wish.settings)


def _cured(option: Option, fields: Sequence[str], text: str) -> str:
    """Return a reason with the cure that made a setting, where the operator did not."""
    why = next((option.wish.cured[name] for name in fields if name in option.wish.cured), "")
    return text.replace("as it was set", why) if why else text


def _bare(reason: str) -> str:
    """Return a reason without the name and the value that it begins with."""
    head, sign, rest = reason.partition(": ")
    return rest if sign and _NAMED.match(head) else reason


def _set(option: Option, name: str) -> bool:
    return name in option.wish.settings


def _split(option: Option, others: Sequence[Option]) -> str:
    run, place = option.run, option.place
    gpus = run.tp * run.pp
    noun = "slice" if ":" in place.device.name else "GPU"
    if _set(option, "tp") or _set(option, "pp"):
        text = f"each replica over {gpus} {noun}s (tp {run.tp}, pp {run.pp}), as it was set"
    elif place.shared_gib is not None:
        return "one replica on its part of the GPU"
    elif place.count == 1:
        return f"one {noun} is all that there is"
    elif gpus == 1:
        text = f"each replica on one {noun}, the fewest that hold it"
    else:
        how = f"tp {run.tp}" + (f" and pp {run.pp}" if run.pp > 1 else "")
        fewer = [one for one in others if one.run.tp * one.run.pp < gpus]
        served = "would not serve them all" if option.binding == "wanted" else "would serve less"
        why = f"fewer {served}" if fewer else "the fewest that hold weights and the longest request"
        text = f"each replica over {gpus} {noun}s ({how}): {why}"
    more = f"; {option.replicas} replicas share the requests" if option.replicas > 1 else ""
    island = place.island
    if run.pp > 1 and island > 1 and run.tp <= island:
        more += f"; tensor parallelism stays among the {island} GPUs that NVLink joins"
    return text + more


def _lossy(option: Option, others: Sequence[Option]) -> Iterator[str]:
    if not option.lossy:
        return
    exact = [one.concurrency for one in others if not one.lossy]
    wanted = option.wish.workload.concurrency
    without = f"without it {max(exact)} of {wanted} wanted requests are served" if exact else "without it nothing fits"
    yield f"{' and '.join(option.lossy)}, which may change answers and is allowed: {without}"


def _length(option: Option) -> str:
    load, length = option.wish.workload, option.run.max_model_len or 0
    if _set(option, "max_model_len"):
        return f"max_model_len {length:,}, as it was set"
    total = load.prompt.p99 + load.output.p99
    how = "the model's context" if length == option.wish.model.context_tokens else "rounded up to 256"
    together = " together" if load.output.p99 else ""
    return f"max_model_len {length:,}: {p99_told(option.wish)} {total:,} tokens{together}, {how}"


def _seats(option: Option) -> str:
    seqs, load = option.run.max_num_seqs or 0, option.wish.workload
    share = math.ceil(load.concurrency / option.replicas)
    if _set(option, "max_num_seqs"):
        return f"max_num_seqs {seqs:,}, as it was set"
    each = " on each replica" if option.replicas > 1 else ""
    if seqs >= sizing.seats(share):
        return (
            f"max_num_seqs {seqs:,}: {share:,} requests wanted{each} and a quarter more, up to a batch size for which "
            "a CUDA graph is recorded"
        )
    if seqs == option.run.max_num_batched_tokens:
        return f"max_num_seqs {seqs:,}: no more than max_num_batched_tokens"
    return (
        f"max_num_seqs {seqs:,}: with more at once the KV cache would be too small in more than "
        f"{100 * load.preemption:g} % of the busiest time{each}"
    )


def _batch(option: Option, usual: Estimate) -> Iterator[str]:
    tokens, own = option.run.max_num_batched_tokens, usual.run.max_num_batched_tokens
    engine = f"{_TITLES.get(option.run.engine, option.run.engine)} {option.run.version}"
    if tokens is None:
        return
    if _set(option, "max_num_batched_tokens"):
        yield f"max_num_batched_tokens {tokens:,}, as it was set"
    elif tokens == own and option.estimate.whole_prompts:
        yield f"max_num_batched_tokens {tokens:,}: {engine}'s own, the longest request and 2,048 at least"
    elif tokens == own:
        yield f"max_num_batched_tokens {tokens:,}: {engine}'s own for a card of this size"
    else:
        yield f"max_num_batched_tokens {tokens:,} instead of {own:,}: smaller batches of prompts leave more KV cache"


def _part(option: Option) -> str:
    found, run, place = option.estimate, option.run, option.place
    room = sizing.headroom_gib(option.wish, place)
    if _set(option, "memory_fraction") or _set(option, "kv_bytes"):
        left = sizing.spare(found)
        short = f", less than the {room:.2f} that processes are known to grow by" if left < room else ""
        what = f"memory_fraction {run.memory_fraction:g}" if run.kv_bytes is None else f"kv_bytes {run.kv_bytes}"
        return f"{what}, as it was set: {max(0.0, left):.2f} GiB are left to nobody{short}"
    if run.kv_bytes is not None and place.shared_gib is not None:
        return (
            f"kv_bytes {run.kv_bytes} ({run.kv_bytes / GIB:.2f} GiB): its part of the GPU, {place.shared_gib:.2f} GiB, "
            f"less {sizing.taken(found):.2f} for all else and {room:.2f} of headroom"
        )
    fraction = f"memory_fraction {run.memory_fraction:g}"
    if run.engine != "vllm":
        return f"{fraction}: {max(0.0, sizing.spare(found)):.2f} GiB are left to nobody"
    graphs = "" if found.graphs_counted else " and CUDA graphs"
    return (
        f"{fraction}: {found.total_gib:.2f} GiB less {found.outside.high:.2f} outside the engine's count "
        f"(context{graphs}, at most) and {room:.2f} of headroom"
    )


def _habits(option: Option) -> Iterator[tuple[tuple[str, ...], str]]:
    run, wish = option.run, option.wish
    if wish.task == "generate" and run.engine == "vllm":
        if run.prefix_caching:
            yield ("prefix_caching",), "prefix caching on: blocks of finished requests stay until others need them"
        if option.estimate.whole_prompts:
            yield (
                (),
                "no chunked prefill: its older engine (V0) computes a prompt whole, and answers of others wait for it",
            )
        else:
            yield (
                (),
                "chunked prefill: long prompts go in pieces of max_num_batched_tokens between the answers of others",
            )
    if run.enforce_eager and not _set(option, "enforce_eager"):
        yield (
            ("enforce_eager",),
            "no CUDA graphs (enforce_eager): with them there is no KV cache or not half of it; tokens take longer",
        )
    if wish.draft is not None:
        yield (
            (),
            f"speculative decoding with {wish.draft.tokens} tokens at once: their weights and KV cache are counted",
        )
    if wish.lora is not None:
        yield (), f"{wish.lora.slots} adapters of rank {wish.lora.rank} at most at once"
    if wish.kv_offload_gib:
        yield (
            (),
            f"{wish.kv_offload_gib:g} GiB of the host's memory for KV that the GPU has no room for: it saves computing "
            "prompts again, and adds no place for a request",
        )


def _latent(option: Option) -> Iterator[str]:
    """Say what dividing a latent KV cache would win: tensor parallelism holds all of it on every GPU."""
    run = option.run
    if run.tp == 1 or run.dcp > 1 or not any(group.kind == "latent" for group in option.wish.model.groups):
        return
    split = replace(run, dcp=run.tp)
    if run.engine != "vllm" or support.objections(option.wish.model, option.place.device, split):
        yield f"every one of {run.tp} GPUs holds the whole latent KV cache; data-parallel attention would divide it"
        return
    try:
        after = estimate(option.wish.model, option.place.device, split)
    except Unresolved:
        return
    yield (
        f"every one of {run.tp} GPUs holds the whole latent KV cache; decode-context-parallel-size {run.tp} would "
        f"divide it: {int(after.kv_tokens.value):,} tokens instead of {int(option.estimate.kv_tokens.value):,}"
    )
