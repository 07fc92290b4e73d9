"""Finds how to run one deployment: the way that serves the wanted requests with the least risk, else the most requests.

Of ways that serve all of them, the one that changes no answers comes first, then the one that fits by the worst of the
bands, then the one with the fewest GPUs in a replica: more replicas answer more requests than one over more GPUs. The
order is fixed, so the same wish has the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuready import catalog
from gpuready.outcome import Failure, Refusal
from gpuready.planning import support
from gpuready.planning.memory import vllm_settings
from gpuready.planning.memory.estimate import Unresolved, estimate
from gpuready.planning.memory.run import Estimate, Run
from gpuready.planning.memory.versions import resolve
from gpuready.planning.search import nearest, reasons
from gpuready.planning.search.candidates import Candidate, asked, base, formats, length_failures, splits
from gpuready.planning.search.nearest import where
from gpuready.planning.search.sizing import Sizer
from gpuready.planning.support import Choices, Objection
from gpuready.planning.wish import Option, Place, Wish

_NEXT_TO_NOTHING = 0.05
"""A gain of less than this part in requests is not worth longer waits."""
_WORTH_NO_GRAPHS = 2
"""So many times the KV cache is worth longer tokens without CUDA graphs. It is the cache that is compared, as its size
hardly depends on what is asked for: else longer requests could turn graphs off and be more."""


@dataclass(frozen=True)
class Found:
    """Everything that a search came to."""

    options: tuple[Option, ...]
    """Best first."""
    failures: tuple[Failure, ...] = ()
    """Why there is none."""


def options(wish: Wish, place: Place) -> list[Option]:
    """Return every way that runs, best first; none where none does, and `refusals` says why."""
    return list(search(wish, place).options)


def best(wish: Wish, place: Place) -> Option:
    """Return the best way to run a wish on a place.

    Raises:
        Refusal: where there is none, with the arithmetic and the nearest wish that works.
    """
    found = search(wish, place)
    if not found.options:
        raise Refusal(list(found.failures))
    return found.options[0]


def refusals(wish: Wish, place: Place) -> list[Failure]:
    """Return why nothing runs; empty where something does."""
    return list(search(wish, place).failures)


def search(wish: Wish, place: Place, alternatives: bool = True) -> Found:
    """Return every way that runs, best first, or why none does; with `alternatives` also what nearly the same would."""
    wish = asked(wish)
    try:
        known = support.choices(wish.model, place.device, wish.engine, wish.version)
        run = base(wish, known)
        usual = estimate(wish.model, place.device, run)
    except (KeyError, Unresolved) as error:
        what = f"{wish.engine} {wish.version} cannot be planned"
        return Found((), (Failure("plan.version", what, str(error).strip("'")),))
    ways, objections = splits(wish, place, run)
    failures = length_failures(wish) + _objected(wish, place, ways, objections)
    if failures:
        return Found((), tuple(failures))
    sizer = Sizer(wish, place)
    sized, refused = _size_all(sizer, _candidates(wish, place, run, usual, ways, known))
    within = [one for one in sized if place.host_gib is None or one.replicas * wish.kv_offload_gib <= place.host_gib]
    if sized and not within:
        return Found((), (_no_host_memory(wish, place, sized),))
    sized = within
    if not sized:
        said = nearest.failures(wish, place, refused, _one) if alternatives else [nearest.memory(wish, place, refused)]
        return Found((), tuple(said))
    ordered = sorted(sized, key=_rank)
    return Found(tuple(reasons.explained(one, ordered, known, usual) for one in ordered))


def _one(wish: Wish, place: Place) -> Option | None:
    """Return a way to serve one request at a time; used to look for the nearest wish that runs at all."""
    try:
        known = support.choices(wish.model, place.device, wish.engine, wish.version)
        run = base(wish, known)
        usual = estimate(wish.model, place.device, run)
    except (KeyError, Unresolved):
        return None
    ways, _ = splits(wish, place, run)
    if length_failures(wish):
        return None
    sizer = Sizer(replace(wish, workload=replace(wish.workload, concurrency=1)), place)
    # One replica over all GPUs has most room.
    candidates = _candidates(wish, place, run, usual, ways[-1:], known)
    sized = (sizer.size(one) for tier in candidates for one in reversed(tier))
    return next((one for one in sized if isinstance(one, Option)), None)


def _no_host_memory(wish: Wish, place: Place, sized: list[Option]) -> Failure:
    fewest = min(one.replicas for one in sized)
    each = f" for each of {fewest} replicas" if fewest > 1 else ""
    what = f"kv_offload_gib = {wish.kv_offload_gib:g}{each} is more than the host has for it"
    free = max(0.0, place.host_gib or 0.0)
    why = f"{free:.1f} GiB of its memory are left for KV caches"
    return Failure("plan.host_memory", what, why, f"set at most {int(free / fewest)}")


def _objected(wish: Wish, place: Place, ways: list[tuple[int, int]], objections: list[Objection]) -> list[Failure]:
    """Return what speaks against every way to split the wish over the place; each kind once."""
    if ways:
        return []
    if not objections:
        set_ = {name: wish.settings[name] for name in ("tp", "pp") if name in wish.settings}
        what = (
            f"{' and '.join(f'{name} = {value}' for name, value in set_.items())} cannot be split over {where(place)}"
        )
        return [Failure("plan.split", what, "", f"set them so that their product divides {place.count}")]
    said: dict[str, Failure] = {}
    for one in objections:
        failure = Failure(f"plan.{one.code}", one.what, one.why, one.nearest)
        if one.code in wish.settings:
            what = f"{one.code} = {str(wish.settings[one.code])[:40]} is refused"
            failure = replace(failure, what=what, why=f"{one.what}: {one.why}")
        said.setdefault(one.code, failure)
    return list(said.values())


def _candidates(
    wish: Wish, place: Place, run: Run, usual: Estimate, ways: list[tuple[int, int]], known: Choices
) -> Iterator[list[Candidate]]:
    """Yield the candidates in tiers: where one serves everything, the tiers after it are not looked at."""
    batches = _batches(wish, place, run, usual)
    eager = [False, True] if "enforce_eager" not in wish.settings else [run.enforce_eager]
    for no_graphs in eager:
        for quantization, kv_dtype, lossy in formats(wish, known):
            yield [
                Candidate(
                    replace(
                        run,
                        tp=tp,
                        pp=pp,
                        quantization=quantization or run.quantization,
                        kv_dtype=kv_dtype or run.kv_dtype,
                        max_num_batched_tokens=batch,
                        enforce_eager=no_graphs,
                    ),
                    place.count // (tp * pp),
                    lossy,
                )
                for tp, pp in ways
                for batch in batches
            ]


def _batches(wish: Wish, place: Place, run: Run, usual: Estimate) -> list[int | None]:
    """Return the batches of prompt tokens to try: vLLM's own for the card, and a small one."""
    if wish.engine != "vllm" or run.max_num_batched_tokens is not None:
        return [run.max_num_batched_tokens]
    small = int(catalog.load("planning")["small_batch"])
    own = usual.run.max_num_batched_tokens or small
    # No fewer than requests at once; and where prompts are not cut into pieces, no fewer than the longest one
    # (config/scheduler.py).
    rules = resolve(run.engine, run.version).values
    old = vllm_settings.settings(wish.model, place.device, run, rules).old_engine
    whole = wish.task != "generate" or (old and own >= (run.max_model_len or 0))
    least = max(int(wish.settings.get("max_num_seqs", 0)), (run.max_model_len or 0) if whole else 0)
    return list(dict.fromkeys(max(one, least) for one in (own, min(own, small))))


