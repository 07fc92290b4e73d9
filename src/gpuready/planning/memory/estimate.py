"""The one door to the arithmetic of all engines."""

from __future__ import annotations

from gpuready.planning.memory.run import Device, Estimate, Run
from gpuready.planning.model.facts import ModelFacts


class Unresolved(ValueError):
    """An engine or a version for which there is no set of constants; the message says which there are."""


def estimate(model: ModelFacts, device: Device, run: Run) -> Estimate:
    """Return where the memory of the fullest GPU goes; never refuses what does not fit, but says so in the answer.

    Raises:
        Unresolved: when the version does not resolve to one set of constants.
    """
    raise NotImplementedError


def request_gib(model: ModelFacts, run: Run, tokens: int) -> float:
    """Return what one request of that many tokens takes of a GPU's KV cache, with the engine's rounding."""
    raise NotImplementedError
