"""How long a start may take: from bytes and read rate, from the engine's options, or as declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuready.operations import pace
from gpuready.serving.layout import Layout
from gpuready.serving.releases import Store

GIB = 1024**3


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Layout(root=tmp_path / "server"), "chat")


def plan(folder: Path, **options: Any) -> dict[str, Any]:
    given = [{"name": name, "value": value, "why": ""} for name, value in options.items()]
    return {"model_path": str(folder), "start_seconds": 700, "options": {"batching": given}}


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 8 GiB on a disk that reads 0.5 GiB a second."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(4 * GIB)
    monkeypatch.setattr(pace, "read_rate", lambda _: GIB / 2)
    return folder


def test_bytes_and_rate_count_four_times_and_the_engine_compiles(store: Store, weights: Path) -> None:
    found = pace.limit(store, 0, plan(weights))
    assert found.seconds == 600 + 4 * 16
    assert found.note == "a start may take 664 s (8.6 GB of weights at 537 MB/s, 600 s for the engine)"


@pytest.mark.parametrize("name", ["enforce-eager", "disable-cuda-graph"])
def test_an_engine_that_compiles_nothing_has_less(store: Store, weights: Path, name: str) -> None:
    assert pace.limit(store, 0, plan(weights, **{name: True})).seconds == 180 + 4 * 16
    assert pace.limit(store, 0, plan(weights, **{name: False})).seconds == 600 + 4 * 16


def test_what_took_long_before_may_take_thrice_as_long(store: Store, weights: Path) -> None:
    number = store.add({"plan.json": "{}"})
    store.mark_verified(number, 0, {"seconds_to_first_token": 900.0})
    found = pace.limit(store, 0, plan(weights))
    assert found.seconds == 2700
    assert "its longest start took 900 s" in found.note


def test_the_operators_own_limit_wins(store: Store, weights: Path) -> None:
    found = pace.limit(store, 0, plan(weights), 45)
    assert (found.seconds, found.note) == (45, "a start may take 45 s (serving_start_seconds)")


def test_weights_that_cannot_be_read_leave_the_plans_limit(store: Store, tmp_path: Path) -> None:
    assert pace.limit(store, 0, plan(tmp_path / "none")) == pace.Limit(700, "")
