"""Divides a GPU's memory for one candidate: how much the engine may take, and for how many requests at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from gpuready import catalog
from gpuready.planning.memory.estimate import estimate, request_gib
from gpuready.planning.memory.run import GIB, Estimate, Run
from gpuready.planning.search import workload
from gpuready.planning.search.candidates import Candidate
from gpuready.planning.search.workload import Load
from gpuready.planning.wish import Option, Place, Wish

KV_STEP_GIB = 1 / 16
"""Explicit KV bytes are a multiple of this, 64 MiB, so that they read well."""
_KV_STEP = int(KV_STEP_GIB * GIB)
_FRACTIONS = 1000
"""Memory fractions are whole thousandths."""
_GRAPH_STEP = 8
"""From this batch size on engines record a CUDA graph for every eighth size (vllm/config/vllm.py)."""
_PROMPT_HEAVY = 0.5


def headroom_gib(wish: Wish, place: Place) -> float:
    """Return what is left to nobody: what is declared, else what processes are known to grow by; and for a cure."""
    return _headroom_gib(wish, place) + wish.more_headroom_gib


def _headroom_gib(wish: Wish, place: Place) -> float:
    if wish.headroom_gib is not None:
        return wish.headroom_gib
    rule = catalog.load("planning")["headroom"]["vision" if wish.model.vision else "text"]
    if place.shared_gib is not None:
        return float(rule["part"] * place.shared_gib)
    return float(max(rule["least_gib"], rule["part"] * place.device.total_gib))


def seats(wanted: int) -> int:
    """Return max_num_seqs for that many requests: with the margin, rounded up to a batch size with a CUDA graph."""
    margin = math.ceil(wanted * (1 + float(catalog.load("planning")["margin"]["part"])))
    return margin if margin <= 4 else -(-margin // _GRAPH_STEP) * _GRAPH_STEP


def taken(found: Estimate) -> float:
    """Return what all but the KV cache takes of a GPU at most, in GiB."""
    graphs = found.graphs.high if found.graphs_counted else 0.0
    return found.outside.high + found.weights.high + found.activation.high + found.non_torch.high + graphs


def spare(found: Estimate) -> float:
    """Return what nobody takes of a GPU even by the worst of all bands, in GiB; below 0 it may run out of memory.

    vLLM measures itself and gives the KV cache what its budget leaves, so its own parts being larger costs KV cache,
    not headroom. With explicit bytes, and in SGLang, it costs headroom.
    """
    if found.run.kv_bytes is None and found.run.engine == "vllm":
        return found.total_gib - found.outside.high - found.budget_gib
    if found.run.kv_bytes is None and found.run.engine == "tensorrt_llm":
        return found.free_gib
    kv = found.kv.low if found.run.kv_bytes is None else found.kv.value
    return found.total_gib - taken(found) - max(0.0, kv)


@dataclass
class Sizer:
    """Sizes candidates of one wish on one place; what requests hold is computed once for runs that hold it alike."""

    wish: Wish
    place: Place
    _loads: dict[Run, Load] = field(default_factory=dict)

    def size(self, candidate: Candidate) -> Option | Estimate:
        """Return the candidate with every setting decided; the estimate with its refusal where it does not fit."""
        declared = self.wish.settings.get("max_num_seqs")
        most = int(declared) if declared is not None else seats(_share(self.wish, candidate))
        if declared is None and candidate.run.engine == "vllm" and candidate.run.max_num_batched_tokens is not None:
            # vLLM refuses more requests at once than batched tokens (config/scheduler.py).
            most = min(most, candidate.run.max_num_batched_tokens)
        found, allowed = self._with(candidate, most)
        if declared is None and allowed < most:
            found, allowed = self._fewer(candidate, most)
        return self._option(candidate, found, allowed) if runs(found) else found

    def load(self, run: Run) -> Load:
        """Return what a request in flight holds of a GPU's KV cache, in GiB."""
        key = replace(run, memory_fraction=None, kv_bytes=None, max_num_seqs=None, graph_max_batch=None)
        if key not in self._loads:
            longest = run.max_model_len or self.wish.model.context_tokens
            self._loads[key] = workload.load(
                self.wish.workload, longest, lambda tokens: request_gib(self.wish.model, key, tokens)
            )
        return self._loads[key]

    def _with(self, candidate: Candidate, seqs: int) -> tuple[Estimate, int]:
        """Return the estimate with so many places, and how many requests its KV cache holds."""
        found = self.budgeted(replace(candidate.run, max_num_seqs=seqs))
        return found, self._allowed(found, seqs) if runs(found) else 0

    def _allowed(self, found: Estimate, seqs: int) -> int:
        load = self.load(found.run)
        if load.most <= 0:
            return seqs  # nothing is kept of a request
        return max(1, load.fits(found.kv.low, self.wish.workload.preemption))

    def _fewer(self, candidate: Candidate, most: int) -> tuple[Estimate, int]:
        """Return the estimate with the most places that its KV cache then holds; fewer places leave more KV cache."""
        best = self._with(candidate, 1)
        # The others' fraction is raised only where it has to be, so one place may be given less.
        low, high = 1, min(most - 1, best[1]) if candidate.run.engine == "vllm" else most - 1
        while low < high:
            middle = (low + high + 1) // 2
            found, allowed = self._with(candidate, middle)
            if allowed >= middle:
                best, low = (found, allowed), middle
            else:
                high = middle - 1
        return best

    def budgeted(self, run: Run) -> Estimate:
        """Return the estimate with the part of memory decided that the engine may take."""
        wish, place = self.wish, self.place
        own = run.kv_bytes is not None or run.memory_fraction is not None
        found = estimate(wish.model, place.device, run)
        if found.weights.low >= found.total_gib:
            return found
        if place.shared_gib is not None:
            return self._in_a_part(run, found)
        if own:
            return found
        room = headroom_gib(wish, place)
        if run.engine == "vllm":
            part = (found.total_gib - found.outside.high - room) / found.total_gib
            fraction = max(1, math.floor(part * _FRACTIONS)) / _FRACTIONS
            return estimate(wish.model, place.device, replace(run, memory_fraction=fraction))
        if runs(found) and self._allowed(found, run.max_num_seqs or 1) >= (run.max_num_seqs or 1):
            return found
        return self._largest(run, found, room)

    def _in_a_part(self, run: Run, found: Estimate) -> Estimate:
        part = self.place.shared_gib or 0.0
        left = part - taken(found) - headroom_gib(self.wish, self.place)
        steps = math.floor(left * GIB / _KV_STEP)
        # With explicit bytes it is only what has to be free at the start, which what others hold must not hinder.
        fraction = max(1, math.floor((part - found.outside.high) / found.total_gib * _FRACTIONS)) / _FRACTIONS
        if run.kv_bytes is None and run.memory_fraction is not None:
            return _within(part, found)
        kv_bytes = max(0, steps) * _KV_STEP if run.kv_bytes is None else run.kv_bytes
        shared = replace(run, kv_bytes=kv_bytes, memory_fraction=run.memory_fraction or fraction)
        found = estimate(self.wish.model, self.place.device, shared)
        if run.kv_bytes is not None:
            return _within(part, found)
        if steps > 0:
            return found
        why = (
            f"its part of the GPU is {part:.2f} GiB, and weights, activations and all else but the KV cache take up to "
            f"{taken(found):.2f}, with headroom {taken(found) + headroom_gib(self.wish, self.place):.2f}"
        )
        return replace(found, fits=False, surely_fits=False, refusal=why)

    def _largest(self, run: Run, usual: Estimate, room: float) -> Estimate:
        """Return the estimate with the largest fraction that leaves the headroom; the engine's own where none does."""
        low, high = 1, _FRACTIONS - 1
        best = usual
        while low <= high:
            middle = (low + high) // 2
            found = estimate(self.wish.model, self.place.device, replace(run, memory_fraction=middle / _FRACTIONS))
            if spare(found) >= room:
                best, low = found, middle + 1
            else:
                high = middle - 1
        return best

    def _option(self, candidate: Candidate, found: Estimate, allowed: int) -> Option:
        wanted = self.wish.workload.concurrency
        possible = allowed * candidate.replicas
        places = (found.run.max_num_seqs or allowed) * candidate.replicas
        served = min(wanted, possible, places)
        return Option(
            wish=self.wish,
            place=self.place,
            run=_decided(candidate.run, found.run),
            replicas=candidate.replicas,
            estimate=found,
            concurrency=served,
            possible=possible,
            binding=self._binding(found, served, possible, places),
            lossy=candidate.lossy,
        )

    def _binding(self, found: Estimate, served: int, possible: int, places: int) -> str:
        if served >= self.wish.workload.concurrency:
            return "wanted"
        if places < possible and "max_num_seqs" in self.wish.settings:
            return "max_num_seqs"
        if places < possible and found.run.max_num_seqs == found.run.max_num_batched_tokens:
            return "max_num_batched_tokens"
        if found.request_gib > _PROMPT_HEAVY * found.kv.value:
            return "length"
        return "weights" if found.weights.value > found.kv.value else "kv"


def _within(part: float, found: Estimate) -> Estimate:
    """Return an estimate as it is where it stays within a part of the GPU, in GiB, else with its refusal."""
    takes = found.total_gib - spare(found)
    if not found.fits or takes <= part:
        return found
    why = f"its part of the GPU is {part:.2f} GiB, and it would take up to {takes:.2f}"
    return replace(found, fits=False, surely_fits=False, refusal=why)


def runs(found: Estimate) -> bool:
    """Say whether an engine starts so and does not run out of memory by the expected figures."""
    return found.fits and spare(found) >= 0


def _share(wish: Wish, candidate: Candidate) -> int:
    """Return the requests at once that one replica has to serve."""
    return math.ceil(wish.workload.concurrency / candidate.replicas)


def _decided(asked: Run, filled: Run) -> Run:
    """Return what was asked with what the planner decides; all else stays the engine's own."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "memory_fraction", "kv_bytes", "prefix_caching")
    return replace(asked, **{name: getattr(filled, name) for name in names})
