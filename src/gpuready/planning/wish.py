"""What is asked of the planner for one deployment, and what it answers: the contract of search and explanation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuready.planning.memory.run import Device, Draft, Estimate, Lora, Run
from gpuready.planning.model.facts import ModelFacts


@dataclass(frozen=True)
class Lengths:
    """Half of the requests stay below p50 tokens, 99 of 100 below p99."""

    p50: int
    p99: int


@dataclass(frozen=True)
class Workload:
    """What a deployment has to serve."""

    prompt: Lengths
    output: Lengths
    concurrency: int
    """Requests in flight at once, at the busiest time."""
    preemption: float = 0.01
    """How likely it may be, at that time, that the KV cache is too small and a request waits or is computed again."""


@dataclass(frozen=True)
class Wish:
    """One model to be served, and what the operator leaves open or has set."""

    name: str
    model_id: str
    model: ModelFacts
    engine: str
    version: str
    workload: Workload
    task: str = "generate"
    allow_lossy: bool = False
    """The planner may quantize weights while loading and keep the KV cache in 8 bits."""
    headroom_gib: float | None = None
    """Memory of every GPU to be left to nobody; None: what the engine's version needs."""
    settings: Mapping[str, float | int | str] = field(default_factory=dict)
    """What the operator has set, under the names of `Run`'s fields; the planner leaves it so or refuses it."""
    draft: Draft | None = None
    lora: Lora | None = None
    kv_offload_gib: float = 0.0
    """Host memory for KV that no longer fits on the GPU."""
    more_headroom_gib: float = 0.0
    """What a recorded out-of-memory wants beyond the headroom."""
    cured: Mapping[str, str] = field(default_factory=dict)
    """What of `settings` and headroom is a recorded cure and not the operator's, and why; also what was not taken."""


@dataclass(frozen=True)
class Place:
    """Where a deployment may run: GPUs or slices of one kind."""

    device: Device
    count: int
    """GPUs or slices that it gets, for all its replicas together."""
    shared_gib: float | None = None
    """On a GPU that several deployments share: the part of its memory that is this one's; None: it has it alone."""
    island: int = 0
    """GPUs that reach each other by NVLink; tensor parallelism stays among so many. 0: all, or none does."""
    host_gib: float | None = None
    """Memory of the host that is free for KV of this deployment; None: not known."""


@dataclass(frozen=True)
class Option:
    """One way to run a deployment."""

    wish: Wish
    place: Place
    run: Run
    """Every setting decided."""
    replicas: int
    estimate: Estimate
    concurrency: int
    """Requests at once that all replicas serve with at most the workload's probability of preemption."""
    possible: int
    """What the KV cache alone would allow."""
    binding: str
    """What limits it: wanted (all that was asked for is served), kv, max_num_seqs, max_num_batched_tokens, length,
    weights, host_ram."""
    lossy: tuple[str, ...] = ()
    """What of it may change answers: quantization made while loading, an 8 bit KV cache."""
    reasons: tuple[str, ...] = ()
    """Why each setting is what it is, in sentences."""
    why: Mapping[str, str] = field(default_factory=dict)
    """The same by the names of `Run`'s fields, without name and value."""
