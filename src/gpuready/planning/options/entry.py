"""One option or variable of an engine, and what is known of the deployment when its options are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuready.planning import support
from gpuready.planning.memory.run import GIB, Run
from gpuready.planning.wish import Option

GROUPS = ("model", "network", "parallel", "memory", "batching", "cache", "features", "stop", "declared")
"""Groups of options, in the order in which they stand in an engine's file; `declared` are the operator's own."""


@dataclass(frozen=True)
class Entry:
    """One option or variable."""

    name: str
    """In the engine's own spelling; a dot stands between the levels of a nested one."""
    value: Any
    why: str
    """The rule or the number of the plan that it follows from, in one short sentence."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"name": self.name, "value": self.value, "why": self.why}


@dataclass(frozen=True)
class Served:
    """Everything that the options of one deployment follow from."""

    declared: Mapping[str, Any]
    option: Option
    run: Run
    """The option's run, or on a stand-in's own small memory what the stand-in runs."""
    stand_in: Mapping[str, str]
    """Why fields of the run are not the plan's, by field; empty on a real engine."""
    stack: str
    stack_settings: Mapping[str, Any]
    stack_environment: Mapping[str, str]
    set_names: frozenset[str]
    """What the operator set of the plan's settings, in the engine's spelling: a stack's own settings do not win."""
    place: Mapping[str, Any] = field(default_factory=dict)
    """Where things lie on the server: model_path, engine_folder."""

    @property
    def engine(self) -> str:
        """The engine's key: vllm, sglang or tensorrt_llm."""
        return self.run.engine

    def flag(self, setting: str) -> str | None:
        """Return how the release spells a setting of `Run`; None where it has none for it."""
        return support.flag(self.run.engine, self.run.version, setting)

    def is_set(self, setting: str) -> bool:
        """Return whether the operator set a setting of `Run` under flags."""
        wish = self.option.wish
        return setting in wish.settings and setting not in wish.cured

    def why(self, setting: str, usual: str = "as the plan has it") -> str:
        """Return why a setting of `Run` has its value."""
        if setting in self.stand_in:
            return self.stand_in[setting]
        if self.is_set(setting):
            return "set under flags"
        if setting in self.option.wish.cured:
            return self.option.wish.cured[setting]
        return self.option.why.get(setting, usual)

    def entry(self, setting: str, value: Any = None, why: str = "") -> Entry | None:
        """Return a setting of `Run` as the release has it; None where it has none, or where nothing is said."""
        name = self.flag(setting)
        value = getattr(self.run, setting) if value is None else value
        if name is None or value is None:
            return None
        return Entry(name, value, why or self.why(setting))


def kv_tokens(name: str, served: Served) -> Entry:
    """Return the option of an engine that is told of its KV cache in tokens, not in bytes."""
    run = served.run
    told = run.kv_bytes or 0
    per_token = served.option.wish.model.kv_bytes_per_token() / (run.tp * run.pp)
    return Entry(name, int(told // max(1.0, per_token)), f"{served.why('kv_bytes')}: {told / GIB:.2f} GiB of KV cache")


def bare(name: str) -> str:
    """Return an option's name without what makes it a negative one."""
    return name.removeprefix("no-")
