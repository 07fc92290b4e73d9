"""Reads records of measured runs: what was started, on what, and what the engine reported.

A record may hold anything. What is not as it should be is null; what cannot be predicted is said in one sentence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuready.planning.memory import device as devices
from gpuready.planning.memory import versions
from gpuready.planning.memory.run import Device, Run
from gpuready.planning.memory.versions import ConstantSet
from gpuready.planning.model import known
from gpuready.planning.model.config import UnknownModel
from gpuready.planning.model.facts import ModelFacts

ENGINES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt_llm",
    "tensorrt_llm": "tensorrt_llm",
    "trtllm": "tensorrt_llm",
}
FRACTIONS = {
    "vllm": "gpu_memory_utilization",
    "sglang": "mem_fraction_static",
    "tensorrt_llm": "free_gpu_memory_fraction",
}
_LONGEST_TEXT = 200
_MOST = float(1 << 40)
_MOST_GPUS = 1 << 16
_MOST_GIB = 1 << 20
_USUAL_COMPUTE = 8.0
"""Of a card that is known by its memory alone."""
_LOADED_AS = ("fp8", "bitsandbytes")
"""Formats that engines make while they load."""
_UNDATED = re.compile(
    r"(?:(?:rocm|cuda|docker|v1)[ -]*)?(?:nightly|main|master|dev|latest)(?:[ -]*build)?", re.IGNORECASE
)
_UNNAMED_SOURCES = ("", "not recorded", "public log, repository not recorded")


class NotJudged(ValueError):
    """A record of which nothing can be predicted; the message says why, in one sentence."""


@dataclass(frozen=True)
class Case:
    """A record as the planner understands it."""

    id: str
    engine: str
    version: str
    constants: ConstantSet
    name: str
    """The model's, as the record says it."""
    model: ModelFacts
    device: Device
    run: Run
    observed: Mapping[str, float]
    outcome: str
    """ok, ok_memory_then_failed, fail_len or fail_no_kv; empty where the record does not say."""
    source: str
    repository: str
    assumed: tuple[str, ...] = field(default_factory=tuple)
    """What the record does not say and was filled in."""

    @functools.cached_property
    def part(self) -> str:
        """Return under which heading its errors are told: vLLM 0.19.0, vLLM's other versions, or the engine."""
        if self.engine != "vllm":
            return self.engine
        return "vllm 0.19.0" if versions.parse(self.version) == versions.parse("0.19.0") else "vllm, other versions"

    @functools.cached_property
    def family(self) -> str:
        """Return how sure the arithmetic is: dense_16bit, dense_other (quantized or 32 bit), moe, vision or hybrid."""
        if self.model.family != "dense":
            return self.model.family
        sixteen = self.run.dtype in (None, "bfloat16", "float16")
        quantized = self.model.quantization is not None or self.run.quantization is not None
        return "dense_16bit" if sixteen and not quantized else "dense_other"


def text(record: Mapping[str, Any], key: str) -> str:
    """Return a field as text, empty where it is none."""
    value = record.get(key)
    return value.strip()[:_LONGEST_TEXT] if isinstance(value, str) else ""


def number(record: Mapping[str, Any], key: str, least: float = -_MOST, most: float = _MOST) -> float | None:
    """Return a field as a number, None where it is none or not between `least` and `most`."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if least <= value <= most else None


def identity(record: object) -> str | int | None:
    """Return a record's id as it stands there, where it is a text or a whole number."""
    value = record.get("id") if isinstance(record, Mapping) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return value[:_LONGEST_TEXT] if isinstance(value, str) and value.strip() else None


def whole(record: Mapping[str, Any], key: str) -> int | None:
    """Return a field as a whole number above 0, None where it is none."""
    value = number(record, key, 1)
    return int(value) if value is not None and value.is_integer() else None


def read(record: Mapping[str, Any]) -> Case:
    """Return what a record says.

    Judged is what names an engine, a version that resolves to one set of constants, a model whose sizes are known, and
    a card or its memory; all else may be null and is then the engine's default.

    Raises:
        NotJudged: when one of these is missing, in one sentence.
    """
    if not isinstance(record, Mapping):
        raise NotJudged("the record is not an object")
    engine = ENGINES.get(text(record, "engine").lower())
    if engine is None and not text(record, "engine"):
        raise NotJudged("the record has no engine; known are vllm, sglang, tensorrt-llm")
    if engine is None:
        raise NotJudged(f"the engine {text(record, 'engine')!r} is not known; known are vllm, sglang, tensorrt-llm")
    version, constants = _version(record, engine)
    model, assumed = _model(record)
    device = _device(record)
    source = text(record, "source")
    named = source if source.lower() not in _UNNAMED_SOURCES else ""
    name = identity(record)
    called = "without id" if name is None else str(name)
    observed = record.get("observed")
    observed = observed if isinstance(observed, Mapping) else {}
    figures = {key: number(observed, key) for key in observed if isinstance(key, str)}
    return Case(
        id=called,
        engine=engine,
        version=version,
        constants=constants,
        name=text(record, "model"),
        model=model,
        device=device,
        run=_run(record, engine, version, model),
        observed={key: value for key, value in figures.items() if value is not None},
        outcome=text(record, "outcome"),
        source=named or f"record {called}",
        repository=_repository(named) or f"record {called}",
        assumed=(*assumed, *_assumed(record)),
    )


