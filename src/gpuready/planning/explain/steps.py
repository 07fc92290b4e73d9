"""What one more step would cost or win: the plan's arithmetic again, with one thing changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuready.planning import support
from gpuready.planning.memory.estimate import Unresolved, estimate, request_gib
from gpuready.planning.memory.run import Estimate, Run
from gpuready.planning.search.workload import requests_that_fit
from gpuready.planning.wish import Option

EIGHT_BIT = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8")


@dataclass(frozen=True)
class Step:
    """One thing changed, everything else as it was planned."""

    name: str
    says: str
    possible: bool
    kv_gib: float | None = None
    """KV cache of one GPU after it; None where it is not possible or not known."""
    kv_tokens: int | None = None
    """Tokens in the KV cache of one replica after it."""
    requests: int | None = None
    """Requests at once that the KV cache of all replicas would then hold."""


def steps(option: Option) -> tuple[Step, ...]:
    """Return every step that means something for the option, cheapest first; none where no request is kept."""
    if not option.estimate.bytes_per_token:
        return ()
    found = [
        _one_more_request(option),
        _twice_the_length(option),
        _fewer_sequences(option),
        _small_kv(option),
        _small_weights(option),
        _more_gpus(option),
        _one_more_replica(option),
    ]
    return tuple(one for one in found if one is not None)


def _again(option: Option, run: Run) -> Estimate | str:
    """Return the estimate of another run, or why it is none that could be started, as the end of a sentence."""
    model, device = option.wish.model, option.place.device
    objections = support.objections(model, device, run)
    if objections:
        return f"{objections[0].what}: {objections[0].why}"
    try:
        found = estimate(model, device, run)
    except Unresolved:
        return "not known for this version"
    return found if found.fits else f"does not fit: {found.refusal.rstrip('.')}"


def _requests(option: Option, after: Estimate) -> int:
    """Return how many requests at once all replicas' KV caches would hold, counted as the search counts them."""
    model, run = option.wish.model, after.run
    longest = run.max_model_len or model.context_tokens
    one = requests_that_fit(option.wish.workload, longest, after.kv.low, lambda tokens: request_gib(model, run, tokens))
    return max(1, one) * option.replicas


def _told(name: str, what: str, option: Option, after: Estimate | str, more: str = "") -> Step:
    if isinstance(after, str):
        return Step(name, f"{what}: {after}.", possible=False)
    gib = after.kv.value - option.estimate.kv.value
    before, tokens = int(option.estimate.kv_tokens.value), int(after.kv_tokens.value)
    requests = _requests(option, after)
    change = f"{tokens - before:+,} tokens ({tokens / before - 1:+.1%})" if before else f"{tokens:,} tokens"
    says = f"KV cache {round(gib, 2) + 0.0:+.2f} GiB on each GPU, {change}"
    if tokens == before:
        says = "the KV cache stays as it is"
    if requests != option.possible:
        says += f"; it holds {requests:,} requests instead of {option.possible:,}"
    return Step(name, f"{what}: {says}{more}.", True, after.kv.value, tokens, requests)


def _one_more_request(option: Option) -> Step:
    workload = option.wish.workload
    tokens = workload.prompt.p50 + workload.output.p50
    gib = request_gib(option.wish.model, option.run, tokens)
    room = option.possible - option.concurrency
    fate = f"the cache has room for {room:,} more" if room > 0 else "the cache has no room for it"
    says = f"One more request of {tokens:,} tokens at once: {gib:.3f} GiB of the KV cache of each GPU; {fate}."
    found = option.estimate
    return Step("request", says, room > 0, found.kv.value, int(found.kv_tokens.value), option.possible)


def _twice_the_length(option: Option) -> Step | None:
    length = option.run.max_model_len
    if length is None:
        return None
    context = option.wish.model.context_tokens
    what = f"Twice the length, {2 * length:,} tokens"
    if 2 * length > context:
        return Step("length", f"{what}: the model's context ends at {context:,}.", possible=False)
    after = _again(option, replace(option.run, max_model_len=2 * length))
    more = "" if isinstance(after, str) else f"; one such request takes {after.request_gib:.2f} GiB of it"
    return _told("length", what, option, after, more)


def _fewer_sequences(option: Option) -> Step | None:
    limit = option.run.max_num_seqs
    if limit is None or limit < 2:
        return None
    after = _again(option, replace(option.run, max_num_seqs=limit // 2))
    return _told("max_num_seqs", f"max_num_seqs halved to {limit // 2}", option, after)


def _small_kv(option: Option) -> Step | None:
    if option.run.kv_dtype in EIGHT_BIT:
        return None
    after = _again(option, replace(option.run, kv_dtype="fp8"))
    return _told("kv_dtype", "KV cache in 8 bits (may change answers)", option, after)


def _small_weights(option: Option) -> Step | None:
    if option.run.quantization or option.wish.model.quantization:
        return None
    after = _again(option, replace(option.run, quantization="fp8"))
    return _told("quantization", "Weights in FP8, made while loading (may change answers)", option, after)


def _more_gpus(option: Option) -> Step | None:
    """Take the next number of GPUs over which the model's heads can be split; slices cannot be joined."""
    if not _whole(option):
        return None
    heads = option.wish.model.heads
    more = next((size for size in range(option.run.tp + 1, 17) if heads and heads % size == 0), None)
    if more is None:
        return None
    after = _again(option, replace(option.run, tp=more))
    extra = (more - option.run.tp) * option.run.pp * option.replicas
    what = f"Each replica over {more} GPUs instead of {option.run.tp}, {_gpus(extra)}"
    return _told("gpus", what, option, after)


def _one_more_replica(option: Option) -> Step | None:
    if not _whole(option):
        return None
    possible = option.possible // option.replicas * (option.replicas + 1)
    says = (
        f"One more replica, {_gpus(option.run.tp * option.run.pp)}: the KV caches hold {possible:,} requests "
        f"instead of {option.possible:,}."
    )
    found = option.estimate
    return Step("replica", says, True, found.kv.value, int(found.kv_tokens.value), possible)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''} more"


def _whole(option: Option) -> bool:
    return ":" not in option.place.device.name and option.place.shared_gib is None
