"""The one door to the arithmetic of all engines."""

from __future__ import annotations

from collections.abc import Mapping
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


ENGINES: Mapping[str, Engine] = {"sglang": sglang, "tensorrt_llm": tensorrt_llm, "vllm": vllm}


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
