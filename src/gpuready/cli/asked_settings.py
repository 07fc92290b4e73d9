"""Reads settings of a run from the command line: `--set name=value`, `--context`, `--lora`."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields

from gpuready.cli.refusing import nearest, refused
from gpuready.cli.verb import number, whole
from gpuready.planning import flags, support
from gpuready.planning.memory.run import Lora, Run

MOST_TOKENS = 100_000_000
_OWN = ("engine", "version", "draft", "lora", "task")
_HINTS = typing.get_type_hints(Run)
_ELSEWHERE = {**{name: f"--{name}" for name in _OWN}, "dp": "--gpus, from which the planner makes replicas"}
SETTINGS = tuple(one.name for one in fields(Run) if one.name not in _ELSEWHERE)


def settings(pairs: Sequence[str], context: int | None) -> dict[str, int | float | str]:
    """Return what `--set name=value` and `--context` say, by the names of `Run`; flags' spelling is taken too."""
    found: dict[str, int | float | str] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        key = name.lstrip("-").replace("-", "_")
        key = {"gpu_memory_utilization": "memory_fraction", "mem_fraction_static": "memory_fraction"}.get(key, key)
        if not sign or key not in SETTINGS:
            why = "" if sign else "the form is name=value"
            fix = f"say it with {_ELSEWHERE[key]}" if key in _ELSEWHERE else nearest(key, SETTINGS, most=20)
            raise refused("plan.setting", f"--set {pair}: no such setting", why, fix)
        if key in found:
            raise refused("plan.setting", f"--set {pair}: {key} is set twice", "", "set it once")
        try:
            found[key] = _value(key, text)
        except ValueError as error:
            raise refused("plan.setting", f"--set {pair} is refused", str(error)) from error
    if context is not None:
        if found.get("max_model_len", context) != context:
            what = f"--context {context} and --set max_model_len={found['max_model_len']} contradict each other"
            raise refused("plan.contradiction", what, "", "say one of them")
        found["max_model_len"] = context
    return found


def _value(key: str, text: str) -> int | float | str:
    kinds = {one for one in typing.get_args(_HINTS[key]) if one is not type(None)} or {_HINTS[key]}
    if bool in kinds:
        if text not in ("true", "false"):
            raise ValueError("allowed are true and false")
        return text == "true"
    if float in kinds:
        return number(0.01, 1.0)(text)
    if int in kinds:
        known = flags.SETTINGS.get(key)
        return whole(1, known.most if known else MOST_TOKENS)(text)
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", text):
        raise ValueError("allowed are letters, digits and _ . -")
    return text


def of_engine(runs: tuple[str, str], said: Mapping[str, int | float | str]) -> None:
    """Refuse settings that the engine's release does not have, or has under another name."""
    taken = {name: support.flag(*runs, name) for name in SETTINGS}
    for name in said:
        if taken[name] is None:
            raise refused("plan.setting", f"--set {name}: {' '.join(runs)} has no such setting", "", "leave it out")
        if name == "chunked_prefill_size" and taken[name] == taken["max_num_batched_tokens"]:
            what = f"--set {name}: {' '.join(runs)} has no such setting"
            raise refused("plan.setting", what, "", "set max_num_batched_tokens")


def lora(text: str) -> Lora:
    """Read `SLOTSxRANK`."""
    slots, _, rank = text.partition("x")
    try:
        return Lora(whole(1, 1024)(slots), whole(1, 1024)(rank))
    except ValueError as error:
        raise ValueError("the form is SLOTSxRANK, e.g. 4x16") from error
