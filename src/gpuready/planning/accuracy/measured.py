"""What an engine says that it has, beside what its plan says that it should have.

Both come from records: the plan of a release, and the figures that were read after its token. Where an engine tells
its tokens but not its bytes, or only its blocks, the rest follows in the plan's own proportion and is named so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuready.planning.memory.run import GIB

OTHERS_GIB = 0.5
"""What others may hold of a GPU before it is told: a display or a tool that watches has a context of its own."""
REPORT = "report it with the output of gpuready deployment status --json"


@dataclass(frozen=True)
class Cache:
    """A KV cache: GiB per GPU, tokens of the whole replica; None: not known."""

    kv_gib: float | None
    kv_tokens: int


@dataclass(frozen=True)
class Planned(Cache):
    """What a plan expects."""

    low: int | None = None
    """The band of the tokens; None where the plan gives none."""
    high: int | None = None
    blocks: int | None = None


@dataclass(frozen=True)
class Measured(Cache):
    """What an engine has."""

    derived: tuple[str, ...] = ()
    """What of it the engine did not tell: it follows from what it told, in the plan's proportion."""


@dataclass(frozen=True)
class Comparison:
    """A replica's KV cache, planned and measured."""

    planned: Planned
    measured: Measured | None
    gpus: int
    card: Planned | None = None
    """What was planned for the declared card, where the engine is a stand-in on the CPU; `planned` is then its own."""
    unread: str = ""
    """Why nothing was measured."""
    others_gib: float | None = None
    """What others hold of that GPU of the replica where they hold most; None: not known."""

    @property
    def difference(self) -> float | None:
        """Return the part of the planned tokens by which the engine has more, or less: -0.004."""
        return self.measured.kv_tokens / self.planned.kv_tokens - 1 if self.measured else None

    @property
    def within(self) -> bool | None:
        """Say whether the engine lies in the plan's band; None where one of them is not known."""
        if self.measured is None or self.planned.low is None or self.planned.high is None:
            return None
        return self.planned.low <= self.measured.kv_tokens <= self.planned.high

    def as_dict(self) -> dict[str, Any]:
        """Return it for machines."""
        return {
            "planned": asdict(self.planned),
            "planned_for_card": asdict(self.card) if self.card else None,
            "measured": asdict(self.measured) if self.measured else None,
            "unread": self.unread or None,
            "difference": self.difference,
            "within_band": self.within,
            "others_gib": self.others_gib,
        }

    def sentence(self, name: str) -> str:
        """Return what is shown of a replica, and what to do where it is not as planned."""
        each = " per GPU" if self.gpus > 1 else ""
        if self.card:
            planned = (
                f"{name}: planned {_size(self.card)} KV{each}, {self.card.kv_tokens:,} tokens for the card, which the "
                f"simulation cannot measure; its stand-in on the CPU was given {_size(self.planned)}, "
                f"{self.planned.kv_tokens:,} tokens"
            )
        else:
            planned = f"{name}: planned {_size(self.planned)} KV{each}, {self.planned.kv_tokens:,} tokens"
        if self.measured is None or self.difference is None:
            return f"{planned}; what the engine has could not be read ({self.unread or 'it does not say'})"
        percent = f"{100 * self.difference:+.1f} %"
        said = f"{planned}; the engine has {_size(self.measured)}, {self.measured.kv_tokens:,} ({percent})"
        return said if self.within is not False else f"{said}, outside the {self._band()}: {self._advice()}"

    def _band(self) -> str:
        low, high = self.planned.low, self.planned.high
        return f"{low:,} to {high:,} that follow from its bytes" if self.card else f"plan's {low:,} to {high:,}"

    def _advice(self) -> str:
        its = "its GPUs" if self.gpus > 1 else "its GPU"
        if self.card:
            return f"kv-cache-memory-bytes did not reach the engine, or the plan's bytes per token are wrong; {REPORT}"
        if (self.difference or 0) < 0:
            return f"fewer requests fit than planned; {self._others(its)}"
        return (
            f"the engine keeps more than planned, so less of {its} is left for its peaks; lower its memory fraction "
            f"under flags where it runs out of memory, and {REPORT}"
        )

    def _others(self, its: str) -> str:
        if self.others_gib is None:
            return f"see in nvidia-smi whether something else holds memory of {its}, and where nothing does {REPORT}"
        if self.others_gib < OTHERS_GIB:
            return f"nothing else holds memory of {its}, so {REPORT}"
        return f"others hold {self.others_gib:.1f} GiB of {its}, see which in nvidia-smi, stop them and restart it"


