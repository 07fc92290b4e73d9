"""The one door to the arithmetic of all engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from gpuready.planning.memory import sglang, tensorrt_llm, vllm
from gpuready.planning.memory.run import Device, Estimate, Run
from gpuready.planning.memory.versions import ConstantSet, Unresolved, resolve
from gpuready.planning.model.facts import ModelFacts

__all__ = ["ENGINES", "Unresolved", "estimate", "request_gib"]


class Engine(Protocol):
    """One engine's own arithmetic, with the set of constants beside."""

    def estimate(self, model: ModelFacts, device: Device, run: Run, constants: ConstantSet) -> Estimate:
        """Return where the memory of the fullest GPU goes."""

    def request_gib(self, model: ModelFacts, run: Run, constants: ConstantSet, tokens: int) -> float:
        """Return what one request of that many tokens takes of a GPU's KV cache."""


_SPELLED = {
    "auto": None,
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}


@dataclass(frozen=True)
class _Casting:
    """An engine that runs checkpoints in 32 bits in 16 where nothing is said.

    vllm/config/model.py::_resolve_auto_dtype (vllm/config.py before 0.10), sglang/srt/configs/model_config.py::
    _get_and_verify_dtype. Which of the two types it takes depends on card and model, and changes no size.
    """

    engine: Engine

    def estimate(self, model: ModelFacts, device: Device, run: Run, constants: ConstantSet) -> Estimate:
        """Return where the memory of the fullest GPU goes."""
        return self.engine.estimate(model, device, _typed(model, run), constants)

    def request_gib(self, model: ModelFacts, run: Run, constants: ConstantSet, tokens: int) -> float:
        """Return what one request of that many tokens takes of a GPU's KV cache."""
        return self.engine.request_gib(model, _typed(model, run), constants, tokens)


def _typed(model: ModelFacts, run: Run) -> Run:
    dtype = _SPELLED.get(run.dtype, run.dtype) if run.dtype else None
    if dtype is None and model.dtype == "float32" and model.quantization is None:
        dtype = "float16"
    return run if dtype == run.dtype else replace(run, dtype=dtype)


ENGINES: Mapping[str, Engine] = {
    "sglang": _Casting(sglang),
    "tensorrt_llm": tensorrt_llm,
    "vllm": _Casting(vllm),
}


def estimate(model: ModelFacts, device: Device, run: Run) -> Estimate:
    """Return where the memory of the fullest GPU goes; never refuses what does not fit, but says so in the answer.

    Raises:
        Unresolved: when the version does not resolve to one set of constants.
    """
    constants = resolve(run.engine, run.version)
    return ENGINES[run.engine].estimate(model, device, run, constants)


def request_gib(model: ModelFacts, run: Run, tokens: int) -> float:
    """Return what one request of that many tokens takes of a GPU's KV cache, with the engine's rounding."""
    constants = resolve(run.engine, run.version)
    return ENGINES[run.engine].request_gib(model, run, constants, tokens)
