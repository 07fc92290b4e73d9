"""What the planner's arithmetic costs: an evaluation by each engine, beside reading a config.json (the floor).

    .venv/bin/pytest -s --long tests/bench/test_planner.py

Nothing here judges time: it says something about the machine. What carries over are the ratios, measured in turns in
one run. The aims, 10,000 evaluations in 10 seconds and a host searched in one, stand beside what was measured.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping

import pytest
from rich.console import Console
from rich.table import Table
from sim.machine.common import CHECKOUT

from gpuready.planning.memory.device import device
from gpuready.planning.memory.estimate import ENGINES, estimate
from gpuready.planning.memory.run import Run
from gpuready.planning.model import known
from gpuready.planning.model.config import read_facts

pytestmark = pytest.mark.long

TURNS = 7
EVALUATIONS = 10_000
REPORT = CHECKOUT / ".cache/reports/bench-planner.json"
MODELS = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B", "google/gemma-3-27b-it", "deepseek-ai/DeepSeek-R1")
VERSIONS = {"vllm": "0.19.1", "sglang": "0.5.10", "tensorrt_llm": "1.1.0"}
FLOOR = "json.loads of a config.json"


def cost(call: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the seconds of one call, from as many as fit into the time given."""
    calls, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        call()
        calls += 1
    return (time.perf_counter() - started) / calls


def subjects() -> Mapping[str, Callable[[], object]]:
    """Return what is measured, by name: each a call over all models."""
    found = [known.find(name) for name in MODELS]
    configs = [one.config for one in found if one is not None]
    assert len(configs) == len(MODELS)
    texts = [json.dumps(config) for config in configs]
    facts = [known.facts(name) for name in MODELS]
    card = device("h100-80gb-sxm")
    assert card is not None
    calls: dict[str, Callable[[], object]] = {
        FLOOR: lambda: [json.loads(text) for text in texts],
        "the sizes of its model": lambda: [read_facts(config) for config in configs],
    }
    for engine in ENGINES:
        run = Run(engine, VERSIONS[engine], tp=2)
        calls[f"one evaluation, {engine}"] = lambda run=run: [estimate(one, card, run) for one in facts]  # type: ignore[misc]
    return calls


def test_evaluations() -> None:
    calls = subjects()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            seconds[name].append(cost(call) / len(MODELS))
    floor = statistics.median(seconds[FLOOR])
    table = Table(title=f"The planner's arithmetic, medians of {TURNS} turns")
    for head in ("what", "microseconds", "times reading JSON", f"seconds for {EVALUATIONS:,} (aim: 10)"):
        table.add_column(head, justify="left" if head == "what" else "right")
    for name, turns in seconds.items():
        one = statistics.median(turns)
        table.add_row(name, f"{one * 1e6:.0f}", f"{one / floor:.1f}", f"{one * EVALUATIONS:.1f}")
    Console(width=120).print(table)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(seconds, indent=2) + "\n")
