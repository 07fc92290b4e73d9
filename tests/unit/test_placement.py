"""Which GPUs and ports replicas get: near to each other, and where they were."""

from __future__ import annotations

from typing import Any

import pytest

from gpuready.outcome import Failure
from gpuready.planning import topology
from gpuready.planning.placement import Former, claims, place
from gpuready.planning.topology import Topology

TWO_NODES = Topology((0, 0, 0, 0, 1, 1, 1, 1), (0,) * 8)
BRIDGED = Topology((0, 0, 1, 1), (0, 0, 2, 2))


def spec(*gpus: Any, count: int = 8) -> dict[str, Any]:
    names = "abcdef"
    return {
        "gpuready_gpu_count": count,
        "gpuready_deployments": [{"name": names[index], "gpus": one} for index, one in enumerate(gpus)],
    }


def refused(*gpus: Any, count: int = 8) -> list[str]:
    _, failures = claims("h1", spec(*gpus, count=count))
    return [failure.sentence() for failure in failures]


def placed(
    declared: dict[str, Any],
    shapes: dict[str, tuple[int, int]],
    lie: Topology = TWO_NODES,
    former: Former | None = None,
) -> dict[str, list[tuple[list[int], int]]]:
    found, failures = claims("h1", declared)
    assert failures == list[Failure]()
    made = place(found, shapes, lie, former or {})
    assert all([one["index"] for one in parts] == list(range(len(parts))) for parts in made.values())
    return {name: [(one["gpus"], one["port"]) for one in parts] for name, parts in made.items()}


def test_replicas_stay_where_they_are() -> None:
    former = {"b": [{"index": 0, "gpus": [0, 1], "port": 18100}, {"index": 1, "gpus": [4, 5], "port": 18107}]}
    found = placed(spec(2, 4), {"a": (2, 1), "b": (2, 2)}, former=former)
    assert found["b"] == [([0, 1], 18100), ([4, 5], 18107)]
    assert found["a"] == [([2, 3], 18101)]


def test_a_replica_more_leaves_the_others_where_they_are() -> None:
    former = {"a": [{"index": 0, "gpus": [5], "port": 18105}]}
    assert placed(spec(2), {"a": (1, 2)}, former=former)["a"] == [([5], 18105), ([4], 18100)]


def test_replicas_of_another_size_are_placed_anew_and_keep_their_ports() -> None:
    former = {"a": [{"index": 0, "gpus": [3], "port": 18105}]}
    assert placed(spec(2), {"a": (2, 1)}, former=former)["a"] == [([0, 1], 18105)]


def test_a_replica_stays_within_a_numa_node() -> None:
    found = placed(spec(3, 4), {"a": (3, 1), "b": (4, 1)})
    # Who needs most GPUs at once chooses first.
    assert found == {"a": [([4, 5, 6], 18100)], "b": [([0, 1, 2, 3], 18101)]}


def test_small_ones_fill_what_is_begun() -> None:
    found = placed(spec([1], 2, 1), {"a": (1, 1), "b": (2, 1), "c": (1, 1)})
    assert found["b"] == [([0, 2], 18101)]
    assert found["c"] == [([3], 18102)]


def test_a_replica_stays_among_the_gpus_that_nvlink_joins() -> None:
    found = placed(spec([1], 2, count=4), {"a": (1, 1), "b": (2, 1)}, BRIDGED)
    assert found["b"] == [([2, 3], 18101)]


def test_where_no_group_is_large_enough_any_gpus_will_do() -> None:
    found = placed(spec([0], [4], 6), {"a": (1, 1), "b": (1, 1), "c": (6, 1)})
    assert found["c"] == [([1, 2, 3, 5, 6, 7], 18102)]


def test_named_gpus_go_before_counted_ones_and_are_divided_among_replicas() -> None:
    found = placed(spec(2, [0, 1, 5, 6]), {"a": (2, 1), "b": (2, 2)})
    assert found == {"a": [([2, 3], 18100)], "b": [([0, 1], 18101), ([5, 6], 18102)]}


def test_shared_gpus_are_nobody_elses() -> None:
    found = placed(spec({"shared": 0}, {"shared": 0}, 1), {"a": (1, 1), "b": (1, 1), "c": (1, 1)})
    assert found == {"a": [([0], 18100)], "b": [([0], 18101)], "c": [([1], 18102)]}


def test_a_replica_knows_its_numa_node() -> None:
    found, _ = claims("h1", spec(1, 8))
    made = place({"a": found["a"]}, {"a": (1, 1)}, Topology((None, 1), (None, None)), {})
    assert made["a"][0]["numa_node"] is None
    made = place({"b": found["b"]}, {"b": (8, 1)}, TWO_NODES, {})
    assert made["b"][0]["numa_node"] is None
    made = place({"a": found["a"]}, {"a": (1, 1)}, TWO_NODES, {"a": [{"index": 0, "gpus": [6], "port": 1}]})
    assert made["a"][0]["numa_node"] == 1


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (([0, 1], [1, 2]), "deployment b, gpus = [1, 2]: GPU 1 is taken by another deployment; free are [2, 3, 4"),
        (({"shared": 1}, [1]), "deployment b, gpus = [1]: GPU 1 is shared by others"),
        (({"shared": 0}, 8), "deployments ask for 9 GPUs (b 8, shared 1): gpuready_gpu_count is 8"),
        (({"shared": 8},), "gpus = {'shared': 8}: there is no GPU 8"),
        (([0, 0],), "a GPU is named twice"),
    ],
)
def test_what_cannot_be_had_is_refused(gpus: tuple[Any, ...], words: str) -> None:
    assert any(words in sentence for sentence in refused(*gpus))


# How GPUs lie ---------------------------------------------------------------------------------------------------------


def facts(peers: list[list[str] | None], nodes: list[int | None] | None = None) -> dict[str, Any]:
    return {
        "gpus": [{"numa_node": node} for node in nodes or [None] * len(peers)],
        "nvml": {"gpus": [{"pci_address": f"g{index}", "nvlink_peers": one} for index, one in enumerate(peers)]},
    }


@pytest.mark.parametrize(
    ("peers", "islands"),
    [
        ([["s0", "s1"], ["s1"], ["s0"]], (0, 0, 0)),
        ([["g1"], ["g0"], ["g3"], ["g2"]], (0, 0, 2, 2)),
        ([["g1", "g2"], ["g0"], ["g0"], []], (0, 0, 0, None)),
        ([[], []], (None, None)),
        ([["g1"], None], (0, 0)),
    ],
)
def test_islands_are_what_links_lead_to(peers: list[list[str] | None], islands: tuple[int | None, ...]) -> None:
    found = topology.of_facts(facts(peers), len(peers), joined=True)
    assert found.islands == islands
    assert found.widest == max((islands.count(one) for one in islands if one is not None), default=0)


def test_what_is_not_told_is_taken_from_the_card() -> None:
    assert topology.of_facts({"gpus": [{}]}, 2, joined=True) == Topology((None, None), (0, 0))
    assert topology.of_facts({}, 2, joined=False) == Topology((None, None), (None, None))
    assert topology.of_facts({}, 1, joined=True).widest == 0