def _size_all(sizer: Sizer, tiers: Iterator[list[Candidate]]) -> tuple[list[Option], list[Estimate]]:
    sized: list[Option] = []
    refused: list[Estimate] = []
    for tier in tiers:
        # Without graphs every token takes longer: only where hardly anything runs with them.
        with_graphs = [_tokens(one) for one in sized if not one.run.enforce_eager]
        least = _WORTH_NO_GRAPHS * max(with_graphs, default=0) if tier[0].run.enforce_eager else 0
        for candidate in tier:
            found = sizer.size(candidate)
            if not isinstance(found, Option):
                refused.append(found)
            elif _tokens(found) >= least:
                sized.append(found)
        sized = [one for one in sized if not _is_hardly_better(one, sized)]
        if any(one.binding == "wanted" for one in sized):
            break
    return sized, refused


def _tokens(option: Option) -> float:
    return option.estimate.kv_tokens.value * option.replicas


def _is_hardly_better(option: Option, others: list[Option]) -> bool:
    """Say whether smaller batches of prompts win next to nothing: they make requests wait for their first token."""
    return any(
        other is not option
        and _without_batch(other.run) == _without_batch(option.run)
        and (other.run.max_num_batched_tokens or 0) > (option.run.max_num_batched_tokens or 0)
        and other.concurrency >= (1 - _NEXT_TO_NOTHING) * option.concurrency
        for other in others
    )


def _without_batch(run: Run) -> Run:
    return replace(run, max_num_batched_tokens=None, max_num_seqs=None, memory_fraction=None, kv_bytes=None)


def _rank(option: Option) -> tuple[bool, int, int, bool, int, int, int]:
    served = option.binding == "wanted"
    return (
        not served,
        0 if served else -option.concurrency,
        len(option.lossy),
        not option.estimate.surely_fits,
        option.run.tp * option.run.pp,
        option.run.pp,
        -(option.run.max_num_batched_tokens or 0),
    )