def _version(record: Mapping[str, Any], engine: str) -> tuple[str, ConstantSet]:
    """Return the version as it is said and its constants.

    A build known by its month is placed by the record's day, and so is one known as a nightly or of the main branch.
    """
    said = text(record, "engine_version")
    if not said:
        raise NotJudged("the record has no engine version")
    day = text(record, "date")
    whole_day = len(day) == len("2026-08-14")
    dated = whole_day and (_UNDATED.fullmatch(said) or (said[:4].isdigit() and day.startswith(said[:7])))
    tries = [said, day] if dated else [said]
    refusals = []
    for one in tries:
        try:
            return said, versions.resolve(engine, one)
        except versions.Unresolved as refusal:
            refusals.append(str(refusal))
    raise NotJudged(f"the version is not known: {refusals[0]}")


@functools.lru_cache(maxsize=512)
def _facts(name: str, quantization: str | None) -> ModelFacts:
    """Return a model's sizes; recorded runs are many of few models."""
    return known.facts(name, quantization)


def _model(record: Mapping[str, Any]) -> tuple[ModelFacts, tuple[str, ...]]:
    name = text(record, "model")
    if not name:
        raise NotJudged("the record has no model")
    quantization = text(record, "quantization") or None
    # Some records have a remark behind the name: "Qwen/Qwen3-32B (61.07 GB)".
    names = [name, name.split(" (", 1)[0]]
    try:
        named = [(one, found) for one in names if (found := known.find(one, quantization)) is not None]
        if not named:
            raise NotJudged(f"the configuration of the model {name[:80]!r} is not known")
        facts = _facts(named[0][0], quantization)
    except UnknownModel as refusal:
        raise NotJudged(f"the sizes of the model {name[:80]!r} are not known: {refusal}") from None
    by_its_id = named[0][1].id.casefold() == name.casefold()
    if record.get("model_id_exact") is False and facts.family != "dense" and not by_its_id:
        # Dense models of a class are alike; of the others a loose name leaves open what they were made into.
        raise NotJudged(f"the record does not say exactly which model {name[:80]!r} was")
    return facts, named[0][1].assumptions


def _device(record: Mapping[str, Any]) -> Device:
    name = text(record, "gpu")
    total = number(record, "gpu_total_gib", 0.1, _MOST_GIB)
    found = devices.device(name) if name else None
    if found is None and total is None:
        raise NotJudged(f"neither the card {name!r} nor its memory is known" if name else "the record names no card")
    if found is None:
        found = Device(name=name or "unnamed", total_gib=float(total or 0), compute=_USUAL_COMPUTE)
    free = number(record, "gpu_free_at_init_gib", 0.1, _MOST_GIB)
    return replace(found, total_gib=total or found.total_gib, free_gib=free if free is not None else found.free_gib)


def _run(record: Mapping[str, Any], engine: str, version: str, model: ModelFacts) -> Run:
    gpus = whole(record, "gpu_count")
    split = {key: min(whole(record, key) or 1, _MOST_GPUS) for key in ("tp", "pp", "dp", "ep", "dcp")}
    if _unsaid_split(record):
        split["tp"] = min(gpus or 1, _MOST_GPUS)
    fraction = number(record, FRACTIONS[engine], 0.001, 1)
    kv_dtype, dtype = text(record, "kv_cache_dtype"), text(record, "dtype")
    quantization = text(record, "quantization")
    loads = quantization.split()[0].lower() if quantization and model.quantization is None else ""
    prefix_caching, eager = record.get("prefix_caching"), record.get("enforce_eager")
    shared = engine != "vllm" and split["dp"] > 1 and gpus == split["tp"]
    return Run(
        engine=engine,
        version=version,
        tp=split["tp"],
        pp=split["pp"],
        dp=split["dp"],
        ep=split["ep"],
        dcp=split["dcp"],
        attention_dp=shared,
        dtype=dtype if dtype not in ("", "auto") else None,
        quantization=loads if loads in _LOADED_AS else None,
        kv_dtype=kv_dtype if kv_dtype not in ("", "auto") else None,
        max_model_len=whole(record, "max_model_len"),
        max_num_seqs=whole(record, "max_num_seqs"),
        max_num_batched_tokens=whole(record, "max_num_batched_tokens"),
        memory_fraction=fraction,
        block_size=whole(record, "block_size"),
        enforce_eager=eager is True,
        prefix_caching=prefix_caching if isinstance(prefix_caching, bool) else None,
        chunked_prefill_size=whole(record, "chunked_prefill_size"),
        graph_max_batch=whole(record, "cuda_graph_max_bs"),
        task=model.task,
    )


def _unsaid_split(record: Mapping[str, Any]) -> bool:
    several = (whole(record, "gpu_count") or 1) > 1
    return several and not any(whole(record, key) for key in ("tp", "pp", "dp"))


def _assumed(record: Mapping[str, Any]) -> tuple[str, ...]:
    found = []
    if _unsaid_split(record):
        found.append("the record does not say how its GPUs divide the model, taken as tensor parallelism")
    if devices.device(text(record, "gpu")) is None:
        found.append(f"its card is known by its memory alone, taken as one of compute capability {_USUAL_COMPUTE}")
    return tuple(found)


def _repository(source: str) -> str:
    """Return the repository of a source, `owner/name`, or its host; one campaign's many logs are one repository."""
    parts = source.split("://", 1)[-1].split("/")
    return "/".join(parts[1:3]) if parts[0] in ("github.com", "raw.githubusercontent.com") else parts[0]
