"""The ways in which a wish could be run on a place: splits over its GPUs, lengths, formats. None is sized here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from gpuready import catalog
from gpuready.outcome import Failure
from gpuready.planning import support
from gpuready.planning.memory.run import Run
from gpuready.planning.support import Choices, Objection
from gpuready.planning.wish import Lengths, Place, Wish

SETTINGS = frozenset(
    field.name for field in fields(Run) if field.name not in ("engine", "version", "task", "draft", "lora", "dp")
)
"""What an operator may set of a run."""
LOSSY_KV = "KV cache in 8 bits"
MADE = {
    "fp8": "weights in FP8, made while loading",
    "bitsandbytes": "weights in 4 bits (bitsandbytes), made while loading",
}


@dataclass(frozen=True)
class Candidate:
    """One way to run a wish, before memory is divided."""

    run: Run
    replicas: int
    lossy: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Return the GPUs of one replica."""
        return self.run.tp * self.run.pp


def step_up(tokens: int) -> int:
    """Return a length rounded up to the step of max_model_len."""
    step = int(catalog.load("planning")["length_step"])
    return -(-tokens // step) * step


def asked(wish: Wish) -> Wish:
    """Return a wish with what its task means for its workload: embeddings, ranks and classes are no tokens."""
    if wish.task == "generate":
        return wish
    return replace(wish, workload=replace(wish.workload, output=Lengths(0, 0)))


def length(wish: Wish) -> int:
    """Return the longest request: what is declared, else both p99 rounded up, at most the model's context."""
    declared = wish.settings.get("max_model_len")
    if declared is not None:
        return int(declared)
    return min(max(1, wish.model.context_tokens), step_up(wish.workload.prompt.p99 + wish.workload.output.p99))


def p99_told(wish: Wish) -> str:
    """Return the beginning of a sentence about the longest request in a hundred."""
    return "prompt and output p99 are" if wish.workload.output.p99 else "prompt p99 is"


def length_failures(wish: Wish) -> list[Failure]:
    """Return what is wrong with task, lengths and batches by themselves."""
    if wish.task == "generate" and all(group.kind == "none" for group in wish.model.groups):
        what = f"task = generate is refused for {wish.model_id}"
        why = "it reads a text as a whole and writes none"
        return [Failure("plan.task", what, why, "set embed, rerank or classify")]
    context, load = wish.model.context_tokens, wish.workload
    declared, wanted = wish.settings.get("max_model_len"), load.prompt.p99 + load.output.p99
    has = f"{wish.model_id} has a context of {context}"
    if declared is not None and int(declared) > context:
        return [Failure("plan.max_model_len", f"max_model_len = {declared} is refused", has, f"set at most {context}")]
    if declared is None and wanted > context:
        what = f"{p99_told(wish)} {wanted} tokens{' together' if load.output.p99 else ''}"
        return [Failure("plan.context", what, has, "lower p99 or choose a model with more context")]
    median = load.prompt.p50 + load.output.p50
    if declared is not None and median > int(declared):
        why = f"half of the requests are longer, prompt and output p50 are {median} tokens together"
        fix = f"set at least {median}, or lower the workload's lengths"
        return [Failure("plan.max_model_len", f"max_model_len = {declared} is refused", why, fix)]
    seqs, batch = wish.settings.get("max_num_seqs"), wish.settings.get("max_num_batched_tokens")
    if wish.engine == "vllm" and seqs is not None and batch is not None and int(batch) < int(seqs):
        what = f"max_num_batched_tokens = {batch} is refused"
        why = f"vLLM takes no fewer than max_num_seqs, which is {seqs}"
        return [Failure("plan.setting", what, why, f"set at least {seqs}")]
    return []


def base(wish: Wish, choices: Choices) -> Run:
    """Return the run with everything that is the same for all candidates."""
    settings = {name: value for name, value in wish.settings.items() if name in SETTINGS}
    cast = choices.dtype if choices.dtype != wish.model.dtype and not wish.settings.get("dtype") else None
    run = Run(wish.engine, wish.version, task=wish.task, draft=wish.draft, lora=wish.lora, dtype=cast)
    return replace(run, **{**settings, "max_model_len": length(wish)})  # type: ignore[arg-type]


def splits(wish: Wish, place: Place, run: Run) -> tuple[list[tuple[int, int]], list[Objection]]:
    """Return the ways to split one replica, (tp, pp), fewest GPUs first, and what speaks against all of them.

    Every number of GPUs that divides the place's has one way: as much tensor parallelism as heads and NVLink allow, the
    rest as stages of a pipeline.
    """
    objections: list[Objection] = []
    found = []
    alone = ":" in place.device.name or place.shared_gib is not None
    for gpus in range(1, 2 if alone else place.count + 1):
        if place.count % gpus:
            continue
        for tp, pp in _ways(wish, place, gpus):
            said = support.objections(wish.model, place.device, replace(run, tp=tp, pp=pp))
            if not said:
                found.append((tp, pp))
                break
            objections += said
    return found, [] if found else objections


def _ways(wish: Wish, place: Place, gpus: int) -> Iterator[tuple[int, int]]:
    set_tp, set_pp = wish.settings.get("tp"), wish.settings.get("pp")
    most = place.island if place.island > 1 else gpus
    for tp in range(gpus, 0, -1):
        if gpus % tp or (set_tp is None and tp > most):
            continue
        pp = gpus // tp
        if set_tp in (None, tp) and (set_pp == pp or (set_pp is None and (set_tp is None or pp == 1))):
            yield tp, pp


def formats(wish: Wish, choices: Choices) -> list[tuple[str | None, str | None, tuple[str, ...]]]:
    """Return the formats to try, (quantization, KV type, what of them may change answers), the gentlest first.

    What an operator has set is not varied, and neither is anything where the operator allows no loss.
    """
    quantization, kv_dtype = wish.settings.get("quantization"), wish.settings.get("kv_dtype")
    made = [None] if quantization is not None or not wish.allow_lossy else [None, *choices.quantizations]
    kept = [None] if kv_dtype is not None or not wish.allow_lossy else [None, *choices.kv_dtypes[1:2]]
    told: tuple[str, ...] = (_made(str(quantization)),) if quantization and wish.model.quantization is None else ()
    told += () if kv_dtype in (None, "auto", "bfloat16", "float16") else (LOSSY_KV,)
    return [
        (one, kv, told + ((_made(one),) if one else ()) + ((LOSSY_KV,) if kv else ())) for one in made for kv in kept
    ]


def _made(quantization: str) -> str:
    return MADE.get(quantization, f"weights in {quantization[:40]}, made while loading")