def compare(
    plan: Mapping[str, Any],
    engine: Mapping[str, Any] | None,
    unread: str = "",
    gpus: int = 1,
    others_gib: float | None = None,
) -> Comparison | None:
    """Compare a deployment's plan with an engine's figures (serving/figures.py); None where the plan has no KV cache.

    `unread` is why there are none, `gpus` how many GPUs the replica has, `others_gib` what others hold of one.
    """
    card = _planned(plan.get("memory"))
    stand_in = _stand_in(plan.get("stand_in"), engine or {})
    expected = stand_in or card
    if expected is None:
        return None
    figures = dict(engine or {})
    if stand_in and figures.get("blocks"):
        # Tokens as the engine counts them depend on its longest request; bytes were given, so blocks are compared.
        figures.pop("kv_tokens", None)
    measured = _measured(expected, figures)
    return Comparison(expected, measured, gpus, card if stand_in else None, "" if measured else unread, others_gib)


def _planned(memory: Any) -> Planned | None:
    """Read a plan's memory: figures with their bands, or numbers alone as plans before had them."""
    if not isinstance(memory, Mapping):
        return None
    gib, _, _ = _band_of(memory.get("kv", memory.get("kv_gib")))
    tokens, low, high = _band_of(memory.get("kv_tokens"))
    if not tokens or tokens < 1:
        return None
    blocks = memory.get("blocks")
    return Planned(
        gib,
        int(tokens),
        None if low is None else int(low),
        None if high is None else int(high),
        blocks if isinstance(blocks, int) and blocks > 0 else None,
    )


def _stand_in(given: Any, engine: Mapping[str, Any]) -> Planned | None:
    """Return what a stand-in's own bytes come to: whole blocks, so the engine may have up to one less."""
    if not isinstance(given, Mapping) or not given["bytes_per_token"]:
        return None
    tokens = int(given["kv_bytes"] // given["bytes_per_token"])
    return Planned(given["kv_bytes"] / GIB, tokens, tokens - int(engine.get("block_tokens") or 1) + 1, tokens)


def _measured(planned: Planned, engine: Mapping[str, Any]) -> Measured | None:
    tokens, gib, derived = engine.get("kv_tokens"), engine.get("kv_gib"), []
    if tokens is None and (blocks := engine.get("blocks")):
        # One request can take blocks of several groups of layers, and a block several GPUs: the plan knows, and an
        # engine's number of blocks alone does not.
        each = planned.kv_tokens / planned.blocks if planned.blocks else engine.get("block_tokens")
        tokens = round(blocks * each) if each else None
        derived.append("kv_tokens")
    if tokens is None:
        return None
    if gib is None and planned.kv_gib is not None:
        gib = planned.kv_gib * tokens / planned.kv_tokens
        derived.append("kv_gib")
    return Measured(gib, tokens, tuple(derived))


def _band_of(value: Any) -> tuple[float | None, float | None, float | None]:
    """Return value, low and high of a figure of a plan."""
    if isinstance(value, Mapping):
        return value.get("value"), value.get("low"), value.get("high")
    return (value, None, None) if isinstance(value, (int, float)) else (None, None, None)


def _size(cache: Cache) -> str:
    if cache.kv_gib is None:
        return "an unknown size of"
    return f"{cache.kv_gib:.1f} GiB" if cache.kv_gib >= 1 else f"{cache.kv_gib * 1024:.1f} MiB"
